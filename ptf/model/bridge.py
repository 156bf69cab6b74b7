"""ptf's own decoder, built for the checkpoint in a directory (`model.backend: ptf`)."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from ptf.errors import UserError
from ptf.model.components import raise_if_unmatched
from ptf.model.config import DecoderConfig
from ptf.model.decoder import Decoder
from ptf.model.families import family_of
from ptf.model.head import is_scalar
from ptf.model.layers import LayerFactory
from ptf.model.lora import Lora, raise_if_unmatched_targets
from ptf.model.model_files import read_config
from ptf.model.quantised_weights import quantised_weights
from ptf.model.tensor_files import TensorFiles, has_weights

CPU = torch.device("cpu")


def decoder_config(directory: Path) -> DecoderConfig:
    """Return the sizes of ptf's model of a directory, mapped from its config.json. Raise UserError for a required
    setting that is missing."""
    hf = read_config(directory)
    try:
        return family_of(hf).config(hf)
    except KeyError as error:  # a setting without a default
        if error.args[0] in hf:
            raise
        raise UserError(f"model.path: {directory}/config.json has no {error.args[0]}") from error


def build(
    directory: Path, *, head: Literal["lm", "scalar"] | None = None, factory: LayerFactory | None = None
) -> Decoder:
    """Return a decoder of the right shape on the meta device (without memory).

    `head` is the kind of head; None takes that of the checkpoint. `factory` replaces components and adds adapters.
    Raise UserError for a model that cannot be trained, and for a replacement or an adapter that matches nothing.
    """
    hf = read_config(directory)
    family = family_of(hf)
    if family.per_expert and has_weights(directory):  # the form in which the checkpoint stores experts
        with TensorFiles(directory, family.aliases) as files:
            if any(".experts.0." in name for name in files.names):
                family = replace(family, mappings=family.per_expert)
    if (method := hf.get("quantization_config", {}).get("quant_method", "mxfp4")) != "mxfp4":
        copy = ", or a copy in bf16, as transformers' FineGrainedFP8Config(dequantize=True) loads one"
        raise UserError(
            f"model.path: {directory} is quantised ({method}), which ptf cannot train; "
            f"use the checkpoint it was made from{copy if method == 'fp8' else ''}"
        )
    config = replace(decoder_config(directory), head=head or ("scalar" if is_scalar(hf) else "lm"))
    if factory is not None and factory.replace:
        raise_if_unmatched(config, factory)
    with torch.device("meta"):
        model = Decoder(config, factory)
        if factory is not None and factory.lora is not None:
            raise_if_unmatched_targets(
                model, factory.lora, Decoder(config, replace(factory, lora=Lora(targets=("*",))))
            )
    if factory is not None and factory.quantised is not None and not quantised_weights(model):
        raise UserError(
            f"model.quantization: the model in {directory} has no weight that it holds in four bits (mxfp4 holds "
            "experts only), or all of them train; set model.quantization: nf4, or leave it out"
        )
    model.family = family
    return model


def load(
    directory: Path,
    device: torch.device = CPU,
    *,
    head: Literal["lm", "scalar"] | None = None,
    factory: LayerFactory | None = None,
    seed: int = 0,
) -> Decoder:
    """Return the model of a directory with its weights, whole, on a device."""
    model = build(directory, head=head, factory=factory)
    model.give_weights(directory, device, seed=seed)
    return model
