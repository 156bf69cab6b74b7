"""OLMo 3 (`Olmo3ForCausalLM`): OLMo 2 in which three of four layers have a sliding window. Only the layers without one
scale their rotary frequencies, as its authors wrote it for vLLM (https://github.com/vllm-project/vllm/pull/24534).

transformers 5.10 scales those of all layers (https://github.com/huggingface/transformers/pull/45945);
`ptf.model.verify` corrects its model before comparing.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ptf.model.config import DecoderConfig, Rope
from ptf.model.families import layers_by_type, olmo2, random_dense_config, random_types, rope


def config(c: Mapping[str, Any]) -> DecoderConfig:
    """Map a config.json to a DecoderConfig; raise UserError for settings that are not implemented."""
    c = {"sliding_window": 4096, **c}
    types = c.get("layer_types") or [
        "sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(c["num_hidden_layers"])
    ]
    table = rope(c)
    return olmo2.decoder(c, layers_by_type(c, types, {"full_attention": table, "sliding_attention": Rope(table.theta)}))


def random_config(r: random.Random) -> dict[str, Any]:
    """Return a small random config.json for the verifier."""
    c = random_dense_config(r, "olmo3", attention_bias=r.random() < 0.3, sliding_window=r.choice([3, 8, 20]))
    c["num_hidden_layers"] = r.choice([2, 4, 5])
    return c | random_types(r, c["num_hidden_layers"])


FAMILIES = {"olmo3": replace(olmo2.FAMILIES["olmo2"], model_type="olmo3", config=config, random_config=random_config)}
