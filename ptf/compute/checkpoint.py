"""Checkpoints from which training continues exactly: `step_N/` holds tensors (torch DCP, sharded), host state, and a manifest.

The one idea: the manifest, with the SHA-256 of every file, is written last. Without it a checkpoint is absent; with it, it is whole. A
reader takes the newest that verifies and says which it passed over.
"""

import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ptf import storage
from ptf.compute.world import World
from ptf.errors import UserError


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What training changes: weights that are frozen, under any of their names, are where it started from."""
    weights, moments = get_state_dict(model, optimizer)
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {"model": {name: w for name, w in weights.items() if name not in frozen}, "optimizer": moments}


def save_tensors(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Every rank writes its shards of the optimizer and of the weights that train; the others are where training started from."""
    state = _state(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(directory / "tensors"), no_dist=world.mesh is None)


def load_tensors(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """The reverse, into a model of any number of ranks."""
    state = _state(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(directory / "tensors"), no_dist=world.mesh is None)
        options = StateDictOptions(strict=False)  # frozen weights are not there; dcp.load has raised for anything else
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options)


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


def save_host(path: Path, state: dict) -> None:
    """Plain values and numpy arrays, readable without running any code of the file's."""
    torch.save(_to_tensors(state), path)


def load_host(path: Path) -> dict:
    return _to_arrays(torch.load(path, weights_only=True))


class Checkpoints:
    """The checkpoints of one lineage. `begin` and `commit` are called by one process; in between every rank writes into the directory."""

    def __init__(self, root: Path, *, every: int, keep: int, steps: int) -> None:
        self.root, self.every, self.keep, self.steps = root, every, keep, steps

    def due(self, step: int) -> bool:
        return step % self.every == 0 or step == self.steps

    def path(self, step: int) -> Path:
        return self.root / f"step_{step:08}"

    def begin(self, step: int) -> Path:
        """A new, empty directory; what an earlier attempt left half-written goes."""
        path = self.path(step)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def commit(self, step: int, job: str) -> None:
        """Hash everything, write the manifest, then drop what is older than the newest `keep`."""
        storage.commit(str(self.path(step)), {"step": step, "job": job})
        for old in self._steps()[self.keep :]:
            (self.path(old) / "manifest.json").unlink(missing_ok=True)
            shutil.rmtree(self.path(old), ignore_errors=True)

    def _steps(self) -> Sequence[int]:
        """Steps that have a manifest, newest first."""
        found = self.root.glob("step_*/manifest.json") if self.root.is_dir() else ()
        return sorted((int(p.parent.name.removeprefix("step_")) for p in found), reverse=True)

    def latest(self) -> tuple[int, Path, str] | None:
        """(step, directory, job text) of the newest checkpoint that verifies; None if there is none at all.
        Raises UserError if there are some but all are damaged."""
        steps = self._steps()
        for step in steps:
            try:
                manifest = storage.verify(str(self.path(step)))
                return step, self.path(step), manifest["job"]
            except (storage.Corrupt, json.JSONDecodeError, KeyError) as error:
                print(f"checkpoint {self.path(step)} is damaged ({error}); trying the one before it", flush=True)
        if steps:
            raise UserError(f"every checkpoint under {self.root} is damaged; remove them to start again")
        return None
