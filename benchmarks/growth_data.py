"""Work of ptf on data, of a size that is chosen: tokens of a document, documents, lanes (partitions) and ranks.

Each function prepares its work in a directory and returns what does it, which may be called again and again.
"""

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ptf import storage
from ptf.compute.world import Meshes, World
from ptf.config.sections.compute import MeshSizes
from ptf.data import tokenized
from ptf.data.character_tokenizer import CHARACTER_TEMPLATE, ROLES
from ptf.data.document import Document, PackUnit
from ptf.data.encode import Encode, encode_document
from ptf.data.loader import Loader
from ptf.data.partitions import Partitions
from ptf.data.rank_balancing import group_size
from ptf.data.sources.rows import SourceSpec
from ptf.data.token_file import ROWS_IN_GROUP, RowFile, unit_columns
from ptf.data.tokenizer import Tokenizer
from ptf.train.batch_sharding import deal
from tests.data.peers import Threads, close

Run = Callable[[], object]
ROOT = Path(__file__).resolve().parents[1]
SEQ_LEN, SHUFFLE, LOOKAHEAD = 2048, 64, 16
SENTENCE = "the cost of a step grows with the number of its tokens and not with that of the lanes it reads from"


@cache
def tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes and merges, learned from ptf's documentation, with a chat template."""
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>", *(f"<|{role}|>" for role in ROLES)]
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    learner = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train([str(path) for path in sorted((ROOT / "docs").glob("*.md"))], learner)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|im_end|>", additional_special_tokens=special[1:]
    )
    hf.chat_template = CHARACTER_TEMPLATE
    return Tokenizer(hf)


def text(words: int, seed: int = 0) -> str:
    return " ".join(np.random.default_rng(seed).choice(SENTENCE.split(), words).tolist())


def encode(row: dict, source: str) -> list[PackUnit]:
    """Encode a row as a document of ptf."""
    return encode_document(row, tokenizer(), source)


def document_of_text(directory: Path, tokens: int) -> Run:
    row = {"text": text(tokens)}
    return lambda: encode(row, "a")


def document_of_turns(directory: Path, turns: int) -> Run:
    """One conversation, with a question of 8 words and an answer of 24 in each turn."""
    messages = [
        {"role": role, "content": text(words, i)}
        for i in range(turns)
        for role, words in (("user", 8), ("assistant", 24))
    ]
    return lambda: encode({"messages": messages}, "a")


def write_tokenized(directory: Path, documents: int, tokens: int, copies: int = 1) -> Path:
    """Write tokenized documents, and link their file so many times."""
    place, ids = directory / "data", np.random.default_rng(0).integers(0, 4096, documents + tokens).astype(np.int32)
    place.mkdir()
    file, weights = RowFile(place / "000.parquet"), np.ones(tokens, np.float32)
    for first in range(0, documents, ROWS_IN_GROUP):
        rows = range(first, min(first + ROWS_IN_GROUP, documents))
        file.write([unit_columns([(Document(ids[i : i + tokens], weights, "a"),)]) for i in rows])
    file.close()
    for copy in range(1, copies):
        os.link(place / "000.parquet", place / f"{copy:03}.parquet")
    storage.commit(place, tokenized.made_by(tokenizer()))
    return place


