"""OLMo 2 (`Olmo2ForCausalLM`): norms after attention and MLP and none before them; the queries of all heads are
normalised together, and the keys.

OLMo 3 (`Olmo3ForCausalLM`): OLMo 2 in which three of four layers have a sliding window. Only the layers without one
scale their rotary frequencies, as its authors wrote it for vLLM (https://github.com/vllm-project/vllm/pull/24534).
transformers 5.10 scales those of all layers (https://github.com/huggingface/transformers/pull/45945);
`ptf.model.verify` corrects its model before comparing.
"""

import random

from ptf.model.checkpoint_mapping import Rename, TensorMapping
from ptf.model.config import DecoderConfig, Layer, Rope
from ptf.model.families import Family
from ptf.model.families.members import random_dense_config, random_types
from ptf.model.families.names import ATTENTION, LAYER, MLP, OUTER, POST_NORMS
from ptf.model.families.settings import (
    SILU,
    Config,
    Settings,
    biases,
    common,
    layers_by_type,
    rope,
    types_of_layers,
)

MAPPINGS: tuple[TensorMapping, ...] = (
    *OUTER,
    *ATTENTION,
    *MLP,
    *(Rename(f"layers.{{i}}.attn.{p}_width_norm.weight", f"{LAYER}self_attn.{p}_norm.weight") for p in "qk"),
    *POST_NORMS,
)


def decoder(c: Config, layers: tuple[Layer, ...]) -> DecoderConfig:
    """Return what OLMo 2 and OLMo 3 share, with these layers."""
    return DecoderConfig(
        **common(c),
        layers=layers,
        qk_width_norm=True,
        **biases(c),
        pre_norm=False,
        post_norm=True,
    )


def _olmo2(c: Config) -> DecoderConfig:
    return decoder(c, (Layer(rope(c)),) * c["num_hidden_layers"])


def _random_olmo2(r: random.Random) -> Settings:
    return random_dense_config(r, "olmo2", attention_bias=r.random() < 0.3)


def _olmo3(c: Config) -> DecoderConfig:
    table = rope(c)
    plain = Layer(Rope(table.theta), c["sliding_window"])
    types = types_of_layers(c, 4)
    return decoder(c, layers_by_type(c, types, full_attention=Layer(table), sliding_attention=plain))


def _random_olmo3(r: random.Random) -> Settings:
    c = random_dense_config(r, "olmo3", attention_bias=r.random() < 0.3, sliding_window=r.choice([3, 8, 20]))
    c["num_hidden_layers"] = r.choice([2, 4, 5])
    return c | random_types(r, c["num_hidden_layers"])


DEFAULTS: Config = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096}
FAMILIES = {
    "olmo2": Family("olmo2", _olmo2, MAPPINGS, _random_olmo2, DEFAULTS, SILU),
    "olmo3": Family("olmo3", _olmo3, MAPPINGS, _random_olmo3, DEFAULTS, SILU),
}
