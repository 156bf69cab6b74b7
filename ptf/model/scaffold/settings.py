"""Which field of `DecoderConfig` each setting is, as expressions of a config.json `c`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ptf.errors import UserError
from ptf.model.scaffold.effects import NONE as NO_EFFECT
from ptf.model.scaffold.effects import effect, of_the_rule
from ptf.model.scaffold.reference import LAYERS, TOKENS, Reference, default_types, pattern, runs
from ptf.model.scaffold.structure import Structure
from ptf.model.scaffold.tensors import EXPERTS, TensorPlan

COMMON = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
EPSILON = ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon")
ACTIVATION = ("hidden_act", "hidden_activation", "activation_function")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
ROPE = {"rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor"}
# they change no logit and no gradient: what generation and the loss's output do, and sizes of what is drawn at first
INERT = {"use_cache", "pretraining_tp", "output_router_logits", "max_position_embeddings", "model_type"}
FLAG = "r.random() < 0.5"
FACTORS = {  # beyond these, rounding alone reaches the verifier's bound
    "attention_multiplier": "r.choice([0.0625, 0.3])",
    "embedding_multiplier": "r.choice([1.0, 12.0])",
    "logits_scaling": "r.choice([1.0, 6.0])",
}


@dataclass(slots=True)
class Settings:
    """What `config` and `random_config` of the family will say."""

    fields: dict[str, str] = field(default_factory=dict)  # of DecoderConfig → expression
    moe: dict[str, str] = field(default_factory=dict)  # of MoE → expression
    latent: bool = False
    mlp_types: str | None = None  # expression of the dense layers before the mixtures, without `mlp_layer_types`
    sparse: str = "True"  # whether layer i is a mixture
    window: str = "None"  # of all layers
    types: list[str] | None = None  # the pattern of `layer_types`; [] if there is no rule for them
    by_kind: bool = False  # `rope_parameters` give each kind of layer its own
    switched: bool = False  # by use_sliding_window
    rope: str = "rope(c)"
    scaling: Mapping[str, Any] = field(default_factory=dict)  # rope_parameters of transformers' class
    null_window: bool = False  # a window of None, with which no layer has one
    epsilon: str = "rms_norm_eps"
    refused: dict[str, str] = field(default_factory=dict)  # setting → expression that is true if it is refused
    unread: dict[str, list[Any]] = field(default_factory=dict)  # setting → the values that are accepted
    rule: dict[str, list[Any]] = field(default_factory=dict)  # the same, of those that count only without layer_types
    read: set[str] = field(default_factory=set)
    derived: list[str] = field(default_factory=list)  # settings that others determine
    varied: dict[str, str] = field(default_factory=dict)  # of random_config
    drawn: list[str] = field(default_factory=list)  # lines before it
    partial: float | None = None
    reasons: list[str] = field(default_factory=list)  # what ptf does not have
    choices: dict[str, list[str]] = field(default_factory=dict)  # what only a comparison can tell

    def read_key(self, key: str, varied: str | None = None) -> str:
        """Note that a setting is read, and return the expression of its value."""
        self.read.add(key)
        if varied:
            self.varied[key] = varied
        return f'c["{key}"]'


def settings_of(
    reference: Reference, structure: Structure, plan: TensorPlan, optional: Mapping[str, Mapping[str, str]]
) -> Settings:
    """Map every setting of transformers' config class, or put it among those that are refused."""
    s, keys = Settings(), reference.defaults
    s.read |= {*COMMON, "tie_word_embeddings", "num_key_value_heads", "head_dim"} & set(keys)
    s.fields["tied"] = 'c["tie_word_embeddings"]'
    epsilon = next((key for key in EPSILON if key in keys), "")
    if epsilon:
        s.epsilon = epsilon
        s.read_key(epsilon, None if epsilon == "rms_norm_eps" else "r.choice([1e-6, 1e-5])")
    else:
        s.reasons.append("no key for the norms' epsilon; rms_norm_eps is read, 1e-6 without it")
    _activation(s, reference)
    _switches(s, plan, optional)
    _rope(s, reference)
    _norms(s, structure, plan)
    _factors(s, reference, structure)
    if plan.has("attn.kv_a_proj.weight"):
        _latent(s, reference)
    _layers(s, reference)
    if plan.has("moe.router.weight"):
        _experts(s, reference, plan)
    _refuse_the_rest(s, reference)
    _accept(s, reference)
    return s


