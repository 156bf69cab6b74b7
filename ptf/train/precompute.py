"""Precomputed data: what frozen models contribute to the loss (reference log-probs, a teacher's likeliest tokens),
computed once before training and stored beside the tokens.

Rows keep their order and their row groups, so a run reads precomputed data exactly as it would read the tokenized data
that it was made from, and trains the same batches. The exception is a row group that would be larger than
`GROUP_BYTES`: it is divided, so blocks are permuted differently. A directory's name is a hash of the data, models and
settings that determine its content, so a directory that exists is reused.
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

from ptf import storage
from ptf.compute.provenance import code
from ptf.compute.world import World
from ptf.config import Job, dump, loads, resolve
from ptf.config.plugin_code import code_of
from ptf.config.sections.data import Source
from ptf.config.sections.model import ModelConfig
from ptf.data import tokenized
from ptf.data.batch import Batch
from ptf.data.document import Document, PackUnit, length
from ptf.data.packing import pack_all
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import blocks_once
from ptf.data.token_file import RowFile, unit_columns
from ptf.data.tokenizer import Tokenizer
from ptf.model.model import Model
from ptf.recipes.protocol import FrozenModelSpec, Recipe
from ptf.train.batch_sharding import deal
from ptf.train.components import without_adapters
from ptf.train.model_source import ModelSource
from ptf.train.tokenize import tokenize
from ptf.train.trainer import forget_forwards
from ptf.workspace import progress, scratch

ROUND = 4  # micro-batches of each rank that are computed at once
GROUP_BYTES = 128 << 20  # about the largest size of a row group


def precompute_sources(
    job: Job,
    recipe: Recipe,
    tokenizer: Tokenizer,
    world: World,
    model: Model,
    directory: Path,
    load: Callable[[Mapping[str, FrozenModelSpec]], dict[str, Model]],
) -> Job:
    """Return the job with its sources replaced by precomputed ones, which are written where they do not exist yet.

    All ranks call it, before training. `model`, just loaded from `directory`, is itself the frozen model that training
    starts from; `load` loads the others.
    """

    def places() -> tuple[str, dict[str, str], list[str]]:
        with_tokens = resolve(job, tokenized=tokenize(job, tokenizer, 1))
        found = _named(with_tokens, recipe, tokenizer, model, directory)
        missing = [n for n, path in found.items() if not storage.exists(f"{path}/{storage.MANIFEST}")]
        return dump(with_tokens), found, missing

    text, directories, missing = world.together(places)
    job = loads(text)  # as text, because the class of a job is made when it is read: no other process finds its name
    if missing:
        frozen_models = load(
            {role: frozen_model for role, frozen_model in recipe.frozen_models.items() if frozen_model.path is not None}
        )
        frozen_models |= dict.fromkeys(recipe.frozen_models.keys() - frozen_models.keys(), model)
        for name in missing:
            source = {**job.data.sources, **job.data.validation}[name]
            _Precomputing(job, recipe, tokenizer, world, model, frozen_models).write(name, source, directories[name])
        del frozen_models
        gc.collect()  # modules have reference cycles, which would keep the frozen models in memory
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    return resolve(job, tokenized=directories)


def _named(job: Job, recipe: Recipe, tokenizer: Tokenizer, model: Model, directory: Path) -> dict[str, str]:
    """Return the directory of each source; its key covers all that decides what is written there, and nothing else."""
    models = {
        role: _start(job, directory)
        if frozen_model.path is None
        else _digest(ModelSource.of(frozen_model, role, job.model, verify_up_to=job.verify_bytes).directory)
        for role, frozen_model in recipe.frozen_models.items()
    }
    vocabulary = model.config.vocab if any(frozen_model.path for frozen_model in recipe.frozen_models.values()) else 0
    # of the recipe and of the model's components; without plugins there is none
    plugins = code_of([job.model_dump()["recipe"], job.model.model_dump()])
    for reason in plugins.unseen:
        print(f"precompute: {reason}", flush=True)
    made_by = (
        models,
        vocabulary,
        type(recipe).__qualname__,
        recipe.precomputed_from,
        job.train.precision,
        tokenizer.identity["fingerprint"],
        code(),
        *model.kernels.packages.items(),
        *plugins.digests.items(),
    )
    sources = {**job.data.sources, **job.data.validation}.items()
    made_of = {name: (storage.manifest_of(source.path)["digest"], source.limit) for name, source in sources}
    keys = {name: hashlib.sha256(repr((data, made_by)).encode()).hexdigest()[:16] for name, data in made_of.items()}
    return {name: f"{job.output}/precomputed/{name}-{key}" for name, key in keys.items()}


def _start(job: Job, directory: Path) -> str:
    """Return a key of the model that training starts from, without what is trained on top.

    It covers the files, where weights are drawn, what they are drawn with, and which of them are rounded.
    """
    spec: ModelConfig = without_adapters(job.model)
    drawn = (job.seed, spec.replace) if spec.init == "random" or spec.replace else ()
    rounded = f" {job.model.quantization} {job.model.trainable}" if job.model.quantization else ""
    return f"{_digest(directory)} {spec.init} {drawn}{rounded}"


def _digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted([directory / "config.json", *directory.glob("*.safetensors")]):
        with file.open("rb") as stream:
            digest.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


class _Precomputing:
    """Computes what one job's frozen models contribute to its sources."""

    def __init__(
        self,
        job: Job,
        recipe: Recipe,
        tokenizer: Tokenizer,
        world: World,
        model: Model,
        frozen_models: Mapping[str, Model],
    ) -> None:
        self.job, self.recipe, self.tokenizer = job, recipe, tokenizer
        self.world, self.model, self.frozen_models = world, model, frozen_models

    def write(self, name: str, source: Source, directory: str) -> None:
        """Annotate a source and write it, from rank 0; the directory appears when it is complete."""
        leads, root = self.world.leads, Path(directory)
        with scratch.directory(root) if leads else contextlib.nullcontext() as part:
            reader = tokenized.reader(source.path, self.tokenizer, self.job.verify_bytes)
            rows_file = contextlib.closing(RowFile(part / "rows.parquet")) if part else contextlib.nullcontext()
            with rows_file as file, progress.phase(f"precompute {name}", 100, "% of the files") as phase:
                group, size = list[dict[str, Any]](), 0  # columns of each row, and their bytes
                for rows, ends in self._rounds(reader, source.limit):
                    computed_rows = self.compute(rows)
                    phase.done = 100 * reader.share
                    if file is None:
                        continue
                    # where a group ends depends on the rows alone, not on the rounds: by it the blocks are ordered
                    for i, row in enumerate(computed_rows, 1):
                        group.append(unit_columns(row))
                        size += _nbytes(group[-1])
                        if size > GROUP_BYTES or (ends and i == len(computed_rows)):
                            file.write(group)
                            group, size = [], 0
            if part:
                made_by = tokenized.made_by(self.tokenizer)
                storage.commit(part, {**made_by, "config": directory.rpartition("-")[2], "source": name})
                if not root.exists():  # another run may have written it meanwhile
                    os.replace(part, root)
                print(f"precompute: {name} → {directory}", flush=True)
            self.world.barrier()

    def _rounds(self, reader: Reader, limit: int | None) -> Iterator[tuple[list[list[PackUnit]], bool]]:
        """Yield as many rows at a time as keep all ranks busy, and whether a row group ends with them."""
        size = ROUND * self.job.train.micro_batch_sequences * self.world.meshes.sizes.data * self.job.data.seq_len
        left = limit
        for block, *_ in blocks_once(reader):
            rows: list[list[PackUnit]] = []
            tokens = 0
            count = len(block) if left is None else min(len(block), left)
            for i in range(count):
                rows.append(block.row(i)["units"])
                tokens += sum(map(length, rows[-1]))
                if tokens >= size or i == count - 1:
                    yield rows, i == count - 1
                    rows, tokens = [], 0
            left = None if left is None else left - count
            if left == 0:
                return

    def compute(self, rows: Sequence[Sequence[PackUnit]]) -> list[list[PackUnit]]:
        """Return the same rows, their samples with the frozen models' columns, on every rank."""
        number = itertools.count()
        numbered = [tuple(replace(sample, source=str(next(number))) for sample in unit) for row in rows for unit in row]
        own: dict[str, dict[str, np.ndarray]] = {}
        seq_len = self.job.data.seq_len
        for batch in deal(pack_all(numbered, seq_len), self.world, self.job.train.micro_batch_sequences, seq_len):
            batch = batch.to(self.world.device)
            own |= of_samples(batch, self.recipe.precomputed_columns(self.model, batch, self.frozen_models))
            for frozen_model in self.frozen_models.values():
                forget_forwards(frozen_model)
        columns = {source: of for part in self.world.all_gather_object(own) for source, of in part.items()}
        number = itertools.count()

        def with_columns(sample: Document) -> Document:
            return replace(sample, token_columns={**sample.token_columns, **columns[str(next(number))]})

        return [[tuple(with_columns(sample) for sample in unit) for unit in row] for row in rows]


def _nbytes(columns: Mapping[str, Any]) -> int:
    return sum(array.nbytes for array in (columns["tokens"], columns["weights"], *columns["token_columns"].values()))


def of_samples(batch: Batch, token_columns: Mapping[str, Tensor]) -> dict[str, dict[str, np.ndarray]]:
    """Split columns that are aligned with targets, [B, T] or [B, T, k], into those of the batch's samples, by `source`.

    Samples with an empty `source` are left out.
    """
    starts = ((batch.positions == 0) & (batch.segments >= 0)).reshape(-1).nonzero().squeeze(1).tolist()
    flat = {name: values.flatten(0, 1).cpu().numpy() for name, values in token_columns.items()}
    by_sample: dict[str, dict[str, np.ndarray]] = {}
    for start, n, source in zip(starts, batch.lengths, batch.sources, strict=True):
        if source:
            by_sample[source] = {
                name: np.concatenate([np.zeros_like(values[:1]), values[start : start + n - 1]])
                for name, values in flat.items()
            }
    return by_sample
