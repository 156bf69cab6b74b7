"""Writing what LoRA trained: merged weights, which any engine loads, and the adapter alone, in PEFT's format.

The one idea: neither counts as written before it has been loaded again, as others will, and gives the log-probs of the model that was trained.
"""

import os
import shutil
from pathlib import Path

import numpy as np

from ptf.compute.world import World
from ptf.config.schema import LOGPROB_BOUND, ModelConfig
from ptf.errors import UserError
from ptf.model import bridge
from ptf.model.decoder import Decoder
from ptf.model.families import Family
from ptf.model.peft_format import PeftFormat, save
from ptf.train.export import probe
from ptf.train.parts import some, unadapted
from ptf.train.trainer import load_model


def export_adapter(model: Decoder, family: Family, source: Path, merged: Path, world: World, spec: ModelConfig, precision: str) -> None:
    """Check `merged`, the exported model, and write the adapter of the base model in `source` beside it. Every rank calls it, with memory for one
    more model. What PEFT has no words for is named, and then there is only the merged model. Raises UserError if either, loaded again, gives
    other log-probs than the model that was trained."""
    trained = probe(model, world)
    head = "scalar" if model.config.head == "scalar" else "lm"

    def load(directory: Path, how: ModelConfig) -> Decoder:
        return load_model(directory, world, how.model_copy(update={"init": "pretrained"}), seed=0, precision=precision, head=head)[0]

    whole = precision == "fp32" and bridge.export_dtype(merged) == bridge.DTYPES["float32"]
    refuse_difference(merged, trained, probe(load(merged, unadapted(spec)), world), LOGPROB_BOUND["fp32" if whole else "bf16"])
    form = PeftFormat(model, family)
    if obstacles := form.obstacles():
        if world.leads:
            print(f"lora: no adapter is written, for its format cannot hold {some(obstacles)}; {merged} has everything, merged", flush=True)
        return
    directory = merged.with_name("adapter")
    unchecked = directory.with_name("adapter.unchecked")
    save(form.tensors(), form.config(base_name(spec, source)), unchecked, writes=world.leads)
    world.barrier()
    again = load(source, spec)
    PeftFormat(again, family).fill(unchecked / "adapter_model.safetensors")
    difference = refuse_difference(unchecked, trained, probe(again, world), LOGPROB_BOUND[precision])
    world.barrier()
    if world.leads:
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(unchecked, directory)
        print(f"lora: {directory} (PEFT), loaded again: log-probs within {difference:.1e} of the trained model's; {merged} has it merged", flush=True)
    world.barrier()


def refuse_difference(directory: Path, trained: dict[str, list], again: dict[str, list], bound: float) -> float:
    """Largest difference of two probes. Raises UserError above `bound`."""
    (kind,) = trained.keys() - {"tokens"}
    difference = float(np.abs(np.array(trained[kind]) - np.array(again[kind])).max())
    if not difference <= bound:
        raise UserError(f"loaded again, {directory} differs from the trained model by {difference:.3g} in {kind} (bound {bound:g}); do not use it")
    return difference


def base_name(spec: ModelConfig, source: Path) -> str:
    """What the adapter says that it belongs to: the model as the job names it, or, where the run extended or drew it, the run's own copy."""
    return spec.path if bridge.locate(spec.path, spec.revision, verify_up_to=None) == source else str(source)
