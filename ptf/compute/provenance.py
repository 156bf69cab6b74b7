"""What a run was made with, stored in every checkpoint's and every published model's manifest.

Some of it decides the bits (ptf's own code, the packages that compute), and a run does not continue with other versions
unless it is allowed to; the rest (hardware) is for information.
"""

import functools
import hashlib
import os
import platform
from collections.abc import Mapping
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ptf import storage
from ptf.errors import UserError

FILE = "made_with.json"
KINDS = ("*.py", "*.cpp", "*.h")  # of source files
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pyarrow", "safetensors")


# Files of ptf that no run reads: commands, pages and reports. (tests/compute/test_provenance.py checks that no run
# imports them.)
TOOLS = (
    "cli.py",
    "__init__.py",
    "api.py",
    "training_run.py",
    "evaluate/evaluation.py",
    "publish/*",
    "serving/conversation.py",
    "inspection/*",
    "config/reference.py",
    "data/survey.py",
    "model/verify.py",
    "train/budget.py",
    "rl/engines/conformance.py",
)


@functools.cache
def code(root: Path = Path(__file__).parents[1]) -> str:
    """Return the SHA-256 over the source files that a run's numbers depend on, shortened."""
    digest = hashlib.sha256()
    for file in sorted(file for kind in KINDS for file in root.rglob(kind)):
        name = file.relative_to(root).as_posix()
        if not any(fnmatch(name, tool) for tool in TOOLS):
            digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def made_with(
    device: torch.device, data: Mapping[str, str], tokenizer: str, kernels: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the record of this run's code, data, packages and hardware.

    `data`: fingerprints by source; `tokenizer`: its fingerprint. Both are compared where they are read: with a
    partition's state, and with the tokenizer's identity. `kernels`: the packages that `train.fused` uses, and oneDNN
    where it computes products, with their versions.
    """
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "ptf": code(),
        "data": dict(data),
        "tokenizer": tokenizer,
        "packages": {package: version(package) for package in PACKAGES} | dict(kernels),
        "python": platform.python_version(),
        "hardware": {"device": where, "cores": os.cpu_count(), "platform": platform.platform()},
    }


def write(run: Path, record: Mapping[str, Any]) -> None:
    """Write the record beside the exported model, for publishing."""
    storage.write_record(str(run / FILE), {"lineage": run.name, "made_with": dict(record)})


def read(run: Path) -> dict[str, Any]:
    """Read what `write` wrote. Raises Corrupt."""
    return storage.read_record(str(run / FILE), "run the train stage again, which writes it", {"lineage": run.name})[
        "made_with"
    ]


def raise_if_different(
    saved: Mapping[str, Any], now: Mapping[str, Any], place: str, accepted: bool, tell: bool
) -> None:
    """Raise UserError naming what changed since the checkpoint, unless that is accepted.

    Accepted changes, and changes of hardware, are printed if `tell`.
    """
    before, after = saved["packages"], now["packages"]
    changed = [
        f"{name} was {before.get(name, 'not used')}, is {after.get(name, 'not used')}"
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]
    if saved.get("allowed") != now.get("allowed"):
        raise UserError(
            f"the allowed responses (rollout.constrained_decoding) differ from those of {place}, and a run "
            "cannot change "
            "them: restore their file and settings, or start a new run"
        )
    if saved["ptf"] != now["ptf"]:
        changed.insert(0, f"ptf's code was {saved['ptf']}, is {now['ptf']}")
    message = f"since {place} was written: {'; '.join(changed)}"
    if changed and not accepted:
        raise UserError(
            f"{message}. A run that continues may differ from one that never stopped; "
            "checkpoint.accept_version_changes: true continues anyway"
        )
    if changed and tell:
        print(f"continuing, although {message}", flush=True)
    if tell and saved["hardware"] != now["hardware"]:
        print(f"{place} was written on {saved['hardware']}, this is {now['hardware']}", flush=True)
