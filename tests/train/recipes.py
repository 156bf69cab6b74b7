"""Recipes as a user would write them: with a scalar head, or with losses that torch's own generator has a part in."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ptf.data.batch import Batch
from ptf.data.document import PackUnit
from ptf.data.encode import encode_document
from ptf.data.tokenizer import Tokenizer
from ptf.model.decoder import Decoder
from ptf.recipes.grpo.recipe import GRPO
from ptf.recipes.protocol import Metrics, Recipe
from ptf.recipes.sft.recipe import SFT


class Value(Recipe):
    """Regress the value at each trained position to a tenth of the token that follows: (v − target / 10)²."""

    head: ClassVar[Literal["lm", "scalar"]] = "scalar"

    def encode(self, row: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> list[PackUnit]:
        return encode_document(row, tokenizer, source, "assistant")

    def loss(self, model: Decoder, batch: Batch, frozen_models: Mapping[str, Decoder]) -> tuple[Tensor, Metrics]:
        values = model(batch.tokens, batch.positions, batch.segments, lambda x, head: head.values(x))
        loss = ((values - batch.targets / 10) ** 2 * batch.loss_weights).sum()
        return loss, {"loss": loss.detach()}


class NoisySFT(SFT):
    def loss(self, model: Decoder, batch: Batch, frozen_models: Mapping[str, Decoder]) -> tuple[Tensor, Metrics]:
        loss, metrics = super().loss(model, batch, frozen_models)
        return loss * (1 + torch.rand(())), metrics


class NoisyGRPO(GRPO):
    def loss(self, model: Decoder, batch: Batch, frozen_models: Mapping[str, Decoder]) -> tuple[Tensor, Metrics]:
        loss, metrics = super().loss(model, batch, frozen_models)
        return loss * (1 + torch.rand(())), metrics
