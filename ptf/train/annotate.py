"""What companions say of the data, found once before training and kept beside the tokens: reference log-probs, teachers' likeliest tokens.

The one idea: rows keep their order and their row groups, so a run reads annotated data exactly as it would read the tokenized data that it was made
of, and trains the same batches (but where a row group would be larger than `GROUP_BYTES`: it is divided, and blocks are then permuted otherwise). A
directory's name says which data, models and settings it is of; who finds it there has nothing to do.
"""

import contextlib
import gc
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptf import scratch, storage
from ptf.compute.provenance import code
from ptf.compute.world import World
from ptf.config import Job, resolve
from ptf.config.schema import ModelConfig, Source
from ptf.data import tokenized
from ptf.data.batch import Batch
from ptf.data.blocks import Reader
from ptf.data.packing import pack_all
from ptf.data.sample import Atom, Sample, length
from ptf.data.sources import blocks_once
from ptf.data.tokenizer import Tokenizer
from ptf.model.decoder import Decoder
from ptf.recipes import Annotating, Companion
from ptf.train.companions import located
from ptf.train.deal import deal
from ptf.train.parts import unadapted
from ptf.train.tokenize import tokenize
from ptf.train.trainer import forget_forwards

ROUND = 4  # micro-batches of each rank that are annotated at a time
GROUP_BYTES = 128 << 20  # of a row group, at most and about

Load = Callable[[Mapping[str, Companion]], dict[str, Decoder]]


def annotated(job: Job, recipe: Annotating, tokenizer: Tokenizer, world: World, model: Decoder, directory: Path, load: Load) -> Job:
    """The job with its sources replaced by annotated ones, made where they are not there yet; all ranks call it, before training. `model`, just
    loaded from `directory`, is itself the companion that training starts from; `load` gives the others."""
    job = resolve(job, tokenized=world.share(tokenize(job, tokenizer, 1) if world.leads else None))  # type: ignore[arg-type]
    found: dict[str, str] = world.share(_named(job, recipe, tokenizer, model, directory) if world.leads else None)  # type: ignore[assignment]
    missing = world.share([name for name, place in found.items() if not storage.exists(f"{place}/{storage.MANIFEST}")] if world.leads else None)
    if missing:
        companions = load({role: one for role, one in recipe.companions.items() if one.path is not None})
        companions |= dict.fromkeys(recipe.companions.keys() - companions.keys(), model)
        for name in missing:  # type: ignore[union-attr]
            source = {**job.data.sources, **job.data.validation}[name]
            _Annotating(job, recipe, tokenizer, world, model, companions).write(name, source, found[name])
        del companions
        gc.collect()  # modules refer to themselves in circles: what no one needs would stay
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    return resolve(job, tokenized=found)


def _named(job: Job, recipe: Annotating, tokenizer: Tokenizer, model: Decoder, directory: Path) -> dict[str, str]:
    """Source → directory: its key is of all that decides what is written there, and of nothing else."""
    models = {role: _start(job, directory) if one.path is None else _digest(located(one, role, job.verify_bytes)) for role, one in recipe.companions.items()}
    vocabulary = model.config.vocab if any(one.path for one in recipe.companions.values()) else 0
    made_by = models, vocabulary, type(recipe).__qualname__, recipe.annotated_by, job.train.precision, tokenizer.fingerprint(), code()
    sources = {**job.data.sources, **job.data.validation}.items()
    made_of = {name: (storage.manifest_of(source.path)["digest"], source.limit) for name, source in sources}
    keys = {name: hashlib.sha256(repr((data, made_by)).encode()).hexdigest()[:16] for name, data in made_of.items()}
    return {name: f"{job.output}/annotated/{name}-{key}" for name, key in keys.items()}


def _start(job: Job, directory: Path) -> str:
    """What the model that training starts from is: its files and, where weights are drawn, what they are drawn with; not what is trained on top."""
    spec: ModelConfig = unadapted(job.model)
    drawn = (job.seed, spec.replace) if spec.init == "random" or spec.replace else ()
    return f"{_digest(directory)} {spec.init} {drawn}"


def _digest(directory: Path) -> str:
    """SHA-256 of a model's config and weights."""
    whole = hashlib.sha256()
    for file in sorted([directory / "config.json", *directory.glob("*.safetensors")]):
        with file.open("rb") as stream:
            whole.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