def write_lines(directory: Path, documents: int, each: int | None = None) -> Path:
    """Write documents of 32 words as JSON lines, `each` in a file, or all in one."""
    place = directory / "lines"
    place.mkdir()
    for first in range(0, documents, each or documents):
        rows = [{"text": text(32, i)} for i in range(first, first + (each or documents))]
        (place / f"{first:06}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def made(path: Path, partitions: int, encode: Encode, seq_len: int = SEQ_LEN) -> Partitions:
    """Return the partitions of a source, which is read once."""
    kind = "tokenized" if path.name == "data" else "auto"
    source = SourceSpec(str(path) if kind == "tokenized" else f"{path}/*.jsonl", kind=kind, epochs=1)
    return Partitions(
        {"a": source},
        tokenizer(),
        encode,
        partitions=partitions,
        seed=0,
        shuffle=SHUFFLE,
        seq_len=seq_len,
        lookahead=LOOKAHEAD,
    )


def loader(partitions: Partitions, sequences: int, **ranks: object) -> Loader:
    """Return a loader of steps of so many sequences."""
    return Loader(
        partitions,
        partitions=partitions.partitions,
        sequences=sequences,
        micro_batch_sequences=sequences,
        seq_len=partitions.seq_len,
        **ranks,  # type: ignore[arg-type]
    )


def read_all(reader: Loader, documents: int) -> None:
    """Make steps until all documents were read."""
    found, steps = 0, reader._steps(0, threading.Event())
    while found < documents:
        found += sum(sum(n > 1 for n in batch.lengths) for batch in next(steps).batches)


def reading_of_long_documents(directory: Path, tokens: int) -> Run:
    """A pass over 512 tokenized documents of so many tokens."""
    place = write_tokenized(directory, 512, tokens)
    return lambda: read_all(loader(made(place, 4, encode, seq_len=16384), 4), 512)


def tokenizing(directory: Path, documents: int) -> Run:
    """From JSON lines to a file of tokenized documents."""
    place = write_lines(directory, documents)
    made_of: dict[str, Any] = {"encode": encode, "seq_len": SEQ_LEN, "too_long": "error", "tokenizer": tokenizer()}
    number = iter(range(10**6))

    def run() -> None:
        config = f"{next(number):016x}"
        source = SourceSpec(f"{place}/*.jsonl")
        tokenized.write(str(directory / f"made-{config}"), source, "a", config_fingerprint=config, **made_of)

    return run


def reading(directory: Path, documents: int) -> Run:
    """A pass over tokenized documents of 64 tokens."""
    place = write_tokenized(directory, 1000, 64, copies=documents // 1000)
    return lambda: read_all(loader(made(place, 4, encode), 16), documents)


def encoding(directory: Path, documents: int) -> Run:
    """A pass over JSON lines, which are encoded on the way."""
    place = write_lines(directory, documents)
    return lambda: read_all(loader(made(place, 4, encode), 16), documents)


def small_files(directory: Path, documents: int) -> Run:
    """The same with one document in a file."""
    place = write_lines(directory, documents, each=1)
    return lambda: read_all(loader(made(place, 4, encode), 16), documents)


def continuing_small_files(directory: Path, documents: int) -> Run:
    """Continuing one lane from the state after its first sequence, with one document in a file."""
    place = write_lines(directory, documents, each=1)
    first = loader(made(place, 1, encode, seq_len=128), 1)
    next(first)
    first.close()
    state = first.state_dict()
    return lambda: loader(made(place, 1, encode, seq_len=128), 1).load_state_dict(state)


def first_of_lanes(directory: Path, lanes: int) -> Run:
    """The first sequence of each lane that one rank serves, of 256 documents a lane."""
    place = write_tokenized(directory, 4096, 64, copies=max(1, lanes // 16))

    def run() -> None:
        partitions = made(place, lanes, encode)
        for lane in range(lanes):
            next(partitions(lane))

    return run


def steps_of_lanes(directory: Path, lanes: int) -> Run:
    """Eight sequences of each lane, of which a step takes 16, and the state after each step."""
    place = write_tokenized(directory, 4096, 64, copies=max(1, lanes // 16))

    def run() -> None:
        steps = loader(made(place, lanes, encode), 16)._steps(0, threading.Event())
        for _ in range(lanes * 8 // 16):
            next(steps)

    return run


def continuing_lanes(directory: Path, lanes: int) -> Run:
    """The state of all lanes as values, and continuing from it."""
    place = write_tokenized(directory, 4096, 64, copies=max(1, lanes // 16))
    reader = loader(made(place, lanes, encode), lanes)
    step = next(reader._steps(0, threading.Event()))
    state = {"step": 1, "lanes": {str(lane): one for lane, one in step.states.items()}}

    def run() -> None:
        loader(made(place, lanes, encode), lanes).load_state_dict({**state, "lanes": state["lanes"]})

    return run


def loaders_of_ranks(directory: Path, ranks: int) -> Run:
    """The loaders of all ranks, group after group; those of a group are in threads and exchange sequences: two steps
    of a sequence a rank, and those that are made ahead."""
    place, size = write_tokenized(directory, 8192, 64, copies=5), group_size(ranks)

    def run() -> None:
        for first in range(0, ranks, size):
            readers = [
                loader(made(place, ranks, encode, 256), ranks, rank=first + i, world_size=ranks, peers=peer)
                for i, peer in enumerate(Threads.group(size))
            ]
            with ThreadPoolExecutor(size) as pool:
                for _ in range(2):
                    list(pool.map(next, readers))
            close(readers)

    return run


def sequences_of(count: int) -> list[list[PackUnit]]:
    """Return packed sequences of four documents of different lengths."""
    lengths = np.random.default_rng(0).integers(8, 128, (count, 4))
    ones = np.ones(128, np.float32)
    return [[(Document(np.zeros(n, np.int32), ones[:n], "a"),) for n in each] for each in lengths]


def dealing_to_ranks(directory: Path, ranks: int) -> Run:
    """What one rank does to find its share of an optimizer step's rollouts: 8 sequences a rank."""
    sequences, world = sequences_of(8 * ranks), World(0, Meshes(MeshSizes(shard=ranks)))
    return lambda: deal(sequences, world, 8, 512)


def dealing_sequences(directory: Path, sequences: int) -> Run:
    """The same of so many sequences, for two ranks."""
    packed, world = sequences_of(sequences), World(0, Meshes(MeshSizes(shard=2)))
    return lambda: deal(packed, world, 8, 512)
