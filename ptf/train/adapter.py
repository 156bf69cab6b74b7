"""Export of LoRA training: merged weights, which any engine loads, and the adapter alone, in PEFT's format.

Each export is loaded again as users will load it, and must give the log-probs of the model that was trained. With
`model.quantization: nf4`, the merged model is instead compared with the checkpoint's own weights plus the adapters.
"""

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from ptf.compute.world import World
from ptf.config.logprob_limits import LOGPROB_TOLERANCE
from ptf.config.sections.model import ModelConfig
from ptf.errors import UserError
from ptf.model import model_files, rounding, sharded_tensor
from ptf.model.components import abbreviated
from ptf.model.lora import whole
from ptf.model.model import Model
from ptf.model.peft_format import save
from ptf.storage.hub import at_revision
from ptf.train.components import without_adapters
from ptf.train.export import probe, probe_of, write_probe
from ptf.train.trainer import load_model


def export_adapter(model: Model, source: Path, merged: Path, world: World, spec: ModelConfig, precision: str) -> None:
    """Check `merged`, the exported model, and write the adapter of the base model in `source` beside it.

    Every rank calls it; the check needs memory for one more model. If PEFT's format cannot hold some tensors, they are
    named and only the merged model is kept. Raises UserError if either export, loaded again, gives other log-probs than
    the model that was trained.
    """
    trained = probe(model, world, probe_of(merged.parent)["tokens"])
    head = "scalar" if model.config.head == "scalar" else "lm"

    def load(directory: Path, section: ModelConfig, precision: str) -> Model:
        pretrained = section.model_copy(update={"init": "pretrained"})
        return load_model(directory, world, pretrained, seed=0, precision=precision, head=head, frozen=True)

    def checked(directory: Path, loaded_in: Callable[[str], Model], bound: float) -> float:
        """Return the difference, of which the model's own rounding is allowed if it is beyond the bound."""

        def probed(precision: str) -> dict[str, list]:
            gc.collect()  # modules refer to each other: the first model would stay beside the second
            return probe(loaded_in(precision), world, trained["tokens"])

        loaded = probed(precision)
        if precision == "bf16":
            error = world.together(lambda: difference_of(trained, loaded))
            bound = rounding.bound_of(error, bound, lambda: difference_of(probed("fp32"), loaded))
        return raise_if_difference(directory, trained, loaded, bound)

    if spec.quantization:
        _check_unrounded(model, source, merged, world, spec, trained)
    else:
        plain = without_adapters(spec)
        checked(merged, lambda precision: load(merged, plain, precision), _tolerance(merged, precision))
    form = model.peft()
    if obstacles := form.obstacles():
        if world.leads:
            print(
                f"lora: no adapter is written, because PEFT's format cannot hold {abbreviated(obstacles)}; "
                f"{merged} holds everything, merged",
                flush=True,
            )
        return
    directory = merged.with_name("adapter")
    unchecked = directory.with_name("adapter.unchecked")
    save(form.tensors(), form.config(base_name(spec, source)), unchecked, writes=world.leads)
    world.barrier()

    def adapted(precision: str) -> Model:
        base = load(source, spec, precision)
        base.peft().copy(load_file(unchecked / "adapter_model.safetensors").__getitem__)
        return base

    difference = checked(unchecked, adapted, LOGPROB_TOLERANCE[precision])
    world.barrier()
    if world.leads:
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(unchecked, directory)
        print(
            f"lora: {directory} (PEFT) was loaded again: its log-probs are within {difference:.1e} of the trained "
            f"model's; {merged} holds the merged weights",
            flush=True,
        )
    world.barrier()


def _check_unrounded(
    model: Model, source: Path, merged: Path, world: World, spec: ModelConfig, trained: dict[str, list]
) -> None:
    """Compare `merged`, loaded again, with the checkpoint in `source` and what was trained beside its rounded weights.

    The leading rank does so on its CPU, in fp32, for a GPU that holds a quantised model may have no room for a whole
    one. What `merged` computes becomes its probe. Raises UserError on every rank if the two differ.
    """
    head = "scalar" if model.config.head == "scalar" else "lm"
    learned = {n: whole(p.detach()).cpu() for n, p in model.named_parameters() if p.requires_grad}

    def computed(directory: Path, section: ModelConfig, values: dict[str, Tensor]) -> dict[str, list]:
        section = section.model_copy(update={"init": "pretrained", "quantization": None})
        loaded = load_model(directory, World(), section, seed=0, precision="fp32", head=head, frozen=True)
        for name, value in values.items():
            sharded_tensor.fill(loaded.get_parameter(name), value.__getitem__)
        found = probe(loaded, World(), trained["tokens"])
        del loaded
        gc.collect()  # modules refer to each other
        return found

    def check() -> None:
        loaded = computed(merged, without_adapters(spec), {})
        raise_if_difference(merged, computed(source, spec, learned), loaded, _tolerance(merged, "fp32"))
        write_probe(merged, loaded)
        print(
            f"lora: {merged} has the adapter and the weights of the checkpoint; beside the {spec.quantization} "
            f"weights of training its log-probs differ by up to {difference_of(trained, loaded):.2g}",
            flush=True,
        )

    world.together(check)


def _tolerance(merged: Path, precision: str) -> float:
    """Return the bound for an exported model that is computed in this precision: its file rounds, too."""
    is_fp32 = precision == "fp32" and model_files.export_dtype(merged) == model_files.DTYPES["float32"]
    return LOGPROB_TOLERANCE["fp32" if is_fp32 else "bf16"]


def raise_if_difference(directory: Path, trained: dict[str, list], reloaded: dict[str, list], bound: float) -> float:
    """Return the largest difference between two probes. Raises UserError if it is above `bound`."""
    difference = difference_of(trained, reloaded)
    if not difference <= bound:
        (kind,) = trained.keys() - {"tokens"}
        raise UserError(
            f"loaded again, {directory} differs from the trained model by {difference:.3g} in {kind} (bound "
            f"{bound:g}); do not use it"
        )
    return difference


def difference_of(one: dict[str, list], other: dict[str, list]) -> float:
    """Return the largest difference between the values of two probes."""
    (kind,) = one.keys() - {"tokens"}
    return rounding.difference(other[kind], one[kind])


def base_name(spec: ModelConfig, source: Path) -> str:
    """Return the base model's name for the adapter's config: `model.path`, or the run's own copy if the run added
    tokens or drew weights."""
    return at_revision(spec.path)[0] if model_files.locate(spec.path, verify_up_to=None) == source else str(source)
