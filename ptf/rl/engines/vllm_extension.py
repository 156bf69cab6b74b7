"""An extension of vLLM's worker that replaces the weights by Hugging Face name.

vLLM's reload packs every layer again except, on a CPU, a head that is tied to the embedding. That head would compute
with the old weights while all other layers have the new ones, and log-probs would be wrong by up to 0.4. Therefore the
head is packed here. vLLM imports this class by name and mixes it into its worker; it needs no import of
vllm.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ptf.rl.weights.streamed import Transfer
from ptf.rl.weights.verification import Receipt


class WeightLoader:
    """Methods that vLLM's worker gets."""

    def ptf_load(self: Any, buckets: Iterable[Iterable[tuple[str, Tensor]]]) -> Receipt | None:
        """Load every tensor, named as in a Hugging Face checkpoint. Returns the receipt of a transfer, else None."""
        if isinstance(buckets, Transfer):
            buckets.device = str(self.device)
        self.reload_weights(weights_iterator=(pair for bucket in buckets for pair in bucket))
        model = self.get_model()
        model = getattr(model, "language_model", model)  # of a multimodal model
        if self.device.type == "cpu" and model.config.tie_word_embeddings:
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
        return buckets.receipt() if isinstance(buckets, Transfer) else None