def _activation(s: Settings, reference: Reference) -> None:
    key = next((key for key in ACTIVATION if key in reference.defaults), "")
    if not key:
        s.reasons.append("no key for the activation; SiLU is assumed")
        return
    value = reference.default(key)
    name = ACTIVATIONS.get(value)
    if name is None:
        s.reasons.append(f"activation {key}: {value}; ptf has SiLU and tanh-GELU (`Activation` of ptf/model/config.py)")
    kept = value if name else "silu"
    s.refused[key] = f'(act := {s.read_key(key)}) != "{kept}" and act'
    if name == "gelu_tanh":
        s.fields["activation"] = '"gelu_tanh"'


def _switches(s: Settings, plan: TensorPlan, optional: Mapping[str, Mapping[str, str]]) -> None:
    """Map what the presence of parameters says, and the yes-or-no settings that it depends on."""
    ends = {
        "qkv_bias": ("attn.q_proj.bias", "attn.q_a_proj.bias", "attn.kv_a_proj.bias"),
        "out_bias": ("attn.o_proj.bias",),
        "mlp_bias": ("mlp.gate_proj.bias", "mlp.down_proj.bias"),
        "qk_norm": ("attn.q_norm.weight",),
        "qk_width_norm": ("attn.q_width_norm.weight",),
        "sinks": ("attn.sinks",),
    }
    for name, places in ends.items():
        by = [k for k, found in optional.items() if any(o.endswith(places) for o in found.values())]
        if len(by) == 1:
            s.fields[name] = s.read_key(by[0], FLAG)
        elif any(plan.has(place) for place in places):
            s.fields[name] = "True"


def _rope(s: Settings, reference: Reference) -> None:
    s.read |= ROPE & set(reference.defaults)
    parameters = reference.defaults.get("rope_parameters") or {}
    if "rope_parameters" not in reference.defaults:
        s.reasons.append("no rope_parameters: ptf's positions are rotary")
    if by_kind := {kind: one for kind, one in parameters.items() if isinstance(one, dict)}:
        _ropes_by_kind(s, by_kind)
        return
    theta, share = parameters.get("rope_theta", 10_000.0), parameters.get("partial_rotary_factor")
    more = "" if theta == 10_000.0 else f", theta={theta!r}"
    if share is not None and _rotates_part(reference):
        s.partial = share
        more += f", partial={share!r}"
    if parameters.get("rope_type", "default") != "default":
        s.scaling = parameters
        more = f', c.get("rope_parameters") or c.get("rope_scaling") or SCALING{more}'
    s.rope = f"rope(c{more})"


def _ropes_by_kind(s: Settings, parameters: Mapping[str, Any]) -> None:
    """Map `rope_parameters` that give each kind of layer its own."""
    s.by_kind, s.scaling = True, parameters
    drawn = 'random_rope(r, r.choice(["default", "linear", "yarn"]))'
    s.varied["rope_parameters"] = f'{{kind: {drawn} for kind in ("full_attention", "sliding_attention")}}'


def _rotates_part(reference: Reference) -> bool:
    """Whether transformers' model runs with a part of each head rotated."""
    size = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    try:
        return runs(reference.built(rope_parameters=size))
    except UserError:
        return False


def _norms(s: Settings, structure: Structure, plan: TensorPlan) -> None:
    if not plan.has("attn_norm.weight"):
        s.fields["pre_norm"] = "False"
    if plan.has("attn_post_norm.weight"):
        s.fields["post_norm"] = "True"
    if structure.norm_offset:
        s.fields["norm_offset"] = "True"


