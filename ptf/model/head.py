"""The output projection as losses and samplers use it: which rows of the vocabulary its weights are, and how logits are
computed from them."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Head:
    """The output projection. Under a `group` (vocabulary-parallel) every rank has the same hidden states and other
    rows."""

    weight: Tensor  # [V, D], or this rank's rows of it
    vocab: int  # real rows of the whole vocabulary; rows from here on are padding and never count (but must be finite)
    softcap: float | None = None  # logits are softcap * tanh(logits / softcap)
    bias: Tensor | None = None  # [V], the same rows
    first: int = 0  # which row of the whole vocabulary `weight` begins with
    group: ProcessGroup | None = None  # the ranks that hold the other rows

    @property
    def real(self) -> int:
        """How many of the rows of `weight` are not padding."""
        return min(max(self.vocab - self.first, 0), len(self.weight))

    def logits(self, x: Tensor) -> Tensor:
        """Return fp32 logits [..., vocab] for x [..., D]: soft-capped, without padding.

        They are differentiable without a group. Under one they are gathered without gradient, for sampling only.
        """
        y = (x @ self.weight[: self.real].t()).float()
        if self.bias is not None:
            y = y + self.bias[: self.real]
        if self.softcap is not None:
            y = self.softcap * (y / self.softcap).tanh()
        if self.group is None:
            return y
        whole = y.new_zeros(*y.shape[:-1], self.vocab)
        whole[..., self.first : self.first + self.real] = y.detach()
        dist.all_reduce(whole, group=self.group)  # a sum with zeros, for ranks need not hold equally many rows
        return whole
