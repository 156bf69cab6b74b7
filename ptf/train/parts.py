"""How a job's model is put together: its config's plugs, resolved, as what the decoder's construction asks for."""

from collections.abc import Sequence
from pathlib import Path

from ptf.config import plug
from ptf.config.schema import ModelConfig
from ptf.errors import UserError
from ptf.model.components import file_of
from ptf.model.layers import Parts
from ptf.model.lora import Lora


def parts_of(spec: ModelConfig, *, adapted: bool = False) -> Parts:
    """The parts of the model as others load it, or, `adapted`, as it is trained: with its adapters still beside the weights. Raises ConfigError
    for a plug that is not there, UserError for two heads."""
    replace = {pattern: plug.bind(own) for pattern, own in spec.replace.items()}
    if spec.head is not None:
        if "head" in replace:
            raise UserError("model.head and model.replace.head both declare the output head; give one")
        replace = {"head": plug.bind(spec.head), **replace}
    return Parts(replace, lora=lora_of(spec) if adapted else None)


def lora_of(spec: ModelConfig) -> Lora | None:
    """The adapters that are trained, if any."""
    lora = spec.lora
    return None if lora is None else Lora(lora.rank, lora.alpha, lora.rslora, tuple(lora.targets))


def unadapted(spec: ModelConfig) -> ModelConfig:
    """The model that adapters and patterns of what trains are put on."""
    return spec.model_copy(update={"lora": None, "train": None})


def headless(spec: ModelConfig) -> ModelConfig:
    """The model without a head of the user's own, which is made for the vocabulary that the model will have."""
    return spec.model_copy(update={"head": None, "replace": {pattern: own for pattern, own in spec.replace.items() if pattern != "head"}})


def some(names: Sequence[str]) -> str:
    """The first of them, and how many more."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")


def report(directory: Path, new: Sequence[str], own: Sequence[str]) -> None:
    """Say which tensors the checkpoint did not have, and which ones no Hugging Face model has."""
    if new:
        print(f"model: not in {directory}, so drawn from the seed: {some(new)}", flush=True)
    if own:
        files = ", ".join(sorted({file_of(name) for name in own}))
        print(
            f"model: your own, without a Hugging Face name: {some(own)}. Exports hold them in {files} beside model.safetensors: ptf loads both, "
            "transformers and vLLM only the latter, so publishing as a plain Hugging Face model is refused where a layer is not theirs", flush=True,
        )  # fmt: skip
