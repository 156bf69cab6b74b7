"""What linear attention keeps of responses that are being generated: the last inputs of its convolution and the state
of its rule, in each layer and for each response."""

import torch
from torch import Tensor

from ptf.model.delta_rule import step
from ptf.model.gated_delta import GatedDeltaNet


class DeltaCache:
    """Convolution windows [rows, width − 1, channels] and states [rows, heads, key_dim, value_dim] of each layer.

    A row is a context or a response, as its owner numbers them.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def put(self, layer: GatedDeltaNet, rows: Tensor, windows: Tensor, states: Tensor) -> None:
        """Set the windows and states of these rows, [n]; make room for them where they are new."""
        held = self.layers.get(layer.layer, (windows[:0], states[:0]))
        self.layers[layer.layer] = held = _with_rows(held, int(rows.max()) + 1)
        for t, values in zip(held, (windows, states), strict=True):
            t[rows] = values

    def select(self, rows: Tensor) -> None:
        """Keep these rows only, in this order; a row may be kept several times."""
        self.layers = {layer: (windows[rows], states[rows]) for layer, (windows, states) in self.layers.items()}

    def copy(self, source: int, target: int) -> None:
        """Copy one row to another, which may be new."""
        self.layers = {layer: _with_rows(held, target + 1) for layer, held in self.layers.items()}
        for held in self.layers.values():
            for t in held:
                t[target] = t[source]

    def step(self, layer: GatedDeltaNet, qkv: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Return the output for the next token of the first n rows, [n, 1, value_heads, value_dim], and go on.

        `qkv` is [n, 1, channels], `decay` and `beta` are [n, 1, value_heads].
        """
        windows, states = self.layers[layer.layer]
        n = len(qkv)
        inputs = torch.cat((windows[:n], qkv), 1)  # [n, width, channels]
        heads = layer.heads((inputs * layer.conv.weight[:, 0].t()).sum(1))
        out, states[:n] = step(states[:n], *heads, decay[:, 0], beta[:, 0])
        windows[:n] = inputs[:, 1:]
        return out[:, None]


def _with_rows(held: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Return windows and states with at least so many rows; new ones are zero."""
    if (more := count - len(held[0])) <= 0:
        return held
    windows, states = (torch.cat((t, t.new_zeros(more, *t.shape[1:]))) for t in held)
    return windows, states
