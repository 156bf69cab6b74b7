"""Supervised fine-tuning: minimise −Σ w log p(token | tokens before it) over the tokens that the assistant wrote (or, of plain text, over all).

It leaves out everything else: no companion, no knobs. Where several sources are mixed, the loss of each is a metric of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ptf.data.batch import Batch
from ptf.data.encode import encode_document
from ptf.data.sample import Atom
from ptf.data.tokenizer import Tokenizer
from ptf.model.declared import next_token_loss
from ptf.model.decoder import Decoder
from ptf.recipes.protocol import Companion, Metrics


@dataclass(frozen=True)
class SFT:
    train_on: str = "assistant"
    sources: tuple[str, ...] = ()  # by name, where there are several
    online: ClassVar[bool] = False
    head: ClassVar[Literal["lm", "scalar"]] = "lm"

    @property
    def companions(self) -> Mapping[str, Companion]:
        return {}

    def encode(self, row: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> list[Atom]:
        return encode_document(row, tokenizer, source, self.train_on)

    def units(self, batch: Batch) -> Tensor:
        return batch.weights.sum(dtype=torch.float64)

    def loss(self, model: Decoder, batch: Batch, companions: Mapping[str, Decoder]) -> tuple[Tensor, Metrics]:
        loss, documents = model(batch.tokens, batch.positions, batch.segments, partial(next_token_loss, batch=batch))
        return loss, {"loss": loss.detach(), **self.by_source(batch, documents)}

    def by_source(self, batch: Batch, losses: Tensor | None) -> Metrics:
        """Of each source, the loss of its documents and the units that it is a sum over; losses [documents], None for heads that do not tell."""
        if len(self.sources) < 2 or losses is None:
            return {}
        units, found = batch.per_document(torch.ones_like(batch.weights)), {}
        for name in self.sources:
            here = torch.tensor([source == name for source in batch.sources], device=losses.device)
            found |= {f"loss/{name}": losses[here].sum(), f"share/{name}": units[here].sum()}
        return found
