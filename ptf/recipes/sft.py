"""Supervised fine-tuning: minimise −Σ w log p(token | tokens before it) over the tokens that the assistant wrote.

It leaves out everything else: no companion, no knobs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ptf.data.batch import Batch
from ptf.data.encode import encode_chat
from ptf.data.sample import Atom
from ptf.data.tokenizer import Tokenizer
from ptf.model.declared import next_token_loss
from ptf.model.decoder import Decoder
from ptf.recipes import Metrics


@dataclass(frozen=True)
class SFT:
    train_on: Literal["assistant", "last"] = "assistant"
    companions: tuple[str, ...] = ()
    online: ClassVar[bool] = False
    head: ClassVar[Literal["lm", "scalar"]] = "lm"

    def encode(self, row: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> list[Atom]:
        return encode_chat(row, tokenizer, source, self.train_on)

    def units(self, batch: Batch) -> Tensor:
        return batch.weights.sum(dtype=torch.float64)

    def loss(self, model: Decoder, batch: Batch, companions: Mapping[str, Decoder]) -> tuple[Tensor, Metrics]:
        loss = model(batch.tokens, batch.positions, batch.segments, partial(next_token_loss, batch=batch))
        return loss, {"loss": loss.detach()}
