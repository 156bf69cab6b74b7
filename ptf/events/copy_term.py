"""The copy term: what a score of an item gains where the customer had the item before.

    score(i) = e(i) + [i is an own item] · (c(features(i)) + again(i) + gate(state) + (share − 1) · e(i))

Here e is the score of the head without it, c is a small network of the item's features (ptf.events.own_items), and
`again`, `gate` and `share` are learned. `share` is how much of e counts on own items, whose order the embeddings would
otherwise disturb. An item that the basket has already is no own item.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptf.events.own_items import FEATURES, OwnItems
from ptf.model.layers import LayerFactory

WIDTH = 32  # of the network


class OwnPairs(NamedTuple):
    """Own items of several states: one pair for each state and own item."""

    states: Tensor  # [pairs] int64
    items: Tensor  # [pairs] int64
    base: Tensor  # [pairs]: c + again


class CopyTerm(nn.Module):
    """What own items gain."""

    def __init__(self, width: int, items: int, factory: LayerFactory, path: str) -> None:
        super().__init__()
        self.hidden = factory.linear(f"{path}.hidden", FEATURES, WIDTH, bias=True)
        self.out = factory.linear(f"{path}.out", WIDTH, 1)
        self.gate = factory.linear(f"{path}.gate", width, 1, bias=True)
        self.again = nn.Parameter(torch.zeros(items))
        self.share = nn.Parameter(torch.full((1,), 0.5))
        with torch.no_grad():
            for tensor in (self.gate.weight, self.gate.bias):
                assert tensor is not None
                tensor.zero_()

    def base(self, own: OwnItems) -> tuple[Tensor, Tensor]:
        """Return the items [own] int64, and what they gain in any state [own]."""
        items = torch.from_numpy(own.items).to(self.again.device)
        features = torch.from_numpy(own.features).to(self.again)
        return items, wide(self.out(F.gelu(self.hidden(features)))[:, 0]) + wide(self.again[items])

    def forward(self, x: Tensor, scores: Tensor, pairs: OwnPairs) -> Tensor:
        """Return what each pair gains, [pairs], from states x [N, D] and scores without it, [pairs]."""
        gate = wide(self.gate(x)[:, 0])
        return pairs.base + gate[pairs.states] + (wide(self.share) - 1) * scores


def wide(x: Tensor) -> Tensor:
    """Return a tensor in fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