def _factors(s: Settings, reference: Reference, structure: Structure) -> None:
    keys, c = reference.defaults, reference.settings
    if structure.embed_scale != 1.0:
        s.fields["embed_scale"] = _number(s, reference, structure.embed_scale, "the embeddings")
    if structure.logit_scale != 1.0:
        s.fields["logit_scale"] = _number(s, reference, structure.logit_scale, "the logits")
    if "residual_multiplier" in keys:
        s.fields["residual_scale"] = s.read_key("residual_multiplier", "r.choice([0.22, 0.5])")
    if "final_logit_softcapping" in keys:
        s.fields["softcap"] = s.read_key("final_logit_softcapping", "r.choice([None, 20.0])")
    if "attn_logit_softcapping" in keys:
        s.fields["attention_softcap"] = s.read_key("attn_logit_softcapping", "r.choice([None, 5.0])")
    scale = structure.attention_scale
    size = c.get("head_dim") or c.get("hidden_size", 0) // (c.get("num_attention_heads") or 1)
    if scale is not None and size and abs(scale - size**-0.5) > 1e-6 and "kv_lora_rank" not in c:
        if abs(scale - SMALL_SCALAR**-0.5) < 1e-6 and "query_pre_attn_scalar" in keys:
            s.fields["attention_scale"] = s.read_key("query_pre_attn_scalar", "r.choice([8, 16, 50])") + " ** -0.5"
        else:
            s.fields["attention_scale"] = _number(s, reference, scale, "query-key products")


SMALL_SCALAR = 10  # query_pre_attn_scalar of the small model


def _number(s: Settings, reference: Reference, value: float, what: str) -> str:
    """Return the expression of a factor that was measured: a setting, its inverse, or a root of the width."""
    c = reference.settings

    def near(other: float) -> bool:
        return abs(value - other) <= 1e-3 * abs(value)

    factors = [k for k, v in c.items() if isinstance(v, int | float) and v and ("multiplier" in k or "scal" in k)]
    for key in factors:
        if near(c[key]):
            return f"float({s.read_key(key, FACTORS.get(key, 'r.choice([0.5, 1.5])'))})"
        if near(1 / c[key]):
            return f"1.0 / {s.read_key(key, FACTORS.get(key, 'r.choice([0.5, 1.5])'))}"
    if near(c["hidden_size"] ** 0.5):
        return 'c["hidden_size"] ** 0.5'
    s.reasons.append(f"{what} are multiplied by {value:.6g} in a model of width {c['hidden_size']}: no setting is that")
    return repr(round(value, 6))


def _latent(s: Settings, reference: Reference) -> None:
    s.latent = True
    choices = {
        "q_lora_rank": "r.choice([None, 16, 24])",
        "kv_lora_rank": "r.choice([16, 24])",
        "qk_rope_head_dim": "r.choice([8, 16])",
        "qk_nope_head_dim": "r.choice([8, 12, 16])",
        "v_head_dim": "r.choice([8, 12, 24])",
    }
    if "rope_interleave" in reference.defaults:
        choices["rope_interleave"] = FLAG
    for key, choice in choices.items():
        s.read_key(key, choice)
    s.varied["rope_parameters"] = 'random_rope(r, "default")'
    s.refused["rope_scaling"] = (
        '(kind := rope(c).kind) != "default" and kind'  # YaRN's mscale would be a factor of the attention
    )


