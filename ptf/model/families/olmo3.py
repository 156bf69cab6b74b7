"""OLMo 3 (`Olmo3ForCausalLM`): OLMo 2 in which three of four layers have a sliding window. Only the layers without one
scale their rotary frequencies, as its authors wrote it for vLLM (https://github.com/vllm-project/vllm/pull/24534).

transformers 5.10 scales those of all layers (https://github.com/huggingface/transformers/pull/45945);
`ptf.model.verify` corrects its model before comparing.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ptf.model.config import DecoderConfig, Layer, Rope
from ptf.model.families import olmo2
from ptf.model.families.members import random_dense_config, random_types
from ptf.model.families.settings import layers_by_type, rope, types_of_layers


def config(c: Mapping[str, Any]) -> DecoderConfig:
    """Map a config.json to a DecoderConfig; raise UserError for settings that are not implemented."""
    c = {"sliding_window": 4096, **c}
    table = rope(c)
    plain = Layer(Rope(table.theta), c["sliding_window"])
    kinds = {"full_attention": Layer(table), "sliding_attention": plain}
    return olmo2.decoder(c, layers_by_type(c, types_of_layers(c, 4), kinds))


def random_config(r: random.Random) -> dict[str, Any]:
    """Return a small random config.json for the verifier."""
    c = random_dense_config(r, "olmo3", attention_bias=r.random() < 0.3, sliding_window=r.choice([3, 8, 20]))
    c["num_hidden_layers"] = r.choice([2, 4, 5])
    return c | random_types(r, c["num_hidden_layers"])


FAMILIES = {"olmo3": replace(olmo2.FAMILIES["olmo2"], model_type="olmo3", config=config, random_config=random_config)}
