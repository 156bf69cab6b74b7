"""The text of a family's file."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ptf.model.scaffold.reference import Reference
from ptf.model.scaffold.settings import Settings

WIDTH = 120
SMALLEST_VOCABULARY = 61  # that random_dense_config draws
DENSE_FIRST = '["dense"] * dense + ["sparse"] * (c["num_hidden_layers"] - dense)'
FUNCTIONS = (
    "layers_by_type",
    "common",
    "raise_if_unsupported",
    "random_types",
    "rope",
    "random_dense_config",
    "random_rope",
)
FROM_FAMILIES = {"DENSE", "OUTER", "ATTENTION", "NORMS", "MLP", "LAYER"}


@dataclass(frozen=True, slots=True)
class Skeleton:
    """What the file says."""

    reference: Reference
    settings: Settings
    mappings: tuple[str, ...]
    names: frozenset[str]  # that the mappings use
    nearest: str
    version: str  # of transformers

    def text(self, chosen: Mapping[str, str]) -> str:
        """Return the file, with what a comparison chose."""
        body = "\n\n\n".join([*self._constants(), self._config(chosen), self._random_config(), self._families()])
        return f"{self._head(body)}\n\n{body}\n"

    def _head(self, body: str) -> str:
        r, kind = self.reference, type(self.reference.model).__name__
        given = {
            "ptf.model.checkpoint_mapping": ["TensorMapping", *sorted(self.names - FROM_FAMILIES)],
            "ptf.model.config": _used(body, ["DecoderConfig", "Latent", "Layer", "MoE"]),
            "ptf.model.families": _used(body, [*sorted(FROM_FAMILIES), "Family", *FUNCTIONS]),
        }
        imports = "\n".join(_import(module, sorted(set(names), key=_order)) for module, names in given.items())
        replace = "from dataclasses import replace\n" if "replace(" in body else ""
        todo = "".join(f"TODO: {reason}.\n" for reason in self.settings.reasons)
        return (
            f'"""TODO: the models by name (`{kind}`): TODO: what differs from {self.nearest}, which is nearest.\n\n'
            f"Written by `ptf scaffold {r.model_type}` from transformers {self.version}; check every line.\n{todo}"
            f'"""\n\nimport random\nfrom collections.abc import Mapping\n{replace}from typing import Any\n\n{imports}'
        )

    def _constants(self) -> Iterable[str]:
        lines = "\n".join(f"    {line}" for line in self.mappings)
        mappings = "DENSE" if self.mappings == ("*DENSE,",) else f"(\n{lines}\n)"
        scaling = _table("SCALING", self.settings.scaling, "of rotary frequencies, where a config.json has none")
        text = f"MAPPINGS: tuple[TensorMapping, ...] = {mappings}\n"
        yield (text + self._defaults() + (scaling if self.settings.scaling else "") + self._unread()).rstrip("\n")

    def _defaults(self) -> str:
        """Return the values of transformers' class for what a config.json may leave out."""
        r, s = self.reference, self.settings
        leave = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
        leave |= {"layer_types", "mlp_layer_types", "rope_parameters", "rope_theta", "rope_scaling"}
        if not r.own_head_dim:
            leave.add("head_dim")
        # those that a directory's config.json sets otherwise: without them another config.json has the class's value
        other = {k for k, values in (s.unread | s.rule).items() if r.defaults[k] not in values}
        keys = [k for k in r.defaults if k in s.read | other | {"max_position_embeddings"} and k not in leave]
        return _table("DEFAULTS", {k: r.defaults[k] for k in keys}, "the reference's where a config.json has none")

    def _unread(self) -> str:
        s = self.settings
        unread = _table("UNREAD", s.unread, "settings that this file does not read → the values that it accepts")
        return unread + _table("RULE", s.rule, "the same, of those that count only without layer_types")

    def _config(self, chosen: Mapping[str, str]) -> str:
        s, name = self.settings, self.reference.model_type
        refused = [*(f'"{key}": {expression},' for key, expression in s.refused.items())]
        unread = "UNREAD" if s.unread else "{}"
        if s.unread or s.rule:
            refused.append("**{k: repr(c[k]) for k, values in unread.items() if c.get(k, values[0]) not in values},")
        lines = ["c = {**DEFAULTS, **c}"]
        if s.rule:
            whole = "{**UNREAD, **RULE}" if s.unread else "RULE"
            lines.append(f'unread = {unread} if c.get("layer_types") else {whole}')
        elif s.unread:
            refused[-1] = refused[-1].replace("in unread", "in UNREAD")
        if refused:
            lines += [
                "raise_if_unsupported(",
                f'    "{name}",',
                "    {",
                *(f"        {x}" for x in refused),
                "    },",
                ")",
            ]
        if s.by_kind:
            lines.append('parameters = c.get("rope_parameters") or SCALING')
            lines.append("tables = {k: rope(c, p, partial=1.0) for k, p in parameters.items() if isinstance(p, dict)}")
        else:
            lines.append(f"table = {s.rope}")
        lines += self._layers(chosen)
        if s.moe:
            moe = dict(s.moe) | {k: v for k, v in chosen.items() if k in ("normalise", "scores")}
            lines += ["moe = MoE(", *(f"    {k}={v}," for k, v in moe.items()), ")"]
        fields = dict(s.fields) | ({"moe": "moe"} if s.moe else {})
        if s.latent:
            last = c_or(s, "rope_interleave", "True")
            sizes = ", ".join(f'c["{k}"]' for k in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim"))
            fields |= {"latent": f"Latent({sizes}, {last})"}
        common = "c"
        if s.epsilon != "rms_norm_eps":
            common = f'{{**c, "rms_norm_eps": c["{s.epsilon}"]}}'
        if s.latent:
            inside = '**c, "head_dim": c["qk_nope_head_dim"] + c["qk_rope_head_dim"]'
            common = f"{{{inside}}}" if common == "c" else common.replace("**c", inside)
        tied = fields.pop("tied")
        lines += ["return DecoderConfig(", f"    **common({common}),", f"    tied={tied},", "    layers=layers,"]
        lines += [*(f"    {k}={v}," for k, v in fields.items()), ")"]
        head = 'def config(c: Mapping[str, Any]) -> DecoderConfig:\n    """Map a config.json to a DecoderConfig; raise '
        return head + 'UserError for settings that are not implemented."""\n' + _indented(lines)

    def _layers(self, chosen: Mapping[str, str]) -> list[str]:
        s = self.settings
        lines, moe = [], ""
        if s.moe:
            moe = f"moe={s.sparse}"
            if s.mlp_types is not None:
                lines += [f"dense = {s.mlp_types}", f'kinds = c.get("mlp_layer_types") or {DENSE_FIRST}']
        if s.types is None:
            window = "" if s.window == "None" else f", {s.window}"
            if not moe or s.sparse == "True":
                return [
                    *lines,
                    f'layers = (Layer(table{window}{", moe=True" if moe else ""}),) * c["num_hidden_layers"]',
                ]
            each = f"Layer(table{window}, {moe})"
            return [*lines, f'layers = tuple({each} for i in range(c["num_hidden_layers"]))']
        if s.types:
            several = len(s.types) > 1
            lines += [f"rule = {literal(s.types)}"] if several else []
            each = "rule[i % len(rule)]" if several else literal(s.types[0])
            i, count = "i" if several else "_", 'c["num_hidden_layers"]'
            lines.append(f'types = c.get("layer_types") or [{each} for {i} in range({count})]')
        else:
            lines.append('types = c["layer_types"]')
        full = "replace(table, partial=0.0)" if chosen.get("nope") else "table"
        if full != "table":
            when = ' if c.get("sliding_window") is not None else table' if chosen["nope"] == "with a window" else ""
            lines.append(f"full = {full}{when}  # no positions")
            full = "full"
        ropes = "tables" if s.by_kind else f'{{"full_attention": {full}, "sliding_attention": table}}'
        given = "c"
        if s.switched:
            lines.append('window = c["sliding_window"] if c["use_sliding_window"] else None')
            given = '{**c, "sliding_window": window}'
        lines.append(f"layers = layers_by_type({given}, types, {ropes})")
        if moe:
            lines.append(f"layers = tuple(replace(kind, {moe}) for i, kind in enumerate(layers))")
        return lines

    def _random_config(self) -> str:
        s = self.settings
        lines = [
            *s.drawn,
            "c = random_dense_config(",
            "    r,",
            f'    "{self.reference.model_type}",',
            *(f"    {k}={v}," for k, v in self._arguments().items()),
            ")",
            *self._sizes(),
        ]
        if s.mlp_types is not None:
            kinds = '[r.choice(["dense", "sparse"]) for _ in range(c["num_hidden_layers"] - 1)]'
            lines.append(f'c["mlp_layer_types"] = [*{kinds}, "sparse"]')
        if s.partial is not None and not s.latent and not s.by_kind:
            share = 'r.choice([{}, {"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 1.0}])'
            lines.append(f'c["rope_parameters"] |= {share}')
        lines += self._random_types()
        head = "def random_config(r: random.Random) -> dict[str, Any]:\n"
        return head + '    """Return a small random config.json for the verifier."""\n' + _indented(lines)

    def _arguments(self) -> dict[str, str]:
        """Return what is passed to random_dense_config."""
        s, r = self.settings, self.reference
        other = [k for k in r.given if k in r.defaults and r.given[k] != r.defaults[k]]
        ours = {k: values for k, values in (s.unread | s.rule).items() if k in other and r.given[k] in values}
        arguments = {k: _one_of(values) for k, values in ours.items()}
        for key, default in r.defaults.items():
            # transformers' embedding refuses a padding id outside the small vocabulary; other ids change nothing
            if key == "pad_token_id" and isinstance(default, int) and default >= SMALLEST_VOCABULARY:
                arguments[key] = "0"
        arguments |= s.varied
        return arguments | {
            k: literal(r.given[k]) for k in other if k in s.refused and not isinstance(r.given[k], list | tuple)
        }

    def _sizes(self) -> list[str]:
        """Return the lines that make the sizes such as transformers' class can have."""
        s, r, lines = self.settings, self.reference, []
        if s.latent:
            lines += ['del c["head_dim"]', 'c["num_key_value_heads"] = c["num_attention_heads"]']
        elif r.optional_head_dim and s.partial is None:
            lines += [
                "if r.random() < 0.3:  # a head has hidden_size / num_attention_heads dimensions",
                '    del c["head_dim"]',
            ]
        elif "head_dim" not in r.defaults or r.square:
            size = 'r.choice([8, 16] if c["num_attention_heads"] > 3 else [32])'
            if r.square:
                lines.append(f'c["head_dim"] = {size}')
                lines.append('c["hidden_size"] = c["num_attention_heads"] * c["head_dim"]')
            else:
                lines += ['del c["head_dim"]', f'c["hidden_size"] = c["num_attention_heads"] * {size}']
        if "num_key_value_heads" not in r.defaults:
            lines.append('c["num_key_value_heads"] = c["num_attention_heads"]')
        return lines

    def _random_types(self) -> list[str]:
        """Return the last lines, which draw the kinds of the layers."""
        s, r = self.settings, self.reference
        if s.types is None or "sliding_window" not in s.read:
            return ["return c"]
        full = '{"layer_types": ["full_attention"] * c["num_hidden_layers"]}'
        lines = ['types = random_types(r, c["num_hidden_layers"])']
        if s.switched:
            lines += ['if not types or not c["use_sliding_window"]:', f"    types = {full}"]
        elif s.null_window:
            more = "" if s.types else "not types or "
            lines += [f'if {more}c["sliding_window"] is None:  # then no layer has one', f"    types = {full}"]
        elif not s.types:
            lines.append(f"types = types or {full}")
        listed = {k: r.given[k] for k, values in s.rule.items() if k in r.given and r.given[k] not in values}
        if listed:
            lines += ["if types:  # with which these change nothing", f"    types |= {literal(listed)}"]
        return [*lines, "return c | types"]

    def _families(self) -> str:
        name = self.reference.model_type
        return f'FAMILIES = {{"{name}": Family("{name}", config, MAPPINGS, random_config)}}'


def _one_of(values: list[Any]) -> str:
    return literal(values[0]) if len(values) == 1 else f"r.choice({literal(values)})"


def c_or(s: Settings, key: str, otherwise: str) -> str:
    """Return the expression of a setting that is read, or another one."""
    return f'c["{key}"]' if key in s.read else otherwise


def _indented(lines: Iterable[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def _table(name: str, values: Mapping[str, Any], comment: str) -> str:
    if not values:
        return f"{name}: Mapping[str, Any] = {{}}\n" if name == "DEFAULTS" else ""
    lines = "".join(f'    "{key}": {literal(value)},\n' for key, value in values.items())
    return f"{name}: Mapping[str, Any] = {{  # {comment}\n{lines}}}\n"


def literal(value: Any) -> str:
    """Return the value as Python with the quotes that ruff writes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(literal, value)) + "]"
    return repr(value)


def _used(text: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if re.search(rf"\b{name}\b", text)]


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, as ruff sorts them."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def _import(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
