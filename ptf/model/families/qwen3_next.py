"""Qwen3-Next (`Qwen3NextForCausalLM`): three layers of linear attention by the gated delta rule for every layer of
softmax attention with a gate, as Qwen3.5; experts beside a shared one, in all layers or some. The projections of linear
attention lie in two matrices, whose rows are grouped by key head.

The layers that predict several tokens (`mtp.`) are copied to the export unchanged.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ptf.model.config import DecoderConfig, MoE
from ptf.model.families import Family
from ptf.model.families.qwen3_5 import MOE_MAPPINGS, hybrid_config, small_experts, small_hybrid
from ptf.model.families.settings import sparse_layers


def config(c: Mapping[str, Any]) -> DecoderConfig:
    """Map a config.json to a DecoderConfig; raise UserError for settings that are not implemented."""
    moe = MoE(
        experts=c.get("num_experts", 512),
        top_k=c.get("num_experts_per_tok", 10),
        intermediate_size=c.get("moe_intermediate_size", 512),
        normalise=c.get("norm_topk_prob", True),
        router_aux_loss_coef=c.get("router_aux_loss_coef", 0.001),
        shared_intermediate_size=c.get("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
    found = hybrid_config({"intermediate_size": 5632, "num_key_value_heads": 2, **c}, fused=True, moe=moe)
    sparse = sparse_layers(c, moe.experts)
    return replace(found, layers=tuple(replace(k, moe=m) for k, m in zip(found.layers, sparse, strict=True)))


def random_config(r: random.Random) -> dict[str, Any]:
    """Return a small random config.json for the verifier."""
    sparse = r.choice([{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}])
    return small_hybrid(r, "qwen3_next", norm_topk_prob=r.random() < 0.6, **small_experts(r), **sparse)


FAMILIES = {"qwen3_next": Family("qwen3_next", config, MOE_MAPPINGS, random_config, carried=("mtp.",))}
