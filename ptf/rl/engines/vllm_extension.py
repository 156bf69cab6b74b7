"""An extension of vLLM's worker that replaces the weights by Hugging Face name.

vLLM's reload packs every layer again except, on a CPU, a head that is tied to the embedding. That head would compute
with the old weights while all other layers have the new ones, and log-probs would be wrong by up to 0.4. Therefore the
head is packed here. Weights that a model loses in vLLM's reload are an error. vLLM imports this class by name and mixes
it into its worker; it needs no import of vllm.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Set
from typing import Any

from torch import Tensor
from tqdm import tqdm

from ptf.rl.weights.streamed import Transfer
from ptf.rl.weights.verification import SyncError

tqdm.set_lock(threading.RLock())  # its own is a named semaphore, which stays behind a worker process that is killed


def copied_without_loader(model: Any, loaded: Set[str]) -> list[str]:
    """Return the parameters that a model reports as loaded in a reload, and of which no loader was called.

    A loader may have had nothing to copy: of a small vocabulary, a rank of a tensor group can have padding only.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return [
        f"{prefix}.{name}".lstrip(".")
        for prefix, layer in model.named_modules()
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.is_meta
        and f"{prefix}.{name}".lstrip(".") in loaded
        and name not in {called for called, _ in get_layerwise_info(layer).loaded_weights}
    ]


@contextlib.contextmanager
def refusing_lost_weights(model: Any) -> Iterator[None]:
    """Run a reload of vLLM. Raises SyncError if the model copied weights to where vLLM's reload does not keep them.

    While it reloads, a layer's parameters have no memory; their loaders are replaced by ones that keep what they get.
    A model that copies without a loader (gpt-oss: experts and sinks) loses it, reports it as loaded, and goes on with
    the weights of the version before.
    """
    load, lost = model.load_weights, list[str]()

    def watched(weights: Any) -> Any:
        loaded = load(weights)
        lost.extend(copied_without_loader(model, loaded or set()))
        return loaded

    model.load_weights = watched
    try:
        yield
    finally:
        model.load_weights = load
    if lost:
        raise SyncError(
            f"vLLM cannot replace weights of {type(model).__name__}: {len(lost)} parameters keep their old values, "
            f"{sorted(lost)[:3]}, …; use rollout.engine: native"
        )


def forget_kernels_of_experts(model: Any) -> None:
    """Have a reload make the kernels of the experts anew. With the kernel of the load before, vLLM's CPU build does not
    pack the new weights, and computes with them as if they were: log-probs are wrong by about 1."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


class WeightLoader:
    """Methods that vLLM's worker gets."""

    def ptf_load(self: Any, buckets: Iterable[Iterable[tuple[str, Tensor]]]) -> None:
        """Load every tensor, named as in a Hugging Face checkpoint."""
        if isinstance(buckets, Transfer):
            buckets.device = str(self.device)
        model = self.get_model()
        if self.device.type == "cpu":
            forget_kernels_of_experts(model)
        with refusing_lost_weights(model):
            self.reload_weights(weights_iterator=(pair for bucket in buckets for pair in bucket))
        model = getattr(model, "language_model", model)  # of a multimodal model
        if self.device.type == "cpu" and model.config.tie_word_embeddings and hasattr(model, "lm_head"):
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
        if isinstance(buckets, Transfer):
            buckets.raise_if_incomplete()
