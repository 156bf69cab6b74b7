"""Checkpoints from which training continues exactly: `step_N/` holds tensors (torch DCP, sharded), host state, and a
manifest.

The manifest, with the SHA-256 of every file, is written last. Without it a checkpoint is absent; with it, it is whole.
A reader takes the newest that verifies and names those that it skipped.
"""

import contextlib
import io
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.utils._pytree import tree_map_only

from ptf import storage
from ptf.compute import dcp_files
from ptf.compute.lease import UNSHARED, Lease
from ptf.compute.world import World
from ptf.config import Job
from ptf.config.sections.checkpoint import CheckpointConfig
from ptf.errors import UserError
from ptf.storage import file_verification

Entries = dict[str, dict[str, Any]]  # size and SHA-256 by name in the checkpoint's directory
TENSORS = "tensors"
# not within `write`: threads of one process that change the filters for a moment would leave them changed
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
STEP = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what training changes: weights that train, and the optimizer's state.

    Frozen weights, under any of their names, are left out, because the starting model has them; the optimizer's
    settings are in the config. Raises UserError for a component with state that is not a tensor, because reading it
    back would run code of the file.
    """
    return _tensors(model, *get_state_dict(model, optimizer))


def _tensors(model: nn.Module, weights: Mapping[str, Any], moments: Mapping[str, Any]) -> dict[str, Any]:
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    trained = {name: w for name, w in weights.items() if name not in frozen}
    if others := [name for name, w in trained.items() if not isinstance(w, torch.Tensor)]:
        raise UserError(
            f"{others[0]} is not a tensor, so a checkpoint cannot hold it: register it as a buffer, "
            "or build it again from the arguments"
        )
    return {"model": trained, "optimizer": {"state": moments["state"]}}


def write(
    directory: str,
    tensors: dict[str, Any],
    host: Mapping[str, dict],
    world: World,
    group: dist.ProcessGroup | None = None,
) -> Entries:
    """Write this rank's shards, and its host state by file name; all ranks of `group` call it.

    Returns all ranks' entries. Raises RuntimeError on every rank if one of them fails.
    """
    uri, files, error = f"{directory}/{TENSORS}", dcp_files.Files(), None
    writer = dcp.FileSystemWriter(uri, sync_files=False)  # our streams are flushed to disk when they are closed
    writer.fs, writer.path = files, uri
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=world.size == 1)
        entries = {file.removeprefix(f"{directory}/"): entry for file, entry in files.entries.items()}
        for name, state in host.items():
            entries[name] = save_host(f"{directory}/{name}", state)
    except (Exception, CheckpointException) as e:  # reported to all ranks below
        error, entries = e, {}
    own = (entries, error and f"rank {world.rank}: {first_error(error)}")
    of_all: list[Any] = [own]
    if world.size > 1:
        of_all = [None] * world.size
        dist.all_gather_object(of_all, own, group=group)
    if errors := [text for _, text in of_all if text]:
        raise RuntimeError("; ".join(errors)) from error
    return {name: entry for each, _ in of_all for name, entry in each.items()}


def first_error(error: BaseException) -> str:
    """Return the first error of a CheckpointException, which collects the errors of all ranks."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}"