def _layers(s: Settings, reference: Reference) -> None:
    """Map the windows of the layers."""
    keys = reference.defaults
    if isinstance(types := reference.settings.get("layer_types"), list):
        others = sorted(set(types) - {"full_attention", "sliding_attention"})
        if others:
            s.reasons.append(f"layers of the kinds {', '.join(others)}")
        s.read_key("layer_types")
        s.switched = "use_sliding_window" in keys
        if "sliding_window" in keys:
            s.null_window = not s.switched and _runs_without_a_window(reference)
            s.read_key("sliding_window", "r.choice([3, 8, 20, None])" if s.null_window else "r.choice([3, 8, 20])")
            if not s.by_kind:
                s.choices["nope"] = ["", *(["with a window"] if s.null_window else []), "always"]
        if s.switched:
            s.refused["layer_types (none, with use_sliding_window)"] = (
                f'{s.read_key("use_sliding_window", FLAG)} and not c.get("layer_types")'
            )
        _rule(s, reference)
    elif "sliding_window" in keys:
        s.window = s.read_key("sliding_window", "r.choice([None, 5, 16])")
        if "use_sliding_window" in keys:
            s.window += f" if {s.read_key('use_sliding_window', FLAG)} else None"


def _runs_without_a_window(reference: Reference) -> bool:
    """Whether transformers' model runs with a window of None."""
    try:
        return runs(reference.built(sliding_window=None, layer_types=["full_attention"] * LAYERS))
    except UserError:
        return False


def _rule(s: Settings, reference: Reference) -> None:
    """Find the list that `layer_types` are where a config.json has none, and the settings that count only there."""
    inert = {k for k in reference.defaults if is_inert(k)} | reference.general | s.read | set(COMMON)
    for key, switch in of_the_rule(reference, [k for k in reference.defaults if k not in inert]):
        if switch == "":
            s.rule[key] = [reference.default(key)]
        elif s.switched and switch == "use_sliding_window":
            s.derived.append(f"{key} (counts only with use_sliding_window without layer_types, which is refused)")
            s.read.add(key)
    try:
        s.types = _pattern(reference, {key: values[0] for key, values in s.rule.items()})
    except Exception:  # with the directory's settings, transformers cannot make the list
        s.rule = {key: [reference.defaults[key]] for key in s.rule}
        s.types = _pattern(reference, {})


def _pattern(reference: Reference, settings: Mapping[str, Any]) -> list[str]:
    """Return the shortest list that `layer_types` repeat where a config.json has none, [] if they do not."""
    lists = [default_types(reference.model_type, count, **settings) for count in (5, 8, 13)]
    for period in range(1, 9):
        rule = lists[-1][:period]
        if all(types == (rule * 13)[: len(types)] for types in lists):
            return rule
    return []


def _experts(s: Settings, reference: Reference, plan: TensorPlan) -> None:
    keys = reference.defaults
    count = next(key for key in EXPERTS if key in keys)
    top_k = next((key for key in TOP_K if key in keys), "")
    own = "moe_intermediate_size" if "moe_intermediate_size" in keys else "intermediate_size"
    s.moe = {
        "experts": s.read_key(count, "r.choice([8, 12])" if "n_group" in keys else "r.choice([4, 6, 8])"),
        "top_k": s.read_key(top_k, "r.choice([1, 2, 3])") if top_k else "1",
        "intermediate_size": s.read_key(own, "r.choice([16, 24])" if own != "intermediate_size" else None),
    }
    if "norm_topk_prob" in keys:
        s.moe["normalise"] = s.read_key("norm_topk_prob", FLAG)
    else:
        s.choices["normalise"] = ["True", "False"]
    if "router_aux_loss_coef" in keys:
        s.moe["router_aux_loss_coef"] = s.read_key("router_aux_loss_coef", "r.choice([0.001, 0.01])")
    if plan.has("moe.shared.gate_proj.weight"):
        shared = next((key for key in SHARED if key in keys), "")
        if "shared_expert_intermediate_size" in keys:
            s.moe["shared_intermediate_size"] = s.read_key("shared_expert_intermediate_size", "r.choice([16, 40])")
        elif shared:
            count = s.read_key(shared, "r.choice([1, 2])")
            s.moe["shared_intermediate_size"] = f"{s.moe['intermediate_size']} * {count}"
        else:
            s.moe["shared_intermediate_size"] = 'c["intermediate_size"]'
    if plan.has("moe.shared_gate.weight"):
        s.moe["shared_gate"] = "True"
    if correction := plan.has("moe.correction_bias"):
        s.moe["correction"] = "True"
    s.choices["scores"] = ['"sigmoid"', '"softmax"'] if correction else ['"softmax"', '"sigmoid"']
    if {"n_group", "topk_group"} <= set(keys):
        s.moe["groups"], s.moe["top_groups"] = s.read_key("n_group"), s.read_key("topk_group")
        s.drawn.append("groups, top_groups = r.choice([(1, 1), (2, 1), (4, 2)])")
        s.varied |= {"n_group": "groups", "topk_group": "top_groups"}
    if "routed_scaling_factor" in keys:
        s.moe["scaling"] = s.read_key("routed_scaling_factor", "r.choice([1.0, 1.8, 2.5])")
    _sparse(s, reference)


