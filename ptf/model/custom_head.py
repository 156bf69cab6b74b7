"""A head of the user's own: `model.head: {use: pkg.mod:MyHead}` replaces the projection to the vocabulary.

The head is given the hidden states inside the decoder's forward pass, where sharded parameters are whole, and defines
the loss that trains it. Its tensors have no Hugging Face name; they are exported beside the model, in
`head.safetensors`, under names that begin with `head.`.
"""

from typing import Any, Protocol

from torch import Tensor

from ptf.model.config import DecoderConfig
from ptf.model.layers import LayerFactory


class CustomHead(Protocol):
    """The interface of a head of the user's own, an nn.Module.

    Projections made with `factory.linear(f"{path}.name", …)` get LoRA adapters where the job asks for them. Weights
    begin as the constructor leaves them, seeded by the job. A head that has `logits(x)` ([..., D] → [..., vocab]) can
    be generated from with the native engine.
    """

    def __init__(self, config: DecoderConfig, factory: LayerFactory, path: str) -> None:
        """Construct the head for a decoder; `path` is its unified name."""
        ...

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's output for every position, [B, T, D] → [B, T, …]; exports are compared by it."""
        ...

    def loss(self, x: Tensor, batch: Any) -> Tensor:
        """Return the SUM of the losses of the trained positions, weighted by `batch.loss_weights`.

        `x` is [B, T, D], `batch` a ptf.data.batch.Batch.
        """
        ...
