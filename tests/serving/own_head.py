"""A head as a user would write it, with a number of outputs at each position."""

from typing import Any

from torch import Tensor, nn

from ptf.model.config import DecoderConfig
from ptf.model.layers import LayerFactory


class Outputs(nn.Module):
    """A projection to numbers."""

    def __init__(self, config: DecoderConfig, factory: LayerFactory, path: str, *, outputs: int) -> None:
        super().__init__()
        self.project = factory.linear(f"{path}.project", config.dim, outputs, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x)

    def loss(self, x: Tensor, batch: Any) -> Tensor:
        return (self.project(x).square().sum(-1) * batch.loss_weights).sum()
