"""Extension of a checkpoint's vocabulary: its embedding and its head get rows for new tokens.

The extended model is written out once, as an ordinary Hugging Face directory, so that training, engines, evaluation and
publishing use the same model. Rows that a checkpoint has beyond its tokenizer (Qwen3: 151,936 against 151,669) are used
before any is added.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from ptf import storage
from ptf.errors import UserError
from ptf.model import hf_backend
from ptf.model.components import FILES, OWN
from ptf.model.families import MODULES, family_of
from ptf.model.model import Model
from ptf.model.model_files import read_config
from ptf.model.model_writer import save_hf
from ptf.model.tensor_files import TensorFiles

SIZES = ("vocab_size", "vocab_size_per_layer_input")  # in config.json


@dataclass(frozen=True, slots=True)
class NewRows:
    """The initial values of the rows of new tokens."""

    ids: Sequence[int]
    previous_vocab_size: int  # rows in use before, by the old tokens
    pieces: Sequence[Sequence[int]] | None = None  # each row begins as the mean of the rows of these ids
    vectors: Mapping[str, Tensor] | None = None  # `embed` [tokens, D], and `head` where that is not tied

    def of(self, which: str, old: Tensor) -> Tensor:
        """Return the rows [tokens, D] for the table `which` (`embed`, `head`, `embed_per_layer`, `bias`), from its
        old rows [V, D]."""
        used = old[: self.previous_vocab_size].float()
        if self.vectors is not None and which in self.vectors:
            return self.vectors[which].float()
        if self.pieces is not None:
            return torch.stack([used[list(piece)].mean(0) for piece in self.pieces])
        return used.mean(0).expand(len(self.ids), *used.shape[1:])


def rows(config: Mapping[str, Any]) -> int:
    """Return the number of tokens that a config.json has rows for."""
    text = config.get("text_config", config)
    if "vocab_size" in text:
        return int(text["vocab_size"])
    if config.get("model_type") in MODULES:
        return family_of(config).config(config).vocab
    return hf_backend.rows(config)


def raise_if_larger_tokenizer(directory: Path, tokenizer: str, ids: int) -> None:
    """Raise UserError if the tokenizer has ids that the model has no rows for."""
    if ids > (model_rows := rows(read_config(directory))):
        raise UserError(
            f"the tokenizer in {tokenizer} has ids up to {ids - 1}, but the model in {directory} has rows for "
            f"{model_rows} tokens (vocab_size). If tokens were added to the tokenizer, use the one that the model was "
            "trained with and name them in model.tokens (added or file), which gives them rows; else "
            "the two do not belong together"
        )


def read_vectors(file: str, tokens: int, width: int, tied: bool) -> dict[str, Tensor]:
    """Read the rows given for new tokens from a safetensors file.

    Raise UserError for another shape, or a `head` that the model ties to the embedding.
    """
    try:
        with storage.open_read(file) as stream:
            vectors = load(stream.read())
    except SafetensorError as error:
        raise UserError(f"model.tokens.init: {file} cannot be read as safetensors: {error}") from error
    wrong = [f"{n} is {tuple(t.shape)}" for n, t in vectors.items() if tuple(t.shape) != (tokens, width)]
    if wrong or not {"embed"} <= vectors.keys() <= ({"embed"} if tied else {"embed", "head"}):
        raise UserError(
            f"model.tokens.init: {file} must hold `embed`{'' if tied else ' and may hold `head`'}, [{tokens}, "
            f"{width}] each "
            f"(new tokens, width); it has {', '.join(wrong or vectors)}"
        )
    return vectors


def extend(source: Path, directory: Path, tokenizer: str, new: NewRows, model: Model) -> None:
    """Write the checkpoint in `source` with rows for the new tokens, and with the extended tokenizer's files; `model`
    was built for it."""
    config = read_config(source)
    vocab = max([rows(config), *(i + 1 for i in new.ids)])
    text = dict(config.get("text_config", config))
    text |= {key: vocab for key in SIZES if key == "vocab_size" or key in text}
    save_hf(
        _tensors(source, new, vocab, model),
        source,
        directory,
        writes=True,
        tokenizer=tokenizer,
        config={**config, "text_config": text} if "text_config" in config else text,
        carried=model.carried(source),
    )


def _tensors(source: Path, new: NewRows, vocab: int, model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the checkpoint but those that are carried over."""
    with TensorFiles(source, model.aliases) as files:
        tables = model.vocabulary_tables(files.names)
        copies = {name for name, which in tables.items() if which == "head" and model.config.tied}
        for name in sorted(files.names - copies - model.carried_names(files)):
            tensor = files[name]
            yield name, table(tensor, tables[name], new, vocab) if name in tables else tensor
    for file in (source / name for name in FILES.values()):
        if file.is_file():
            with safe_open(file, "pt") as own:
                yield from ((OWN + name, own.get_tensor(name)) for name in own.keys())  # noqa: SIM118


def table(old: Tensor, which: str, new: NewRows, vocab: int) -> Tensor:
    """Return a table [V, D], or a bias [V], extended to `vocab` rows, with the new rows in their places."""
    extended = torch.zeros(vocab, *old.shape[1:], dtype=old.dtype)
    extended[: len(old)] = old
    extended[list(new.ids)] = new.of(which, old).to(old.dtype)
    return extended
