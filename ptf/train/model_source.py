"""Where a model comes from: the config section that it is built by, and a local directory with its config and weights.

The model that training starts from is a `StartingModel`, with which training, evaluation and rollouts all begin: it is
located, tokens are added, and its tokenizer is written. Each directory is written once per run and verified when it is
read again, so every stage uses the same model. A model beside it (a reference, a teacher, a reward model) is a
`ModelSource`.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Self

from ptf.compute.world import World
from ptf.config.schema import Job
from ptf.config.sections.model import ModelConfig, TokensConfig
from ptf.config.sections.train import TrainConfig
from ptf.data.added import add, wanted
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model import model_files
from ptf.model.backends import backend_of, capable
from ptf.model.config import DecoderConfig
from ptf.model.model import Model
from ptf.model.model_writer import save_hf
from ptf.model.vocabulary import NewRows, extend, raise_if_larger_tokenizer, read_vectors, rows
from ptf.recipes.protocol import FrozenModelSpec
from ptf.storage import file_verification
from ptf.train.components import without_adapters, without_head
from ptf.train.job_tokenizer import is_rendered_otherwise, rendered
from ptf.train.trainer import built, load_model
from ptf.workspace import scratch

FREE = ("max_positions", "init_std", "head", "tied")  # config fields that no forward pass depends on


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded; `role` is the frozen model's, which errors name in place of `model.path`."""

    section: ModelConfig  # loads `directory`
    directory: Path
    seed: int = 0
    role: str = ""

    @classmethod
    def of(
        cls, spec: FrozenModelSpec, role: str, model: ModelConfig, *, seed: int = 0, verify_up_to: float | None = None
    ) -> "ModelSource":
        """Locate a model beside the one of the section `model`, and verify it as `model_files.locate` does. Raises
        UserError if there is none.

        One of the same architecture has the components of `model`; another one is ptf's own decoder, or of transformers
        where `model` is or ptf has not its family.
        """
        with _errors_of(role):
            directory = model_files.locate(str(spec.path), verify_up_to=verify_up_to)
        if spec.same_architecture:
            return cls(model, directory, seed, role).checkpoint(directory)
        return cls(ModelConfig(path=str(directory), backend=capable(directory, model.backend)), directory, seed, role)

    def checkpoint(self, directory: Path) -> "ModelSource":
        """Return another checkpoint of this model: with its components, without adapters."""
        section = without_adapters(self.section).model_copy(update={"path": str(directory), "init": "pretrained"})
        return ModelSource(section, directory, self.seed, self.role)

    def load(
        self, world: World, train: TrainConfig, head: Literal["lm", "scalar"] = "lm", *, frozen: bool = False
    ) -> Model:
        """Load the model as a run with these settings does; all ranks of `world` share it (`load_model`)."""
        with _errors_of(self.role):
            return load_model(
                self.directory,
                world,
                self.section,
                seed=self.seed,
                precision=train.precision,
                head=head,
                recomputed="none" if frozen else train.activation_checkpointing,
                compiled=train.compile,
                fused=train.fused,
                frozen=frozen,
            )

    def raise_if_unfit(self, head: Literal["lm", "scalar"]) -> Model:
        """Raise the UserError with which `load` would refuse the files; return the model without memory."""
        with _errors_of(self.role):
            model = built(self.directory, self.section, head)
            if self.section.init == "pretrained":
                model.raise_if_unfit(self.directory)
            return model

    def raise_if_other_architecture(self, config: DecoderConfig, trained: DecoderConfig) -> None:
        """Raise UserError if this model's config and that of the model that is trained differ in anything that a
        forward pass depends on."""
        ours, theirs = (
            {name: value for name, value in asdict(c).items() if name not in FREE} for c in (trained, config)
        )
        if differ := [name for name in ours if ours[name] != theirs[name]]:
            raise UserError(
                f"{self.role}: the model in {self.directory} has another architecture than the model that is trained: "
                f"{', '.join(differ)} differ"
            )


@contextlib.contextmanager
def _errors_of(role: str) -> Iterator[None]:
    """Name the role, if there is one, and not the job's model, in a UserError about the model of the block."""
    try:
        yield
    except UserError as error:
        if not role:
            raise
        raise UserError(f"{role}: {str(error).removeprefix('model.path: ')}") from None


