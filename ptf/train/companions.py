"""The frozen models that a recipe's loss looks at, beside the one that trains.

The one idea: a companion is loaded as the model itself is, sharded alike. Where only adapters train and the companion is what training starts from,
the model without its adapters is that companion, and costs nothing.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from ptf.compute.world import World
from ptf.config import Job
from ptf.config.schema import ModelConfig
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model import bridge
from ptf.model.decoder import Decoder
from ptf.model.flops import Flops
from ptf.model.vocabulary import refuse_larger_tokenizer, rows
from ptf.recipes.protocol import Companion
from ptf.train.parts import unadapted
from ptf.train.start import own_reference, start_directory
from ptf.train.trainer import load_model

FREE = ("max_positions", "init_std", "head", "tied")  # of a model's config; no forward pass depends on them


def companions(
    wanted: Mapping[str, Companion], job: Job, world: World, within: World, model: Decoder, spec: ModelConfig, directory: Path, run: Path, tokenizer: str
) -> dict[str, Decoder]:  # fmt: skip
    """By role. `within`: the ranks that hold a model together; `spec`, `directory`: what `model` was made from; all ranks call it.
    Raises UserError for one that is not a model of the same architecture, where it must be, or has another tokenizer."""
    found: dict[str, Decoder] = {}
    for role, one in wanted.items():
        if not needs_weights(one, spec):
            found[role] = model
            continue
        if one.path is None:
            place = Path(str(world.share(str(start_directory(spec, directory, run, tokenizer, job.seed)) if world.leads else None)))
        else:
            place = located(one, role, job.verify_bytes)
            refuse_other_tokenizer(place, tokenizer, role, one, directory)
        how = exported(spec, place) if one.alike else ModelConfig(path=str(place))
        found[role], _ = load_model(place, within, how, seed=job.seed, precision=job.train.precision)
        found[role].requires_grad_(False)
        if one.alike:
            refuse_other_architecture(found[role], model, place, role)
    return found


def located(one: Companion, role: str, verify_up_to: float | None) -> Path:
    """Its local directory, verified as `bridge.locate` does. Raises UserError if there is none."""
    try:
        return bridge.locate(str(one.path), one.revision, verify_up_to=verify_up_to)
    except UserError as error:
        raise UserError(f"{role}: {str(error).removeprefix('model.path: ')}") from None


def refuse_other_tokenizer(place: Path, tokenizer: str, role: str, one: Companion, model: Path) -> None:
    """A companion reads the ids that the model is trained on, so they must mean the same; its chat template is not used."""
    ours = Tokenizer.load(tokenizer)
    if not (place / "tokenizer_config.json").exists():
        if not one.alike and (there := rows(bridge.read_config(place))) != (here := rows(bridge.read_config(model))):
            raise UserError(
                f"{role}: {place} has no tokenizer, and rows for {there} tokens where the model has {here}, so it may read other texts; put its tokenizer there"
            )
        return
    theirs = Tokenizer.load(str(place)).identity
    if any(ours.identity[part] != theirs[part] for part in ("vocabulary", "merges", "probes")):
        raise UserError(f"{role}: the model in {place} has another tokenizer than the one that is trained, so it would read other texts")
    refuse_larger_tokenizer(place, tokenizer, ours.vocab_size)


def refuse_other_architecture(companion: Decoder, model: Decoder, place: Path, role: str) -> None:
    ours, theirs = ({name: value for name, value in asdict(m.config).items() if name not in FREE} for m in (model, companion))
    if differ := [name for name in ours if ours[name] != theirs[name]]:
        raise UserError(f"{role}: the model in {place} is of another architecture than the one that is trained: {', '.join(differ)} differ")


def exported(spec: ModelConfig, place: Path) -> ModelConfig:
    """How to load another checkpoint of the model that `spec` trains: with its components, without what is trained on top."""
    return unadapted(spec).model_copy(update={"path": str(place), "init": "pretrained"})


def needs_weights(one: Companion, spec: ModelConfig) -> bool:
    """Whether it is a model of its own; `spec` is the one that trains."""
    return one.path is not None or not own_reference(spec)


def forward_flops(companion: Decoder) -> Flops:
    """Of a forward pass alone."""
    trained = [p for p in companion.parameters() if p.requires_grad]
    companion.requires_grad_(False)
    found = Flops.of(companion)
    for parameter in trained:
        parameter.requires_grad_(True)
    return found
