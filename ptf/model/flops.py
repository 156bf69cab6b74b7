"""Floating-point operations, counted from the modules that do them: what MFU divides by.

The one idea: a projection costs 2 · parameters a token forward and twice that backward; attention costs what its documents need (causal
pairs, not the row's square); the head only counts positions that are trained.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ptf.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Flops:
    """Of a forward pass; a step is three times that."""

    per_token: int  # all projections but the head
    per_pair: int  # query-key pair, all layers
    per_target: int  # the head

    @staticmethod
    def of(model: Decoder) -> "Flops":
        c = model.config
        head = 2 * c.dim * c.vocab
        total = sum(2 * m.in_features * m.out_features for m in model.modules() if isinstance(m, nn.Linear))
        return Flops(total - head, 4 * c.layers * c.heads * c.head_dim, head)

    def step(self, lengths: Iterable[int], targets: float) -> float:
        """Forward and backward over packed documents of these lengths with `targets` trained positions."""
        tokens = pairs = 0
        for n in lengths:
            tokens += n
            pairs += n * (n + 1) // 2
        return 3 * (self.per_token * tokens + self.per_pair * pairs + self.per_target * targets)
