"""Supervised fine-tuning: minimise −Σ w log p(token | tokens before it) over the tokens that the assistant wrote, or
over all tokens of plain text.

It has no frozen models and no keys of `algo`. Where several sources are mixed, the loss of each is a metric of its own.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ptf.data.batch import Batch
from ptf.data.document import PackUnit
from ptf.data.encode import encode_document
from ptf.data.tokenizer import Tokenizer
from ptf.model.chunked import next_token_loss
from ptf.model.model import Model
from ptf.recipes.protocol import Metrics, Recipe
from ptf.recipes.sft.config import SFTConfig


class SFT(Recipe):
    """Next-token prediction on trained tokens."""

    config: SFTConfig

    def encode(self, row: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> list[PackUnit]:
        """Encode a row as a document."""
        return encode_document(row, tokenizer, source, self.context.train_on)

    def loss(self, model: Model, batch: Batch, frozen_models: Mapping[str, Model]) -> tuple[Tensor, Metrics]:
        """Return the cross-entropy summed over trained tokens; of several sources, also the loss and the share of each
        one's documents, unless the head gives no loss per document."""
        loss, documents = batch.through(model, partial(next_token_loss, batch=batch))
        metrics: Metrics = {"loss": loss.detach()}
        if len(self.context.sources) < 2 or documents is None:
            return loss, metrics
        denominator = batch.per_document(torch.ones_like(batch.loss_weights))
        for name in self.context.sources:
            of_source = torch.tensor([source == name for source in batch.sources])
            of_source = of_source.to(documents.device, non_blocking=True)
            metrics |= {
                f"source_loss/{name}": documents.where(of_source, 0.0).sum(),
                f"source_share/{name}": denominator.where(of_source, 0.0).sum(),
            }
        return loss, metrics
