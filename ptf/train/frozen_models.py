"""The frozen models that a recipe's loss uses beside the one that trains.

A frozen model is loaded and sharded like the model itself. If only adapters train and the frozen model is the model
that training starts from, the trained model without its adapters serves as the frozen model and costs no memory.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from ptf.compute.world import World
from ptf.config import Job
from ptf.config.sections.model import ModelConfig
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model import bridge
from ptf.model.decoder import Decoder
from ptf.model.families import MODULES
from ptf.model.flops import Flops
from ptf.model.vocabulary import raise_if_larger_tokenizer, rows
from ptf.recipes.protocol import FrozenModelSpec
from ptf.train.components import without_adapters
from ptf.train.starting_model import is_own_reference, start_directory
from ptf.train.trainer import load_model

FREE = ("max_positions", "init_std", "head", "tied")  # config fields that no forward pass depends on


def load_frozen_models(
    by_role: Mapping[str, FrozenModelSpec],
    job: Job,
    world: World,
    model_world: World,
    model: Decoder,
    spec: ModelConfig,
    directory: Path,
    run: Path,
    tokenizer: str,
) -> dict[str, Decoder]:
    """Load the frozen models, by role; all ranks call it.

    `model_world`: the ranks that share one model; `spec` and `directory`: what `model` was made from. Raises UserError
    if a frozen model must have the model's architecture and has another one, or has another tokenizer.
    """
    loaded: dict[str, Decoder] = {}
    for role, frozen_model in by_role.items():
        if not needs_weights(frozen_model, spec):
            loaded[role] = model
            continue
        if frozen_model.path is None:
            path = world.together(lambda: start_directory(spec, directory, run, tokenizer, job.seed))
        else:
            path = located(frozen_model, role, job.verify_bytes)
            raise_if_other_tokenizer(path, tokenizer, role, frozen_model, directory)
        with errors_of(role):
            loaded[role], _ = load_model(
                path,
                model_world,
                section_of(frozen_model, spec, path),
                seed=job.seed,
                precision=job.train.precision,
                compiled=job.train.compile,
                fused=job.train.fused,
                frozen=True,
            )
        if frozen_model.same_architecture:
            raise_if_other_architecture(loaded[role], model, path, role)
    return loaded


def section_of(frozen_model: FrozenModelSpec, spec: ModelConfig, path: Path) -> ModelConfig:
    """Return the config section that loads a frozen model from `path`; `spec` is that of the model that trains."""
    if frozen_model.same_architecture:
        return checkpoint_section(spec, path)
    return ModelConfig(path=str(path), backend=backend_of(path, spec.backend))


def backend_of(directory: Path, of_job: Literal["ptf", "hf"]) -> Literal["ptf", "hf"]:
    """Return the backend of a model beside the one that trains: the job's, and `hf` for a family that ptf has not."""
    return "hf" if of_job == "hf" or bridge.read_config(directory).get("model_type") not in MODULES else "ptf"


def located(frozen_model: FrozenModelSpec, role: str, verify_up_to: float | None) -> Path:
    """Return the frozen model's local directory, verified as `bridge.locate` does. Raises UserError if there is
    none."""
    with errors_of(role):
        return bridge.locate(str(frozen_model.path), verify_up_to=verify_up_to)


@contextlib.contextmanager
def errors_of(role: str) -> Iterator[None]:
    """Name the role, and not the job's model, in a UserError about the model that is loaded in the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{role}: {str(error).removeprefix('model.path: ')}") from None


def raise_if_other_tokenizer(path: Path, tokenizer: str, role: str, frozen_model: FrozenModelSpec, model: Path) -> None:
    """Raise UserError unless the frozen model's tokenizer gives the ids that the model is trained on.

    Its chat template is not used, so it may differ.
    """
    ours = Tokenizer.load(tokenizer)
    if not (path / "tokenizer_config.json").exists():
        its_rows, our_rows = rows(bridge.read_config(path)), rows(bridge.read_config(model))
        if not frozen_model.same_architecture and its_rows != our_rows:
            raise UserError(
                f"{role}: {path} has no tokenizer, and {its_rows} vocabulary rows where the model has {our_rows}, "
                "so its token ids may differ; put its tokenizer into that directory"
            )
        return
    theirs = Tokenizer.load(str(path)).identity
    if any(ours.identity[part] != theirs[part] for part in ("vocabulary", "merges", "probes")):
        raise UserError(
            f"{role}: the model in {path} has another tokenizer than the model that is trained, "
            "so the same ids would mean other texts; use one with the same tokenizer"
        )
    raise_if_larger_tokenizer(path, tokenizer, ours.vocab_size)


def raise_if_other_architecture(frozen_model: Decoder, model: Decoder, path: Path, role: str) -> None:
    """Raise UserError if the two configs differ in anything that a forward pass depends on."""
    ours, theirs = (
        {name: value for name, value in asdict(m.config).items() if name not in FREE} for m in (model, frozen_model)
    )
    if differ := [name for name in ours if ours[name] != theirs[name]]:
        raise UserError(
            f"{role}: the model in {path} has another architecture than the model that is trained: "
            f"{', '.join(differ)} differ"
        )


def checkpoint_section(spec: ModelConfig, path: Path) -> ModelConfig:
    """Return the config section that loads another checkpoint of the model of `spec`: with its components, without
    adapters."""
    return without_adapters(spec).model_copy(update={"path": str(path), "init": "pretrained"})


def needs_weights(frozen_model: FrozenModelSpec, spec: ModelConfig) -> bool:
    """Return whether the frozen model is a model of its own; `spec` is the section of the model that trains."""
    return frozen_model.path is not None or not is_own_reference(spec)


def forward_flops(frozen_model: Decoder) -> Flops:
    """Count the FLOPs of a forward pass alone."""
    trained = [p for p in frozen_model.parameters() if p.requires_grad]
    frozen_model.requires_grad_(False)
    flops = Flops.of(frozen_model)
    for parameter in trained:
        parameter.requires_grad_(True)
    return flops
