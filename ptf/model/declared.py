"""A head of the user's own: `model.head: {use: pkg.mod:MyHead}` stands where the projection to the vocabulary would.

The one idea: it is given the hidden states inside the decoder's forward pass, where sharded parameters are whole, and brings the loss that
trains it. Its tensors have no Hugging Face name; they are exported beside the model, in `head.safetensors`, as `head.…`.
"""

from typing import Any, Protocol

from torch import Tensor

from ptf.model.chunked import cross_entropy_by
from ptf.model.config import DecoderConfig
from ptf.model.head import Head
from ptf.model.layers import Parts


class DeclaredHead(Protocol):
    """An nn.Module. Projections made with `parts.linear(f"{path}.name", …)` get LoRA where the job asks for it; weights begin as the constructor
    leaves them, from the job's seed. One that has `logits(x)` ([..., D] → [..., vocab]) can be generated from with the native engine."""

    def __init__(self, config: DecoderConfig, parts: Parts, path: str) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] → [B, T, …]: what the head says of each position; exports are compared by it."""
        ...

    def loss(self, x: Tensor, batch: Any) -> Tensor:
        """x [B, T, D], batch a ptf.data.batch.Batch → the SUM over its trained positions, weighted by `batch.weights`."""
        ...


def next_token_loss(x: Tensor, head: Head | DeclaredHead, batch: Any) -> tuple[Tensor, Tensor | None]:
    """The loss of a model that is trained on text, and each document's part in it [documents] (no gradient): cross-entropy over the vocabulary; or
    the declared head's own, which tells no parts."""
    if not isinstance(head, Head):
        return head.loss(x, batch), None
    return cross_entropy_by(x, head, batch.targets, batch.weights, batch.segments, len(batch.lengths))