def _sparse(s: Settings, reference: Reference) -> None:
    """Map which layers are mixtures."""
    keys = reference.defaults
    routers = {
        int(name.split(".")[2])
        for name in reference.shapes
        if ".experts." in name and pattern(name) != name and name.split(".")[2].isdigit()
    }
    if isinstance(types := keys.get("mlp_layer_types"), list):
        first = types.index("sparse") if "sparse" in types else len(types)
        dense = str(first)
        if "first_k_dense_replace" in keys and keys["first_k_dense_replace"] == first:
            dense = s.read_key("first_k_dense_replace", "r.choice([0, 1])")
        s.read_key("mlp_layer_types")
        s.mlp_types = dense
        s.refused["mlp_layer_types"] = (
            'len(kinds := c.get("mlp_layer_types") or ()) not in (0, c["num_hidden_layers"]) and kinds'
        )
        s.sparse = 'kinds[i] == "sparse"'
    elif "first_k_dense_replace" in keys:
        s.sparse = f"i >= {s.read_key('first_k_dense_replace', 'r.choice([0, 1])')}"
    elif {"mlp_only_layers", "decoder_sparse_step"} <= set(keys):
        only = s.read_key("mlp_only_layers", "r.choice([[], [0]])")
        step = s.read_key("decoder_sparse_step", "r.choice([1, 2])")
        s.sparse = f"i not in ({only} or []) and (i + 1) % {step} == 0"
    elif len(routers) not in (0, LAYERS):
        s.reasons.append(f"layers {sorted(routers)} of {LAYERS} are mixtures of experts, by a rule that is not known")
        s.sparse = f"i in {sorted(routers)}"


def is_inert(key: str) -> bool:
    """Whether a setting changes no logit and no gradient, by its name."""
    return key in INERT or key.endswith(TOKENS) or "initializer" in key


def _refuse_the_rest(s: Settings, reference: Reference) -> None:
    """Refuse other values of every setting that is not read."""
    for key, default in reference.defaults.items():
        if key in s.read or key in s.rule or key in reference.general or is_inert(key):
            continue
        value = reference.default(key)
        if isinstance(default, list):
            kinds = sorted({repr(one) for one in default})
            allowed = f"{{{kinds[0]}}}" if len(kinds) == 1 else "set()"
            s.refused[key] = f'sorted(set(c.get("{key}") or ()) - {allowed})'
        elif key not in reference.small and reference.settings.get(key) != default and key not in reference.given:
            s.derived.append(key)
        else:
            s.unread[key] = [value]


def _accept(s: Settings, reference: Reference) -> None:
    """Accept, beside a directory's value of a setting that is not read, what transformers makes of it when it saves
    the config.json again, and transformers' own value if the small model is the same with it."""
    for key, values in s.unread.items():
        if key not in reference.given:
            continue
        default = reference.defaults[key]
        if effect(reference, {}, {key: default}) == NO_EFFECT:
            values.append(default)
        values.append(reference.settings.get(key))
        s.unread[key] = [value for at, value in enumerate(values) if value not in values[:at]]
