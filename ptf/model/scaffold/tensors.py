"""Which of ptf's parameters each tensor of a checkpoint is: by its name, its shape, and where it is used."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ptf.errors import UserError
from ptf.model.checkpoint_mapping import Rename
from ptf.model.families import ATTENTION, MLP, NORMS, OUTER
from ptf.model.scaffold.reference import Reference, patterns
from ptf.model.scaffold.structure import ATTENTION as ATTENTION_NAME
from ptf.model.scaffold.structure import MLP as MLP_NAME
from ptf.model.scaffold.structure import Structure

PIECES = {"OUTER": OUTER, "ATTENTION": ATTENTION, "NORMS": NORMS, "MLP": MLP}
OUTSIDE = {
    "embed": r"(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings)",
    "norm": r"(norm|final_layernorm|ln_f|norm_f|final_norm)",
    "head": r"(lm_head|embed_out|output)",
}
PROJECTIONS = {"q": "q_proj|wq", "k": "k_proj|wk", "v": "v_proj|wv", "o": "o_proj|out_proj|dense|wo"}
FUSED_QKV = r"qkv_proj|query_key_value|Wqkv|W_pack|qkv"
QK_NORM = {"q": r"q_norm|q_layernorm|query_layernorm|query_norm", "k": r"k_norm|k_layernorm|key_layernorm|key_norm"}
UNGATED = "c_fc|fc1|dense_h_to_4h"
GATED = {
    "gate": "gate_proj|w1|gate",
    "up": f"up_proj|w3|up|{UNGATED}",
    "down": "down_proj|w2|down|c_proj|fc2|dense_4h_to_h",
}
LATENT = {
    "q_a_proj": "q_a_proj",
    "q_a_norm": "q_a_layernorm",
    "q_b_proj": "q_b_proj",
    "kv_a_proj": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
    "kv_b_proj": "kv_b_proj",
}


@dataclass(slots=True)
class TensorPlan:
    """The mappings that were found, and the tensors that have none."""

    # (class of the mapping, our names, their pattern)
    found: list[tuple[str, tuple[str, ...], str]] = field(default_factory=list)
    unmapped: dict[str, tuple[int, ...]] = field(default_factory=dict)  # pattern → shape

    def has(self, end: str) -> bool:
        """Return whether one of our parameters whose name ends so is mapped."""
        return any(name.endswith(end) for _, ours, _ in self.found for name in ours)


def tensor_plan(reference: Reference, structure: Structure) -> TensorPlan:
    """Map every tensor of the small model's checkpoint."""
    plan = TensorPlan()
    for name, shape in sorted(patterns(reference.shapes).items()):
        one = _mapped(name, shape, reference.settings, structure)
        if one is None or any(set(one[1]) & set(ours) for _, ours, _ in plan.found):
            plan.unmapped[name] = shape
        else:
            plan.found.append((*one, name))
    return plan


def _mapped(
    name: str, shape: tuple[int, ...], c: Mapping[str, Any], structure: Structure
) -> tuple[str, tuple[str, ...]] | None:
    """Return the class of a tensor's mapping and our names, or None."""
    if "{i}" not in name:
        for ours, theirs in OUTSIDE.items():
            if re.fullmatch(rf"(.*\.)?{theirs}\.weight", name):
                return "Rename", (f"{ours}.weight",)
        return None
    tail = name.partition("{i}.")[2]
    part, _, inner = tail.partition(".")
    if part in structure.norms and inner == "weight":
        return "Rename", (f"layers.{{i}}.{structure.norms[part]}.weight",)
    renamed = part not in structure.children  # by transformers, when it saves
    if part == structure.attention or (renamed and ATTENTION_NAME.search(part)):
        return _attention(inner, shape, c)
    if part == structure.mlp or (renamed and MLP_NAME.search(part)):
        return _mlp(inner, shape, c)
    return None


def _attention(inner: str, shape: tuple[int, ...], c: Mapping[str, Any]) -> tuple[str, tuple[str, ...]] | None:
    ours = "layers.{i}.attn."
    heads = c.get("num_attention_heads") or 1
    kv = c.get("num_key_value_heads") or heads
    size = c.get("head_dim") or c.get("hidden_size", 0) // heads
    latent = "kv_lora_rank" in c
    for p, theirs in PROJECTIONS.items():
        if found := re.fullmatch(rf"({theirs})\.(weight|bias)", inner):
            rows = {"q": heads * size, "k": kv * size, "v": kv * size}.get(p, shape[0])
            fits = latent or shape[0] == rows
            return ("Rename", (f"{ours}{p}_proj.{found[2]}",)) if fits else None
    if found := re.fullmatch(rf"({FUSED_QKV})\.(weight|bias)", inner):
        fits = shape[0] == (heads + 2 * kv) * size
        return ("Concatenate", tuple(f"{ours}{p}_proj.{found[2]}" for p in "qkv")) if fits else None
    for p, theirs in QK_NORM.items():
        if re.fullmatch(rf"({theirs})\.weight", inner):
            width = {"q": heads, "k": kv}[p] * size
            kind = "norm" if shape == (size,) else "width_norm" if shape == (width,) else None
            return ("Rename", (f"{ours}{p}_{kind}.weight",)) if kind else None
    if latent:
        for mine, theirs in LATENT.items():
            if found := re.fullmatch(rf"{theirs}\.(weight|bias)", inner):
                return "Rename", (f"{ours}{mine}.{found[1]}",)
    return ("Rename", (f"{ours}sinks",)) if inner == "sinks" else None


