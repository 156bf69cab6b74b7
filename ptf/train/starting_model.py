"""The model that training starts from: its files, its tokenizer, added tokens, and random weights that were written
out.

Training, evaluation and rollouts all begin with `StartingModel.of`: it locates the model, adds tokens and writes the
tokenizer. Each directory is written once per run and verified when it is read again, so every stage uses the same
model.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ptf.compute.world import World
from ptf.config.schema import Job
from ptf.config.sections.model import ModelConfig, TokensConfig
from ptf.data.added import add, wanted
from ptf.data.tokenizer import Tokenizer
from ptf.model import bridge
from ptf.model.sizes import sizes_of
from ptf.model.vocabulary import NewRows, extend, raise_if_larger_tokenizer, read_vectors, rows
from ptf.storage import file_verification
from ptf.train.components import without_adapters, without_head
from ptf.train.job_tokenizer import changes_rendering, rendered, renders_a_date
from ptf.train.trainer import load_model
from ptf.workspace import scratch


@dataclass(frozen=True)
class StartingModel:
    """The model that a run starts from, after tokens were added, and its tokenizer."""

    section: ModelConfig  # loads `directory`
    directory: Path
    tokenizer_path: str
    run: Path
    seed: int

    @classmethod
    def of(cls, job: Job, run: Path, world: World | None = None) -> "StartingModel":
        """Locate the model of the job, add its tokens and write its tokenizer.

        With `world`, all ranks call it: each downloads the model to its own machine, and the leading rank's directories
        are returned on all.
        """
        directory = bridge.locate(job.model.path, verify_up_to=job.verify_bytes)
        if world is None:
            return cls._written(job, run, directory)
        return world.together(lambda: cls._written(job, run, directory))

    @classmethod
    def _written(cls, job: Job, run: Path, located: Path) -> "StartingModel":
        if bridge.unties(located):
            print(
                f"model: {located} stores an output projection unlike its embedding: they are not tied, as in "
                "transformers 5, though its config.json does not say so; exports say tie_word_embeddings: false",
                flush=True,
            )
        section, directory = extended(job.model, located, run, job.seed)
        return cls(section, directory, tokenizer_directory(job, section, directory, run), run, job.seed)

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer. Raises UserError if it has more tokens than the model has rows."""
        tokenizer = Tokenizer.load(self.tokenizer_path)
        raise_if_larger_tokenizer(self.directory, self.tokenizer_path, tokenizer.vocab_size)
        return tokenizer

    def with_weights(self) -> Path:
        """Return a directory with weights; see `start_directory`."""
        return start_directory(self.section, self.directory, self.run, self.tokenizer_path, self.seed)

    def adapter_base(self) -> "StartingModel":
        """Return the model that training loads; see `adapted_from`."""
        section, directory = adapted_from(self.section, self.directory, self.run, self.tokenizer_path, self.seed)
        return replace(self, section=section, directory=directory)


def tokenizer_directory(job: Job, model: ModelConfig, directory: Path, run: Path) -> str:
    """Return the directory of the tokenizer with the job's chat template.

    It is `tokenizer_files`, or a copy in the run where the job changes how conversations are rendered or the template
    renders a date. `model` is the config section that `extended` returned.
    """
    files = tokenizer_files(model, directory, run)
    copy = run / "rendered"
    if not copy.is_dir() and not (changes_rendering(job) or renders_a_date(files)):
        return files
    return str(made_once(copy, lambda part: rendered(job, Tokenizer.load(files), run).save(part)))


def tokenizer_files(model: ModelConfig, directory: Path, run: Path) -> str:
    """Return the directory of the tokenizer's files: the model's, or that of `model.tokenizer` (a Hugging Face id is
    copied into the run)."""
    path = model.tokenizer
    if path is None or Path(path).is_dir():
        return path or str(directory)
    return str(made_once(run / "tokenizer", lambda part: Tokenizer.load(path).save(part)))


def made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """Return a directory of the run; `make` fills it if it does not exist yet.

    Raises Corrupt if its files changed since, or if it belongs to another run.
    """
    file_verification.make_once(directory, file_verification.of_run(directory), make)
    return directory


def extended(model: ModelConfig, directory: Path, run: Path, seed: int) -> tuple[ModelConfig, Path]:
    """Add the tokens of `model.tokens` and write the larger model to `run/extended`, once.

    Returns the config section that loads the directory, and the directory; both are unchanged if no tokens are added.
    """
    if model.tokens is None:
        return model, directory
    tokens = model.tokens

    def make(part: Path) -> None:
        tokenizer = tokenizer_files(model, directory, run)
        base = start_directory(without_head(model), directory, run, tokenizer, seed)
        larger = Tokenizer.load(tokenizer)
        raise_if_larger_tokenizer(base, tokenizer, larger.vocab_size)
        new = added_rows(tokens, base, larger, model.backend)
        with scratch.directory(part) as tokenizer_copy:
            larger.save(tokenizer_copy)
            extend(base, part, str(tokenizer_copy), new, model.backend)
        old_rows, new_rows = (rows(bridge.read_config(d)) for d in (base, part))
        frozen = (
            ""
            if model.lora is None or model.trainable
            else "; under model.lora their rows keep their initial values: model.trainable: [embed, head] trains them"
        )
        print(
            f"model: {len(new.ids)} tokens added ({tokens.init}), vocabulary {old_rows} → {new_rows}{frozen}",
            flush=True,
        )

    larger_model = made_once(run / "extended", make)
    return model.model_copy(update={"init": "pretrained", "tokenizer": None, "tokens": None}), larger_model


def added_rows(
    tokens: TokensConfig, base: Path, tokenizer: Tokenizer, backend: Literal["ptf", "hf"] = "ptf"
) -> NewRows:
    """Add the tokens to the tokenizer, in place, and return the initial values of their rows in the model `base`."""
    config = sizes_of(base, "hf") if backend == "hf" else bridge.build(base)[0].config
    old_size = tokenizer.vocab_size
    pieces = {text: tokenizer.encode(text) for text in wanted(tokens).values()} if tokens.init == "description" else {}
    new = add(tokenizer, tokens)
    vectors = read_vectors(tokens.vectors, len(new.ids), config.dim, config.tied) if tokens.vectors else None
    return NewRows(new.ids, old_size, [pieces[text] for text in new.descriptions] if pieces else None, vectors)


def start_directory(model: ModelConfig, directory: Path, run: Path, tokenizer: str, seed: int) -> Path:
    """Return the directory of the starting model with weights; random weights are drawn once and written to
    `run/start`."""
    if model.init == "pretrained":
        return directory

    def make(part: Path) -> None:
        drawn, family = load_model(directory, World(), without_adapters(model), seed=seed, precision="fp32")
        carried = bridge.carried_tensors(drawn, directory)
        bridge.save_hf(
            bridge.hf_tensors(drawn, family), directory, part, writes=True, tokenizer=tokenizer, carried=carried
        )

    return made_once(run / "start", make)


def adapted_from(model: ModelConfig, directory: Path, run: Path, tokenizer: str, seed: int) -> tuple[ModelConfig, Path]:
    """Return the config section and directory of a base model with weights, which an adapter needs to be of use; both
    are unchanged without LoRA."""
    if model.lora is None:
        return model, directory
    return model.model_copy(update={"init": "pretrained"}), start_directory(model, directory, run, tokenizer, seed)


def is_own_reference(model: ModelConfig) -> bool:
    """Return whether the policy without its adapters is the model that training started from, because only adapters
    train."""
    return model.lora is not None and not model.trainable and not model.replace
