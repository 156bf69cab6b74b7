"""Model families by `model_type`: how a config.json becomes a DecoderConfig, what its tensors are called, and small
random members for the verifier. settings.py has what many families share."""

import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from ptf.errors import UserError
from ptf.model.checkpoint_mapping import Concatenate, Stack, TensorMapping
from ptf.model.config import DecoderConfig
from ptf.model.families.settings import Config, Settings, raise_if_unsupported

MODULES = {  # model_type → the file of its family
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "qwen3_moe": "qwen3_moe",
    "qwen2_moe": "qwen",
    "glm4_moe": "deepseek_v3",
    "deepseek_v3": "deepseek_v3",
    "glm4_moe_lite": "deepseek_v3",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "gemma3": "gemma",
    "gpt_oss": "gpt_oss",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_next": "qwen3_5",
    "olmo2": "olmo",
    "olmo3": "olmo",
    "smollm3": "llama",
    "granite": "llama",
    "phi3": "mistral",
    "seed_oss": "llama",
    "ministral3": "mistral",
    "mistral3": "mistral",
    "exaone4": "olmo",
}


@dataclass(frozen=True, slots=True)
class Family:
    """One model family: the mapping of its configs and tensor names."""

    model_type: str
    decoder: Callable[[Config], DecoderConfig]  # of a config.json that has the defaults
    mappings: tuple[TensorMapping, ...]
    random_config: Callable[[random.Random], Settings]  # a small random config.json for the verifier
    defaults: Config = field(default_factory=dict)  # the reference's settings where a config.json has none
    only: Config = field(default_factory=dict)  # settings of which this value alone is implemented
    # the mappings for checkpoints that store each expert by itself, in families whose `mappings` are for stacked ones
    per_expert: tuple[TensorMapping, ...] = ()
    prefix: str = ""  # prefix of all names of the language model in a checkpoint
    # other prefixes of names that checkpoints use → the one that ptf writes
    aliases: Mapping[str, str] = field(default_factory=dict)
    # prefixes of the tensors that are copied from the checkpoint to the export unchanged; `{mtp}` stands for the number
    # of a layer after the last, which predicts further tokens
    carried: tuple[str, ...] = ()

    def config(self, c: Config) -> DecoderConfig:
        """Map a config.json to a DecoderConfig; raise UserError for settings that are not implemented."""
        c = {**self.defaults, **c}
        raise_if_unsupported(c, **self.only)
        return self.decoder(c)

    def carries(self, name: str, config: Config) -> bool:
        """Return whether a tensor of a checkpoint with this config.json is copied to the export unchanged.

        Rotary frequencies are, which older checkpoints store and nothing reads.
        """
        first = config.get("num_hidden_layers", 0)
        after = range(first, first + (config.get("num_nextn_predict_layers") or 0))
        prefixes = (p.replace("{mtp}", str(i)) for p in self.carried for i in (after if "{mtp}" in p else (0,)))
        return name.startswith(tuple(prefixes)) or name.endswith("rotary_emb.inv_freq")

    def mappings_for(self, shapes: Mapping[str, Sequence[int]]) -> list[TensorMapping]:
        """Return the mappings of a model with parameters of these names and shapes. Raise AssertionError if one has
        none."""
        names = set(shapes)
        layers = 1 + max((int(n.split(".")[1]) for n in names if n.startswith("layers.")), default=-1)
        mappings: list[TensorMapping] = []
        for mapping in self.mappings:
            for i in map(str, range(layers) if "{i}" in mapping.ours[0] else (0,)):
                ours = tuple(name.replace("{i}", i) for name in mapping.ours)
                if names.issuperset(ours):
                    mappings.append(replace(mapping, ours=ours, other=mapping.other.replace("{i}", i)))
        if lost := names - {n for mapping in mappings for n in mapping.ours}:
            raise AssertionError(f"{self.model_type}: no tensor mapping for {sorted(lost)[:5]}")
        return [mapping.sized(shapes) if isinstance(mapping, Concatenate | Stack) else mapping for mapping in mappings]


def family_of(config: Config) -> Family:
    """Return the family of a config.json. Raise UserError, naming the nearest, for one that is not supported."""
    model_type = str(config.get("model_type"))
    if model_type not in MODULES:
        near = get_close_matches(model_type, MODULES, 1, 0.3)
        raise UserError(
            f"model_type {model_type!r} is not supported; ptf has {', '.join(MODULES)}"
            + (f" (nearest: {near[0]})" if near else "")
            + "; model.backend: hf trains what transformers has, and docs/add_a_model.md explains how to add a family"
        )
    return importlib.import_module(f"ptf.model.families.{MODULES[model_type]}").FAMILIES[model_type]