@dataclass(frozen=True, kw_only=True)
class StartingModel(ModelSource):
    """The model that a run starts from, after tokens were added, and its tokenizer."""

    tokenizer_path: str
    run: Path

    @classmethod
    def of_job(cls, job: Job, run: Path, located: Path | None = None) -> "StartingModel":
        """Locate the model of the job, add its tokens and write its tokenizer: in the run, with the job's template,
        where the job changes how conversations are rendered or the template renders a date.

        `located`: the directory of the model, where it was located before.
        """
        located = located or model_files.locate(job.model.path, verify_up_to=job.verify_bytes)
        if model_files.unties(located):
            print(
                f"model: {located} stores an output projection unlike its embedding: they are not tied, as in "
                "transformers 5, though its config.json does not say so; exports say tie_word_embeddings: false",
                flush=True,
            )
        name = job.model.tokenizer
        path = name or str(located)
        if name is not None and not Path(name).is_dir():  # a Hugging Face id: a copy of its files is in the run
            path = str(made_once(run / "tokenizer", lambda part: Tokenizer.load(name).save(part)))
        found = cls(job.model, located, job.seed, tokenizer_path=path, run=run)
        if job.model.tokens is not None:
            found = found.extended(job.model.tokens)
        files, copy = found.tokenizer_path, run / "rendered"
        if not copy.is_dir() and not is_rendered_otherwise(job, files):
            return found
        made_once(copy, lambda part: rendered(job, Tokenizer.load(files), run).save(part))
        return replace(found, tokenizer_path=str(copy))

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer. Raises UserError if it has more tokens than the model has rows."""
        tokenizer = Tokenizer.load(self.tokenizer_path)
        raise_if_larger_tokenizer(self.directory, self.tokenizer_path, tokenizer.vocab_size)
        return tokenizer

    def with_weights(self) -> Self:
        """Return the model with a directory with weights; random ones are drawn once and written to `run/start`."""
        if self.section.init == "pretrained":
            return self

        def make(part: Path) -> None:
            drawn = load_model(
                self.directory, World(), without_adapters(self.section), seed=self.seed, precision="fp32"
            )
            tensors, carried = drawn.hf_tensors(), drawn.carried(self.directory)
            save_hf(tensors, self.directory, part, writes=True, tokenizer=self.tokenizer_path, carried=carried)

        start = made_once(self.run / "start", make)
        return replace(self, section=self.section.model_copy(update={"init": "pretrained"}), directory=start)

    def beside(self, spec: FrozenModelSpec, role: str, verify_up_to: float | None) -> ModelSource:
        """Return a frozen model that is given this model's tokens; without a path it is this model.

        Raises UserError if it has another tokenizer.
        """
        if spec.path is None:
            found = self.with_weights()
            return replace(found.checkpoint(found.directory), role=role)
        source = ModelSource.of(spec, role, self.section, seed=self.seed, verify_up_to=verify_up_to)
        self._raise_if_other_tokenizer(source, spec)
        return source

    def _raise_if_other_tokenizer(self, other: ModelSource, spec: FrozenModelSpec) -> None:
        """Raise UserError unless the frozen model's tokenizer gives the ids that this model is trained on.

        Its chat template is not used, so it may differ.
        """
        path, role, ours = other.directory, other.role, Tokenizer.load(self.tokenizer_path)
        if not (path / "tokenizer_config.json").exists():
            its_rows, our_rows = rows(model_files.read_config(path)), rows(model_files.read_config(self.directory))
            if not spec.same_architecture and its_rows != our_rows:
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
        raise_if_larger_tokenizer(path, self.tokenizer_path, ours.vocab_size)

    def extended(self, tokens: TokensConfig) -> Self:
        """Add the tokens and write the larger model to `run/extended`, once."""

        def make(part: Path) -> None:
            base = replace(self, section=without_head(self.section)).with_weights().directory
            larger = Tokenizer.load(self.tokenizer_path)
            raise_if_larger_tokenizer(base, self.tokenizer_path, larger.vocab_size)
            model = backend_of(self.section.backend).build(base)
            new = added_rows(tokens, model.config, larger)
            with scratch.directory(part) as tokenizer_copy:
                larger.save(tokenizer_copy)
                extend(base, part, str(tokenizer_copy), new, model)
            old_rows, new_rows = (rows(model_files.read_config(d)) for d in (base, part))
            frozen = (
                ""
                if self.section.lora is None or self.section.trainable
                else "; under model.lora their rows keep their initial values: model.trainable: [embed, head] trains "
                "them"
            )
            print(
                f"model: {len(new.ids)} tokens added ({tokens.init}), vocabulary {old_rows} → {new_rows}{frozen}",
                flush=True,
            )

        larger = made_once(self.run / "extended", make)
        section = self.section.model_copy(update={"init": "pretrained", "tokenizer": None, "tokens": None})
        return replace(self, section=section, directory=larger, tokenizer_path=str(larger))


def made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """Return a directory of the run; `make` fills it if it does not exist yet.

    Raises Corrupt if its files changed since, or if it belongs to another run.
    """
    file_verification.make_once(directory, file_verification.of_run(directory), make)
    return directory


def added_rows(tokens: TokensConfig, config: DecoderConfig, tokenizer: Tokenizer) -> NewRows:
    """Add the tokens to the tokenizer, in place, and return the initial values of their rows in a model of these
    sizes."""
    old_size = tokenizer.vocab_size
    pieces = {text: tokenizer.encode(text) for text in wanted(tokens).values()} if tokens.init == "description" else {}
    new = add(tokenizer, tokens)
    vectors = read_vectors(tokens.vectors, len(new.ids), config.dim, config.tied) if tokens.vectors else None
    return NewRows(new.ids, old_size, [pieces[text] for text in new.descriptions] if pieces else None, vectors)


def needs_weights(frozen_model: FrozenModelSpec, model: ModelConfig) -> bool:
    """Return whether a frozen model is a model of its own; `model` is the section of the model that trains.

    If only adapters train, the policy without them is the model that training started from.
    """
    only_adapters = model.lora is not None and not model.trainable and not model.replace
    return frozen_model.path is not None or not only_adapters


def load_frozen_models(
    by_role: Mapping[str, FrozenModelSpec],
    job: Job,
    start: StartingModel,
    model: Model,
    world: World,
    model_world: World | None = None,
) -> dict[str, Model]:
    """Load the frozen models, by role; all ranks of `world` call it, and those of `model_world` share one model.

    Where `model`, which was loaded from `start`, is the frozen model without its adapters (`needs_weights`), it serves
    as that and costs no memory. Raises UserError for a frozen model with another tokenizer, or with another
    architecture where it must have that of `model`.
    """
    loaded: dict[str, Model] = {}
    for role, spec in by_role.items():
        if not needs_weights(spec, start.section):
            loaded[role] = model
            continue
        if spec.path is None:  # its weights may have to be drawn, once
            source = world.together(partial(start.beside, spec, role, None))
        else:
            source = start.beside(spec, role, job.verify_bytes)
        loaded[role] = source.load(model_world or world, job.train, frozen=True)
        if spec.same_architecture:
            source.raise_if_other_architecture(loaded[role].config, model.config)
    return loaded