def _mlp(inner: str, shape: tuple[int, ...], c: Mapping[str, Any]) -> tuple[str, tuple[str, ...]] | None:
    mlp, moe = "layers.{i}.mlp.", "layers.{i}.moe."
    experts = next((c[k] for k in EXPERTS if c.get(k)), 0)
    if re.fullmatch(r"(gate|router|router\.gate|router\.layer|gate\.wg)\.weight", inner) and shape[0] == experts:
        return "Rename", (f"{moe}router.weight",)
    if inner.endswith("e_score_correction_bias") and shape == (experts,):
        return "Bits", (f"{moe}correction_bias",)
    if inner == "shared_expert_gate.weight":
        return "Rename", (f"{moe}shared_gate.weight",)
    if found := re.fullmatch(r"(.*?)(\w+)\.(weight|bias)", inner):
        before, last, kind = found[1], found[2], found[3]
        for p, theirs in GATED.items():
            if not re.fullmatch(theirs, last):
                continue
            if before == "":
                return "Rename", (f"{mlp}{p}_proj.{kind}",)
            if re.fullmatch(r"shared_(experts?|mlp)\.", before):
                return "Rename", (f"{moe}shared.{p}_proj.{kind}",)
            if before == "experts.{e}." and kind == "weight":
                return "Stack", (f"{moe}experts.{p}_proj",)
        if last in ("gate_up_proj", "gate_and_up_proj") and before == "":
            return "Concatenate", tuple(f"{mlp}{p}_proj.{kind}" for p in ("gate", "up"))
    width = c.get("hidden_size")
    if len(shape) == 3 and shape[0] == experts and width in shape[1:]:  # the experts' tensors, stacked
        if shape[2] == width and not shape[1] % 2 and not re.search("down|output", inner):
            return STACKED_CONCATENATE, (f"{moe}experts.gate_proj", f"{moe}experts.up_proj")
        if shape[1] == width and re.search("down|output", inner):
            return "Rename", (f"{moe}experts.down_proj",)
    return None


STACKED_CONCATENATE = "Concatenate in each expert"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def mapping_lines(plan: TensorPlan, optional: Mapping[str, str]) -> tuple[list[str], set[str]]:
    """Return the lines of MAPPINGS, and the names that they use.

    Where all that was found of a piece that families share is called as it is there, the piece is used. `optional` are
    tensors of other settings, their pattern → our name.
    """
    simple = {ours[0]: theirs for kind, ours, theirs in plan.found if kind == "Rename"}
    simple |= {ours: theirs for theirs, ours in optional.items()}
    all_ours = {name for _, ours, _ in plan.found for name in ours}
    lines, used, covered = [], set(), set()
    for piece, mappings in PIECES.items():
        pairs = {m.name: m.other for m in mappings if isinstance(m, Rename)}
        here = [name for name in pairs if name in simple]
        if here and all(simple.get(n) == t for n, t in pairs.items() if n in all_ours or n in simple):
            lines.append(f"*{piece},")
            used.add(piece)
            covered.update(here)
    if {"OUTER", "ATTENTION", "NORMS", "MLP"} <= used:
        lines, used = ["*DENSE,"], {"DENSE"}
    rest = [(k, o, t) for k, o, t in plan.found if not set(o) <= covered]
    rest += [("Rename", (o,), t) for t, o in optional.items() if o not in covered and o not in all_ours]
    for kind, ours, theirs in rest:
        names = f'"{ours[0]}"' if len(ours) == 1 else "(" + ", ".join(f'"{n}"' for n in ours) + ")"
        kind, more = ("Concatenate", ", dim=1") if kind == STACKED_CONCATENATE else (kind, "")
        used.add(kind)
        lines.append(f"{kind}({names}, {_theirs(theirs, used)}{more}),")
    return lines, used


def _theirs(name: str, used: set[str]) -> str:
    if not name.startswith("model.layers.{i}."):
        return f'"{name}"'
    used.add("LAYER")
    rest = name.removeprefix("model.layers.{i}.").replace("{e}", "{{e}}")
    return f'f"{{LAYER}}{rest}"'


def optional_tensors(reference: Reference, structure: Structure) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each yes-or-no setting that adds or removes parameters: the setting, and pattern → our name ("" if
    none)."""
    here = patterns(reference.shapes)
    for key, value in reference.settings.items():
        if not isinstance(value, bool) or key in reference.general or key == "tie_word_embeddings":
            continue
        try:
            model = reference.built(**{key: not value})
        except UserError:
            continue
        there = patterns({n: tuple(p.shape) for n, p in model.state_dict().items()})
        mine = patterns({n: tuple(p.shape) for n, p in reference.model.state_dict().items()})
        changed = {n: s for n, s in (there | mine).items() if (n in there) != (n in mine)}
        if not changed:
            continue
        settings = model.config.to_dict()
        yield (
            key,
            {
                n: (one[1][0] if (one := _mapped(n, s, settings, structure)) else "")
                for n, s in changed.items()
                if n in here or n not in mine
            },
        )
