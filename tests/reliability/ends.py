"""What a finished run left, to be compared to the bit with what a run left that was never killed."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ptf import storage
from ptf.compute.tracking import is_clock, read_metrics


def result(directory: Path) -> dict[str, Any]:
    """What a finished run left, without what a clock made: rows of metrics, rollouts, files of the export, and files of
    the last checkpoint (weights, optimizer, the state of data and controller) by SHA-256."""
    rows = [{k: v for k, v in row.items() if not is_clock(k)} for row in read_metrics(directory / "metrics.jsonl")]
    last = max((directory / "checkpoints").glob("step_*"))
    samples = directory / "samples.jsonl"
    return {
        "metrics": json.dumps(rows),
        "samples": samples.read_text() if samples.exists() else "",
        "model": hashed(directory / "model"),
        "checkpoint": {"name": last.name} | hashed(last, without=(storage.MANIFEST, ".metadata")),
        "tensors": {
            f"{index.parent.relative_to(last)}/{name}": value
            for index in last.rglob(".metadata")
            for name, value in tensors(index.parent).items()
        },
    }


def tensors(directory: Path) -> dict[str, bytes]:
    """Of a checkpoint, by name, as its index says where they are: the index itself names its own directory."""
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(directory)
    found = {
        name: torch.empty(what.size, dtype=what.properties.dtype)
        for name, what in reader.read_metadata().state_dict_metadata.items()
        if isinstance(what, TensorStorageMetadata)
    }
    load(found, storage_reader=reader, no_dist=True)
    return {name: value.numpy().tobytes() for name, value in found.items()}


def hashed(directory: Path, without: tuple[str, ...] = ()) -> dict[str, str]:
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.rglob("*"))
        if file.is_file() and file.name not in without
    }


def names(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def differences(found: Mapping[str, Any], whole: Mapping[str, Any]) -> list[str]:
    """Names of what is other, down to the file."""
    wrong = []
    for key, value in whole.items():
        if isinstance(value, dict):
            wrong += [
                f"{key}/{name}"
                for name in sorted(value.keys() | found[key].keys())
                if value.get(name) != found[key].get(name)
            ]
        elif found[key] != value:
            wrong.append(key)
    return wrong
