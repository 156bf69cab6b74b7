"""Checkpoints from which training continues exactly: `step_N/` holds tensors (torch DCP, sharded), host state, and a manifest.

The one idea: the manifest, with the SHA-256 of every file, is written last. Without it a checkpoint is absent; with it, it is whole. A
reader takes the newest that verifies and says which it passed over.
"""

import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
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
from ptf.errors import UserError

Entries = dict[str, dict[str, Any]]  # size and SHA-256 by name in the checkpoint's directory
TENSORS = "tensors"
STEP = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,})")


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What training changes: weights that are frozen, under any of their names, are where it started from. What the optimizer was made with is in the
    config. Raises UserError for a component that keeps anything but tensors: to read that back, code of the file's would have to run."""
    return _tensors(model, *get_state_dict(model, optimizer))


def _tensors(model: nn.Module, weights: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    kept = {name: w for name, w in weights.items() if name not in frozen}
    if others := [name for name, w in kept.items() if not isinstance(w, torch.Tensor)]:
        raise UserError(f"{others[0]} is not a tensor, so it cannot be kept in a checkpoint: register it as a buffer, or make it anew from the arguments")
    return {"model": kept, "optimizer": {"state": optimizer["state"]}}


def copied(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same, on the host, so that training may go on."""
    return tree_map_only(torch.Tensor, lambda t: t.detach().to("cpu", copy=True), tensors)


def write(directory: str, tensors: dict[str, Any], host: Mapping[str, dict], world: World, group: dist.ProcessGroup | None = None) -> Entries:
    """Every rank writes its shards, and its host state by file name. Collective, over `group`. Returns all ranks' entries. Raises RuntimeError on
    every rank where one of them fails."""
    writer, files = dcp_files.writer(f"{directory}/{TENSORS}")
    error = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=world.size == 1)
        entries = {uri.removeprefix(f"{directory}/"): entry for uri, entry in files.entries.items()}
        for name, state in host.items():
            entries[name] = save_host(f"{directory}/{name}", state)
    except (Exception, CheckpointException) as e:  # it belongs to all ranks
        error, entries = e, {}
    found: list[Any] = [(entries, error and f"rank {world.rank}: {_first(error)}")]
    if world.size > 1:
        found = [None] * world.size
        dist.all_gather_object(found, (entries, error and f"rank {world.rank}: {_first(error)}"), group=group)
    if errors := [text for _, text in found if text]:
        raise RuntimeError("; ".join(errors)) from error
    return {name: entry for each, _ in found for name, entry in each.items()}


def _first(error: BaseException) -> str:
    """What went wrong, out of DCP's collection of what went wrong where."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}"


def load_tensors(directory: str, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """The reverse, into a model of any number of ranks."""
    weights, moments = get_state_dict(model, optimizer)
    state = _tensors(model, weights, moments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=dcp_files.Reader(f"{directory}/{TENSORS}"), no_dist=world.mesh is None)
        options = StateDictOptions(strict=False)  # frozen weights are not there; dcp.load has raised for anything else
        optimizer_state = {**moments, **state["optimizer"]}
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state, options=options)


def _to_tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, dict):
        return {k: _to_tensors(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_to_tensors(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def _to_arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {k: _to_arrays(v) for k, v in value.items()}
    return [_to_arrays(v) for v in value] if isinstance(value, list) else value


def save_host(uri: str, state: dict) -> dict[str, Any]:
    """Plain values and numpy arrays, readable without running any code of the file's. Returns the file's size and SHA-256."""
    text = io.BytesIO()
    torch.save(_to_tensors(state), text)
    with storage.create(uri) as stream:
        stream.write(text.getbuffer())
    return stream.entry


def load_host(uri: str) -> dict:
    with storage.open_read(uri) as stream:
        return _to_arrays(torch.load(io.BytesIO(stream.read()), weights_only=True))


class Checkpoints:
    """The checkpoints of one lineage, on disk or in an object store. `begin` and `commit` are called by one process; in between every rank writes
    into the directory. `best`: the metric, and whether `min` or `max` of it, by which one more is kept."""

    def __init__(
        self, root: str, *, every: int, keep: int, steps: int, best: tuple[str, str] | None = None, whole_up_to: float = float("inf"),
        lease: Lease = UNSHARED,
    ) -> None:  # fmt: skip
        self.lease = lease
        self.root, self.every, self.keep, self.steps, self.best, self.whole_up_to = root.rstrip("/"), every, keep, steps, best, whole_up_to

    @classmethod
    def of(cls, job: Job, run: Path, lease: Lease = UNSHARED) -> "Checkpoints":
        """Of the run in this directory; `lease` is checked whenever one is begun or committed."""
        knobs = job.checkpoint
        best = (knobs.best.metric, knobs.best.mode) if knobs.best else None
        root = f"{knobs.to.rstrip('/')}/{run.name}" if knobs.to else str(run / "checkpoints")
        return cls(root, every=knobs.every, keep=knobs.keep, steps=job.train.steps or 0, best=best, whole_up_to=knobs.verify_gib * 2**30, lease=lease)

    def due(self, step: int) -> bool:
        return step % self.every == 0 or step == self.steps

    def path(self, step: int) -> str:
        return f"{self.root}/step_{step:08}"

    def begin(self, step: int) -> str:
        """A place in which nothing is; what an earlier attempt left half-written goes. Raises LeaseLost."""
        self.lease.check()
        storage.remove(self.path(step))
        return self.path(step)

    def commit(self, step: int, entries: Entries, manifest: Mapping[str, Any]) -> None:
        """Write the manifest, then drop what is older than the newest `keep` and not the best. Raises LeaseLost, and writes nothing."""
        with self.lease.commit():
            storage.finish(self.path(step), {"step": step, **manifest}, entries)
        done = [other for other in self._steps() if other <= step]  # what is newer is damaged, and will be written again
        best = self.ranked()[:1]
        for old in done[self.keep :]:
            if old not in best:
                self.lease.check()
                storage.remove(self.path(old))

    def best_whole(self) -> int | None:
        """The best checkpoint that verifies; None without `best`, or where none has the metric."""
        for step in self.ranked():
            try:
                storage.verify(self.path(step), self.whole_up_to)
                return step
            except storage.Corrupt as error:
                print(f"checkpoint {self.path(step)} is damaged ({error}); trying the next best", flush=True)
        return None

    def ranked(self) -> list[int]:
        """The checkpoints that have the metric of `best`, the best first, the earlier of equal ones."""
        if self.best is None:
            return []
        name, mode = self.best
        values: dict[int, float] = {}
        for step in self._steps():
            try:
                value = float(storage.manifest_of(self.path(step))["metrics"][name])
                if math.isfinite(value):
                    values[step] = value if mode == "min" else -value
            except (storage.Corrupt, KeyError):  # damaged, or written before the first time that it was measured
                continue
        return sorted(values, key=lambda step: (values[step], step))

    def _steps(self) -> list[int]:
        """Steps that have a manifest, newest first."""
        return sorted((int(name.removeprefix("step_")) for name in self._names() if STEP.fullmatch(name)), reverse=True)

    def _unfinished(self, finished: Sequence[int]) -> list[int]:
        """Steps of which there are files, but no manifest."""
        try:
            names = {uri.split("/")[-2] for uri in storage.listing(f"{self.root}/step_*/*")}
        except storage.Missing:
            return []
        return sorted({int(name.removeprefix("step_")) for name in names if STEP.fullmatch(name)} - set(finished))

    def _names(self) -> list[str]:
        """Of all that looks like a checkpoint."""
        try:
            return [uri.split("/")[-2] for uri in storage.listing(f"{self.root}/step_*/{storage.MANIFEST}")]
        except storage.Missing:
            return []

    def latest(self) -> tuple[int, str, dict[str, Any]] | None:
        """(step, place, manifest) of the newest checkpoint that verifies; None if there is none at all.
        Raises UserError if there are some but all are damaged."""
        for name in self._names():
            if not STEP.fullmatch(name):
                print(f"{self.root}/{name} is no checkpoint of this run (step_ and 8 digits); it is left alone", flush=True)
        steps = self._steps()
        for step in self._unfinished(steps):
            print(f"checkpoint {self.path(step)} was never finished: it has no {storage.MANIFEST}; it counts for nothing", flush=True)
        for step in steps:
            try:
                manifest = storage.verify(self.path(step), self.whole_up_to)
                if manifest["step"] != step:
                    raise storage.Corrupt(f"it is step {manifest['step']}'s")
                return step, self.path(step), manifest
            except storage.Corrupt as error:
                print(f"checkpoint {self.path(step)} is damaged ({error}); trying the one before it", flush=True)
        if steps:
            raise UserError(f"every checkpoint under {self.root} is damaged; remove them to start again")
        return None
