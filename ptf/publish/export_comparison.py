"""Checks before publishing: the exported files are loaded as users will load them, and must give the same log-probs as
the trained model."""

from pathlib import Path

import torch

from ptf.compute.world import World
from ptf.config import Job
from ptf.config.logprob_limits import LOGPROB_TOLERANCE
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model import model_files
from ptf.model.backends import backend_of
from ptf.model.components import FILES
from ptf.model.head import is_scalar
from ptf.model.model_directory import AdapterDirectory
from ptf.model.reference import export_difference, export_rounding, head_difference
from ptf.model.rounding import bound_of
from ptf.train.adapter import difference_of, raise_if_difference
from ptf.train.components import layer_factory_of, without_adapters
from ptf.train.export import probe, probe_of
from ptf.train.export_settings import padding_id
from ptf.train.job_tokenizer import job_tokenizer
from ptf.train.model_source import StartingModel


def model_difference(job: Job, run: Path, model: Path) -> float:
    """Load the exported model in transformers and return the largest difference of a log-prob from the trained model.

    Raises UserError if the difference is too large, or if the exported tokenizer is not the one of training.
    """
    if (model / FILES["layers."]).is_file():
        raise UserError(
            "not published: layers of model.replace have tensors that no Hugging Face model has, "
            f"so transformers and vLLM would load {model} with random tensors in their place. "
            f"The directory has the whole model, those tensors in {FILES['layers.']}: "
            "to continue training from it, use the same model.replace"
        )
    trained = job_tokenizer(job, run, job.verify_bytes)
    served = Tokenizer.load(str(model))
    served.rendering = trained.rendering  # not compared: a template may render the date, which differs when served
    config, kept = model_files.read_config(model), probe_of(run)
    if is_scalar(config):
        trained.pad_with(padding_id(trained, config))
    if changed := trained.differences(served):
        raise UserError(
            f"not published: the tokenizer in {model} gives different ids than the tokenizer of training: they differ "
            f"in their {' and '.join(changed)}"
        )
    if "values" in kept:
        difference = head_difference(model, kept["tokens"], kept["values"], layer_factory_of(job.model))
    else:
        difference = export_difference(model, kept["tokens"], kept["logprobs"], trained.stop_ids)
    whole = job.train.precision == "fp32" and model_files.export_dtype(model) == torch.float32
    bound = LOGPROB_TOLERANCE["fp32" if whole else "bf16"]
    if not whole and "logprobs" in kept:
        bound = bound_of(difference, bound, lambda: export_rounding(model, kept["tokens"]))
    if not difference <= bound:
        raise UserError(
            f"not published: loaded in transformers, {model} differs from the trained model by {difference:.3g} in a "
            f"log-prob (bound {bound:g})"
        )
    return difference


def adapter_difference(job: Job, run: Path, adapter: Path) -> float:
    """Load the base model with the adapter and return the largest difference of a log-prob from the trained model.

    Raises UserError if the difference is too large.
    """
    source = StartingModel.of_job(job, run).with_weights()
    spec, base = source.section, source.directory
    stored = AdapterDirectory.read(adapter)
    kept = {name: value for name, value in probe_of(run).items() if name in ("tokens", "logprobs", "values")}
    head = "scalar" if "values" in kept else "lm"
    factory = stored.factory(base, layer_factory_of(without_adapters(spec)), spec.backend)
    model = backend_of(spec.backend).build(base, head=head, factory=factory).requires_grad_(False).eval()
    model.give_weights(base, World().device)
    stored.fill(model)
    # beside weights in four bits the probe is that of the merged model, in the dtype of the checkpoint
    rounded = job.model.quantization is not None and model_files.export_dtype(base) != torch.float32
    bound, found = LOGPROB_TOLERANCE["bf16" if rounded else job.train.precision], probe(model, World(), kept["tokens"])
    if bound == LOGPROB_TOLERANCE["bf16"]:
        error = difference_of(kept, found)
        with torch.autocast("cpu", torch.bfloat16):
            bound = bound_of(error, bound, lambda: difference_of(found, probe(model, World(), kept["tokens"])))
    return raise_if_difference(adapter, kept, found, bound)
