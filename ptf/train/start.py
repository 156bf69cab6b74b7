"""What training starts from: the model's directory, its tokenizer, tokens added to both, and random weights written out where something must load
them."""

from collections.abc import Callable
from pathlib import Path

from ptf import scratch, verified
from ptf.compute.world import World
from ptf.config.schema import Job, ModelConfig, TokensConfig
from ptf.data.added import add, wanted
from ptf.data.tokenizer import Tokenizer
from ptf.model import bridge
from ptf.model.vocabulary import NewRows, extend, read_vectors, refuse_larger_tokenizer, rows
from ptf.train.parts import headless, unadapted
from ptf.train.rendered import asks_date, changes_rendering, rendered
from ptf.train.trainer import load_model


def tokenizer_directory(job: Job, model: ModelConfig, directory: Path, run: Path) -> str:
    """Where the tokenizer's files lie, its chat template as the job has it: `tokenizer_files`, or a copy in the run where the job changes how
    conversations are rendered, or the template renders a date. `model`: the section after `extended`."""
    files = tokenizer_files(model, directory, run)
    there = run / "rendered"
    if not there.is_dir() and not (changes_rendering(job) or asks_date(files)):
        return files
    return str(once(there, lambda part: rendered(job, Tokenizer.load(files), run).save(part)))


def tokenizer_files(model: ModelConfig, directory: Path, run: Path) -> str:
    """Beside the model, or where `model.tokenizer` says (of a Hugging Face id: a copy in the run)."""
    wanted = model.tokenizer
    if wanted is None or Path(wanted).is_dir():
        return wanted or str(directory)
    return str(once(run / "tokenizer", lambda part: Tokenizer.load(wanted).save(part)))


def once(there: Path, make: Callable[[Path], None]) -> Path:
    """A directory of the run, made where it is not there yet. Raises Corrupt where it is not what was made, or was made for another run."""
    verified.made(there, verified.of_run(there), make)
    return there


def extended(model: ModelConfig, directory: Path, run: Path, seed: int) -> tuple[ModelConfig, Path]:
    """The model with the tokens that `model.tokens` adds, written to `run/extended` once, and the section that says how to load it; both as they
    were if it adds none."""
    if model.tokens is None:
        return model, directory
    tokens = model.tokens

    def make(part: Path) -> None:
        tokenizer = tokenizer_files(model, directory, run)
        base = start_directory(headless(model), directory, run, tokenizer, seed)
        larger = Tokenizer.load(tokenizer)
        refuse_larger_tokenizer(base, tokenizer, larger.vocab_size)
        new = rows_of(tokens, base, larger)
        with scratch.directory(part) as beside:
            larger.save(beside)
            extend(base, part, str(beside), new)
        before, after = (rows(bridge.read_config(d)) for d in (base, part))
        frozen = "" if model.lora is None or model.train else "; under model.lora their rows stay as they begin: model.train: [embed, head] trains them"
        print(f"model: {len(new.ids)} tokens added ({tokens.init}), vocabulary {before} → {after}{frozen}", flush=True)

    there = once(run / "extended", make)
    return model.model_copy(update={"init": "pretrained", "tokenizer": None, "tokens": None}), there


def rows_of(tokens: TokensConfig, base: Path, tokenizer: Tokenizer) -> NewRows:
    """Add the tokens to the tokenizer; what their rows in the model `base` begin as."""
    config = bridge.build(base)[0].config
    known = tokenizer.vocab_size
    pieces = {text: tokenizer.encode(text) for text in wanted(tokens).values()} if tokens.init == "description" else {}
    new = add(tokenizer, tokens)
    vectors = read_vectors(tokens.vectors, len(new.ids), config.dim, config.tied) if tokens.vectors else None
    return NewRows(new.ids, known, [pieces[text] for text in new.descriptions] if pieces else None, vectors)


def start_directory(model: ModelConfig, directory: Path, run: Path, tokenizer: str, seed: int) -> Path:
    """The starting model with weights: random ones are drawn once and written to `run/start`."""
    if model.init == "pretrained":
        return directory

    def make(part: Path) -> None:
        drawn, family = load_model(directory, World(), unadapted(model), seed=seed, precision="fp32")
        bridge.save_hf(bridge.hf_tensors(drawn, family), directory, part, writes=True, tokenizer=tokenizer)

    return once(run / "start", make)


def adapted_from(model: ModelConfig, directory: Path, run: Path, tokenizer: str, seed: int) -> tuple[ModelConfig, Path]:
    """Under LoRA, a base model that others can load, too: an adapter is worth nothing without it."""
    if model.lora is None:
        return model, directory
    return model.model_copy(update={"init": "pretrained"}), start_directory(model, directory, run, tokenizer, seed)


def own_reference(model: ModelConfig) -> bool:
    """Only adapters train, so the policy without them is the model that training started from."""
    return model.lora is not None and not model.train and not model.replace
