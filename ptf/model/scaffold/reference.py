"""transformers' model of a small config: what its parameters are called in a checkpoint, and its settings."""

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ptf.errors import UserError
from ptf.model.reference import quiet
from ptf.model.tensor_files import TensorFiles

LAYERS = 4
# sizes that differ from each other, so that a shape says which they are; only those that the config class has are set
SMALL: Mapping[str, Any] = {
    "vocab_size": 131,
    "vocab_size_per_layer_input": 131,
    "hidden_size": 96,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "query_pre_attn_scalar": 10,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "logits_scaling": 4.0,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "moe_num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 20,
    "q_lora_rank": 17,
    "kv_lora_rank": 18,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 22,
}
FACTORS = {  # those of them that are no sizes
    "query_pre_attn_scalar",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
}
TOKENS = ("_token_id", "_token_ids")
NOT_OF_THE_MODEL = {"auto_map", "quantization_config", "torch_dtype", "max_position_embeddings"}
DENSE: Mapping[str, Any] = {  # with which some layers of a mixture have an MLP
    "mlp_only_layers": [0],
    "mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)],
}


@dataclass(frozen=True, slots=True)
class Reference:
    """transformers' definition of a model, and a small model of it."""

    model_type: str
    defaults: dict[str, Any]  # the settings of transformers' config class
    general: frozenset[str]  # the settings that every config class has
    given: dict[str, Any]  # a config.json, {} without one
    small: dict[str, Any]  # what was set for the small model
    settings: dict[str, Any]  # all settings of the small model
    model: Any
    shapes: dict[str, tuple[int, ...]]  # of the tensors in a checkpoint, of all variants
    own_head_dim: bool  # transformers' class gives `head_dim` a value that does not follow from the width
    square: bool  # only heads of hidden_size / num_attention_heads dimensions work
    optional_head_dim: bool  # transformers' class has no `head_dim`, and the model reads one that a config.json has

    def default(self, key: str) -> Any:
        """Return what a setting is where nothing else is said: in the config.json, or in transformers' class."""
        return self.given.get(key, self.defaults.get(key))

    @property
    def own(self) -> dict[str, Any]:
        """Return the directory's config.json with small sizes, {} without a directory."""
        if not self.given:
            return {}
        sizes = set(SMALL) - FACTORS | {"num_hidden_layers"}
        settings = {
            key: value
            for key, value in _shortened(self.given).items()
            if key not in self.general | NOT_OF_THE_MODEL
            and not key.endswith(TOKENS)
            and (key not in sizes or value is None)
        }
        size = {"head_dim": SMALL["head_dim"]} if self.given.get("head_dim") and self.optional_head_dim else {}
        return {**self.small, **settings, **size, "model_type": self.model_type}

    def built(self, **changes: Any) -> Any:
        """Return a small model with other settings and, where the shapes are the same, the same weights."""
        return build({**self.small, **changes, "model_type": self.model_type})

    def layer(self, number: int) -> nn.Module:
        """Return one of its layers."""
        lists = [m for m in self.model.modules() if isinstance(m, nn.ModuleList) and len(m) == LAYERS]
        if not lists:
            raise UserError(f"{self.model_type}: transformers' model has no list of layers")
        return lists[0][number]