class _Annotating:
    def __init__(self, job: Job, recipe: Annotating, tokenizer: Tokenizer, world: World, model: Decoder, companions: Mapping[str, Decoder]) -> None:
        self.job, self.recipe, self.tokenizer, self.world, self.model, self.companions = job, recipe, tokenizer, world, model, companions

    def write(self, name: str, source: Source, directory: str) -> None:
        """Rank 0 writes what all find; the directory appears when it is complete."""
        leads, root = self.world.leads, Path(directory)
        with scratch.directory(root) if leads else contextlib.nullcontext() as part:
            reader = tokenized.reader(source.path, self.tokenizer, self.job.verify_bytes)
            tell = tokenized.Progress("annotate", name, reader) if leads else None
            with contextlib.closing(tokenized.RowFile(part / "rows.parquet")) if part else contextlib.nullcontext() as file:
                group: list[dict[str, Any]] = []  # columns of each row
                for rows, ends in self._rounds(reader, source.limit):
                    made = self.annotate(rows)
                    if file is not None:
                        group += map(tokenized.columns_of, made)
                        if ends or sum(map(_nbytes, group)) > GROUP_BYTES:
                            file.write(tokenized.side_by_side(group))
                            group = []
                    if tell:
                        tell({"rows": len(rows), "tokens": sum(length(atom) for row in rows for atom in row)})
            if part:
                key = directory.rpartition("-")[2]
                storage.commit(part, {"tokenizer": self.tokenizer.identity, "config": key, "source": name})
                if not root.exists():  # another run may have been first
                    os.replace(part, root)
                print(f"annotate: {name} → {directory}", flush=True)
            self.world.barrier()

    def _rounds(self, reader: Reader, limit: int | None) -> Iterator[tuple[list[list[Atom]], bool]]:
        """The rows, as many at a time as all ranks together have use for, and whether a row group ends with them."""
        size = ROUND * self.job.train.micro_rows * self.world.data_size * self.job.data.seq_len
        left = limit
        for block, *_ in blocks_once(reader):
            rows: list[list[Atom]] = []
            held, count = 0, len(block) if left is None else min(len(block), left)
            for i in range(count):
                rows.append(tokenized.decode(block.row(i), ""))
                held += sum(map(length, rows[-1]))
                if held >= size or i == count - 1:
                    yield rows, i == count - 1
                    rows, held = [], 0
            left = None if left is None else left - count
            if left == 0:
                return

    def annotate(self, rows: Sequence[Sequence[Atom]]) -> list[list[Atom]]:
        """The same rows, their samples with what the companions say; on every rank."""
        number = itertools.count()
        numbered = [tuple(replace(sample, source=str(next(number))) for sample in atom) for row in rows for atom in row]
        mine: dict[str, dict[str, np.ndarray]] = {}
        for batch in deal(pack_all(numbered, self.job.data.seq_len), self.world, self.job.train.micro_rows, self.job.data.seq_len):
            batch = batch.to(self.world.device)
            mine |= of_samples(batch, self.recipe.annotations(self.model, batch, self.companions))
            for companion in self.companions.values():
                forget_forwards(companion)
        found = {sample: streams for part in self.world.gather(mine) for sample, streams in part.items()}
        number = itertools.count()
        with_streams = lambda sample: Sample(sample.tokens, sample.weights, sample.source, {**sample.streams, **found[str(next(number))]})  # noqa: E731
        return [[tuple(with_streams(sample) for sample in atom) for atom in row] for row in rows]


def _nbytes(columns: Mapping[str, Any]) -> int:
    """Of a row's tokens and streams."""
    return sum(array.nbytes for array in (columns["tokens"], columns["weights"], *columns["streams"].values()))


def of_samples(batch: Batch, streams: Mapping[str, Tensor]) -> dict[str, dict[str, np.ndarray]]:
    """Streams aligned with targets, [B, T] or [B, T, k], as those of the batch's samples, by their `source`; where it is empty they are left out."""
    starts = ((batch.positions == 0) & (batch.segments >= 0)).reshape(-1).nonzero().squeeze(1).tolist()
    flat = {name: values.flatten(0, 1).cpu().numpy() for name, values in streams.items()}
    found: dict[str, dict[str, np.ndarray]] = {}
    for start, n, source in zip(starts, batch.lengths, batch.sources, strict=True):
        if source:
            found[source] = {name: np.concatenate([np.zeros_like(values[:1]), values[start : start + n - 1]]) for name, values in flat.items()}
    return found