def load_tensors(directory: str, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Load what `write` wrote into a model on any number of ranks."""
    weights, moments = get_state_dict(model, optimizer)
    state = _tensors(model, weights, moments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(
            state, storage_reader=dcp_files.TensorReader(f"{directory}/{TENSORS}"), no_dist=world.meshes.dense is None
        )
        # frozen weights are absent; dcp.load has raised for anything else that is missing
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict={**moments, **state["optimizer"]},
            options=StateDictOptions(strict=False),
        )


def _to_tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, dict):
        return {k: _to_tensors(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_to_tensors(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def save_host(uri: str, state: dict) -> dict[str, Any]:
    """Write plain values and numpy arrays in a format that is read without running code; return the file's size and
    SHA-256."""
    buffer = io.BytesIO()
    torch.save(_to_tensors(state), buffer)
    with storage.create(uri) as stream:
        stream.write(buffer.getbuffer())
    return stream.entry


def load_host(uri: str) -> dict:
    """Read what `save_host` wrote."""
    with storage.open_read(uri) as stream:
        state = torch.load(io.BytesIO(stream.read()), weights_only=True)
    return tree_map_only(torch.Tensor, torch.Tensor.numpy, state)


@dataclass
class Checkpoints:
    """The checkpoints of one training run, on disk or in an object store.

    `begin` and `commit` are called by one process; between them every rank writes into the directory.
    """

    root: str  # without a slash at its end
    config: CheckpointConfig
    steps: int
    lease: Lease = UNSHARED

    @classmethod
    def of(cls, job: Job, run: Path, lease: Lease = UNSHARED) -> "Checkpoints":
        """Build the checkpoints of the run in this directory; `lease` is checked whenever one is begun or committed."""
        config = job.checkpoint
        root = f"{config.to.rstrip('/')}/{run.name}" if config.to else str(run / "checkpoints")
        return cls(root, config, job.train.steps or 0, lease)

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due at this step."""
        return step % self.config.every == 0 or step == self.steps

    def path(self, step: int) -> str:
        """Return the directory or URI of a step's checkpoint."""
        return f"{self.root}/step_{step:08}"

    def begin(self, step: int) -> str:
        """Return an empty directory for the step; files of an attempt that was not finished are removed. Raises
        LeaseLost."""
        self.lease.check()
        storage.remove(self.path(step))
        return self.path(step)

    def commit(self, step: int, entries: Entries, manifest: Mapping[str, Any]) -> None:
        """Write the manifest, then prune. Raises LeaseLost, and writes nothing then."""
        with self.lease.commit():
            storage.finish(self.path(step), {"step": step, **manifest}, entries)
        self.prune(step)

    def prune(self, step: int) -> None:
        """Remove what is older than the newest `keep` whole checkpoints up to `step`, except the best.

        Files of checkpoints whose removal was interrupted are removed too. Raises LeaseLost.
        """
        # newer checkpoints are damaged, and will be written again
        done = [other for other in self.finished if other <= step]
        keep = {*done[: self.config.keep], *(self.ranked()[:1] if self.config.best else [])}
        for old in sorted(other for other in {*_numbers(storage.children(self.root))} - keep if other <= step):
            self.lease.check()
            storage.remove(self.path(old))

    def ranked(self) -> list[int]:
        """Return the checkpoints that have the metric `best`, the lowest first; of equal ones, the earlier first."""
        values: dict[int, float] = {}
        for step in self.finished:
            try:
                value = float(storage.manifest_of(self.path(step))["metrics"][self.config.best])
                if math.isfinite(value):
                    values[step] = value
            except (storage.Corrupt, KeyError):  # damaged, or written before the metric was first measured
                continue
        return sorted(values, key=lambda step: (values[step], step))

    @property
    def finished(self) -> list[int]:
        """Steps of the checkpoints that have a manifest, newest first."""
        return _numbers(self._directories()[0])

    def _directories(self) -> tuple[list[str], list[str]]:
        """Return the names of the directories that look like checkpoints: those with a manifest, those without."""
        found: dict[str, bool] = {}
        with contextlib.suppress(storage.Missing):
            for uri in storage.listing(f"{self.root}/step_*/*"):
                *_, name, file = uri.split("/")
                found[name] = found.get(name, False) or file == storage.MANIFEST
        return [name for name, whole in found.items() if whole], [name for name, whole in found.items() if not whole]

    def latest(self) -> tuple[int, str, dict[str, Any]] | None:
        """Return (step, path, manifest) of the newest checkpoint that verifies; None if there is none at all.

        Raises UserError if there are checkpoints but all are damaged.
        """
        finished, unfinished = self._directories()
        for name in finished:
            if not STEP.fullmatch(name):
                text = f"{self.root}/{name} is not a checkpoint of this run (step_ and 8 digits); it is ignored"
                print(text, flush=True)
        for step in reversed(_numbers(unfinished)):
            text = f"checkpoint {self.path(step)} was never finished: it has no {storage.MANIFEST}; it is ignored"
            print(text, flush=True)
        steps = _numbers(finished)
        found = self.first_whole(steps, "the one before it") if steps else None
        if steps and not found:
            raise UserError(
                f"every checkpoint under {self.root} is damaged (see above). Restore one from a copy, or start a run "
                "with another name"
            )
        return found

    def first_whole(self, steps: Iterable[int], otherwise: str) -> tuple[int, str, dict[str, Any]] | None:
        """Return (step, path, manifest) of the first checkpoint that verifies; of others, the console says that
        `otherwise` is tried."""
        for step in steps:
            path = self.path(step)
            try:
                manifest = file_verification.verify(path, self.config.sha256_max_gib * 2**30, remembered=False)
                if manifest["step"] != step:
                    raise storage.Corrupt(f"its manifest is of step {manifest['step']}")
                return step, path, manifest
            except storage.Corrupt as error:
                print(f"checkpoint {path} is damaged ({error}); trying {otherwise}", flush=True)
        return None


def _numbers(names: Iterable[str]) -> list[int]:
    """Return the steps of the directories that have the name of a checkpoint, newest first."""
    return sorted((int(name.removeprefix("step_")) for name in names if STEP.fullmatch(name)), reverse=True)