def reference_of(name_or_directory: str) -> Reference:
    """Return the reference of a `model_type`, or of the config.json in a directory. Raise UserError, naming the
    nearest, for a name that transformers does not have, and for what is not a causal language model."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

    quiet()
    given: dict[str, Any] = {}
    if (file := Path(name_or_directory) / "config.json").is_file():
        given = json.loads(file.read_text())
    name = str(given.get("model_type", name_or_directory))
    if name not in CONFIG_MAPPING:
        if Path(name_or_directory).is_dir() and not given:
            raise UserError(f"{name_or_directory} has no config.json")
        near = get_close_matches(name, CONFIG_MAPPING.keys(), 3, 0.5)
        raise UserError(f"transformers has no model_type {name!r}" + (f"; nearest: {', '.join(near)}" if near else ""))
    kind = CONFIG_MAPPING[name]
    if inner := getattr(kind, "sub_configs", {}).get("text_config"):
        inner = getattr(inner, "model_type", "")
        raise UserError(
            f"{name} wraps a language model in text_config" + (f": scaffold that, {inner}" if inner else "")
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"transformers has no causal language model of {name}")
    defaults = kind().to_dict()
    kept = {key: value for key, value in _shortened(given).items() if key in defaults and key != "model_type"}
    small = {**kept, **{key: value for key, value in SMALL.items() if key in defaults}}
    if "kv_lora_rank" in defaults:  # whose heads have other sizes, and keys of their own
        small |= {"num_key_value_heads": SMALL["num_attention_heads"]}
        small.pop("head_dim", None)
    for key in defaults:
        if key.endswith("_token_id") and defaults[key] is not None:
            small[key] = 0
    model = build({**small, "model_type": name})
    if square := "head_dim" in small and not runs(model):
        small["head_dim"] = small["hidden_size"] // small["num_attention_heads"]
        model = build({**small, "model_type": name})
    shapes = stored_shapes(model)
    optional = "head_dim" not in defaults and "kv_lora_rank" not in defaults and _reads_head_dim(name, small, shapes)
    for key, value in DENSE.items():
        if key in defaults:
            shapes = stored_shapes(build({**small, key: value, "model_type": name})) | shapes
    general = frozenset(PreTrainedConfig().to_dict()) - {"tie_word_embeddings"}
    own = has_own_head_dim(name)
    settings = model.config.to_dict()
    return Reference(name, defaults, general, given, small, settings, model, shapes, own, square, optional)


def _shortened(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json whose lists of one entry per layer have those of the first layers."""
    count = given.get("num_hidden_layers")
    return {k: v[:LAYERS] if isinstance(v, list) and len(v) == count else v for k, v in given.items()}


def _reads_head_dim(name: str, small: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the small model runs with a `head_dim`, and has other shapes."""
    try:
        model = build({**small, "head_dim": SMALL["head_dim"], "model_type": name})
        return stored_shapes(model) != shapes and runs(model)
    except UserError:
        return False


def build(config: dict[str, Any]) -> Any:
    """Return transformers' model of a config.json, with weights that the same shapes have in common."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            hf = AutoConfig.for_model(**config)
            return AutoModelForCausalLM.from_config(
                hf, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
            ).eval()
    except Exception as error:  # transformers raises a dozen kinds
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{config['model_type']}: transformers cannot build a small model: {first}") from error


def runs(model: Any) -> bool:
    """Return whether a small model computes anything."""
    try:
        with torch.no_grad():
            model(input_ids=torch.arange(1, 10)[None], use_cache=False)
    except Exception:  # whatever a size that does not fit leads to
        return False
    return True


def stored_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a checkpoint of this model has, by name."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        with TensorFiles(Path(directory), {}) as files:
            return {name: tuple(files.shape(name)) for name in files.names}


def pattern(name: str) -> str:
    """Return a name with `{i}` for the number of its layer and `{e}` for that of its expert."""
    name = re.sub(r"\.(layers|h|blocks|layer)\.\d+\.", r".\1.{i}.", name, count=1)
    return re.sub(r"\b(\w*experts)\.\d+\.", r"\1.{e}.", name)


def patterns(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the patterns of all names."""
    return {pattern(name): shape for name, shape in shapes.items()}


def default_types(model_type: str, layers: int, **settings: Any) -> list[str]:
    """Return the `layer_types` of a model with so many layers whose config.json has none."""
    from transformers import AutoConfig

    return list(AutoConfig.for_model(model_type, num_hidden_layers=layers, **settings).layer_types)


def has_own_head_dim(model_type: str) -> bool:
    """Whether transformers' class gives `head_dim` a value that does not follow from the width."""
    from transformers import AutoConfig

    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4}
    try:
        found = {
            getattr(AutoConfig.for_model(model_type, hidden_size=width, **sizes), "head_dim", None)
            for width in (512, 1024)
        }
    except ValueError:  # a width that does not fit another size
        return False
    return len(found) == 1 and None not in found
