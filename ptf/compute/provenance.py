"""What a run was made with: kept in every checkpoint's and every published model's manifest.

The one idea: some of it decides the bits (ptf's own code, the packages that compute), and a run does not continue with others unless told to;
the rest (hardware) is for whoever wonders later.
"""

import functools
import hashlib
import os
import platform
from collections.abc import Mapping
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ptf import storage
from ptf.errors import UserError

FILE = "made_with.json"
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pyarrow", "safetensors")


# Of ptf's files, those that no run reads: commands, pages and reports. (tests/compute/test_provenance.py holds that nothing of a run imports them.)
TOOLS = (
    "cli.py", "doctor.py", "chat.py", "rehearse.py", "inspection/*", "config/reference.py", "data/survey.py", "model/verify.py", "train/budget.py",
    "rl/contract.py",
)  # fmt: skip


@functools.cache
def code(root: Path = Path(__file__).parents[1]) -> str:
    """SHA-256 over the source files that a run's numbers depend on, shortened."""
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        if not any(fnmatch(name, tool) for tool in TOOLS):
            digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def made_with(device: torch.device, data: Mapping[str, str], tokenizer: str) -> dict[str, Any]:
    """`data`: fingerprints by source; `tokenizer`: its own. (Both are compared where they are read: a lane's state, the tokenizer's identity.)"""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "ptf": code(), "data": dict(data), "tokenizer": tokenizer,
        "packages": {package: _version(package) for package in PACKAGES}, "python": platform.python_version(),
        "hardware": {"device": where, "cores": os.cpu_count(), "platform": platform.platform()},
    }  # fmt: skip


def write(run: Path, made: Mapping[str, Any]) -> None:
    """Beside the exported model, for whoever publishes it."""
    storage.write_record(str(run / FILE), {"lineage": run.name, "made_with": dict(made)})


def read(run: Path) -> dict[str, Any]:
    """What `write` wrote. Raises Corrupt."""
    return storage.record(str(run / FILE), "run the train stage again: it writes it anew", {"lineage": run.name})["made_with"]


def refuse_other(saved: Mapping[str, Any], now: Mapping[str, Any], place: str, accepted: bool, tell: bool) -> None:
    """Raises UserError naming what has changed since the checkpoint, unless that is accepted; then, and for hardware, it is printed if `tell`."""
    changed = [f"{name} was {old}, is {now['packages'].get(name)}" for name, old in saved["packages"].items() if now["packages"].get(name) != old]
    if saved.get("allowed") != now.get("allowed"):
        changed.append("the allowed answers (rollout.allowed) are others")
    if saved["ptf"] != now["ptf"]:
        changed.insert(0, f"ptf's code was {saved['ptf']}, is {now['ptf']}")
    what = f"since {place} was written: {'; '.join(changed)}"
    if changed and not accepted:
        raise UserError(f"{what}. A run that continues may differ from one that never stopped; checkpoint.accept_changes: true continues anyway")
    if changed and tell:
        print(f"continuing although, {what}", flush=True)
    if tell and saved["hardware"] != now["hardware"]:
        print(f"{place} was written on {saved['hardware']}, this is {now['hardware']}", flush=True)
