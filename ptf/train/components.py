"""Construction of a job's model: its config's plugins, resolved into the parts that the decoder takes."""

from collections.abc import Sequence
from functools import partial

from ptf.config import plugin
from ptf.config.sections.model import ModelConfig
from ptf.errors import UserError
from ptf.model.kernels.choice import PLAIN, Kernels
from ptf.model.layers import LayerFactory
from ptf.model.lora import Lora
from ptf.train.trainable import matches


def layer_factory_of(spec: ModelConfig, *, adapted: bool = False, kernels: Kernels = PLAIN) -> LayerFactory:
    """Return the model's replaced parts and, if `adapted`, its adapters and the weights that are held in four bits.

    Raises ConfigError if a plugin cannot be imported, UserError if two output heads are declared.
    """
    replace = {pattern: plugin.bind(own) for pattern, own in spec.replace.items()}
    if spec.head is not None:
        if "head" in replace:
            raise UserError("model.head and model.replace.head both declare the output head; give one")
        replace = {"head": plugin.bind(spec.head), **replace}
    if not adapted:
        return LayerFactory(replace, kernels=kernels)
    form = spec.quantization and partial(_form, spec.quantization, tuple(spec.trainable or ()))
    lora = spec.lora and Lora(spec.lora.rank, spec.lora.alpha, tuple(spec.lora.targets))
    return LayerFactory(replace, lora=lora, quantised=form, kernels=kernels)


def _form(quantization: str, trained: Sequence[str], name: str) -> str | None:
    """Return the form of four bits in which `model.quantization` holds the weight of this name, or None.

    NF4 holds the projections of the layers that no pattern of `model.trainable` matches, but no router, whose rounding
    would send tokens to other experts, and no gate of a shared expert, which is one row; MXFP4 those of them that
    checkpoints store so, the experts'.
    """
    gates = (".router.weight", ".shared_gate.weight")
    held = ".experts." in name if quantization == "mxfp4" else not name.endswith(gates)
    trains = any(matches(name, pattern) for pattern in trained)
    return quantization if name.startswith("layers.") and held and not trains else None


def without_adapters(spec: ModelConfig) -> ModelConfig:
    """Return the section without adapters, without four-bit weights and without patterns of what trains."""
    return spec.model_copy(update={"lora": None, "trainable": None, "quantization": None})


def without_head(spec: ModelConfig) -> ModelConfig:
    """Return the section without the user's own head, which is built after tokens were added, for the final
    vocabulary."""
    return spec.model_copy(
        update={"head": None, "replace": {pattern: own for pattern, own in spec.replace.items() if pattern != "head"}}
    )
