"""What the keys `train.precision` and `rollout.engine` are where a config leaves them `auto`: it depends on the
devices. A run keeps what it began with."""

import math
from collections.abc import Callable
from pathlib import Path

from ptf.config import Job
from ptf.config.rules import broken
from ptf.config.sections.compute import ComputeConfig
from ptf.errors import UserError

BLOCK = 128  # tokens of a block of attention on a GPU
UNITS = {"avx512_bf16", "amx_bf16", "bf16"}  # flags of x86, and of ARM


def multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this machine's CPU has units for bf16, without which bf16 takes several times as long as fp32: the
    step of a model of 135M parameters took 107 s on AVX2, in place of 8.7 s."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return any(UNITS & set(line.split()) for line in lines if line.lower().startswith(("flags", "features")))


def computes_on_gpu(compute: ComputeConfig) -> bool:
    """Return whether a job computes on GPUs, as far as this machine knows: a cluster at `compute.address` is taken to
    have some."""
    if compute.device != "auto" or compute.address:
        return compute.device != "cpu"
    import torch  # here: a config that leaves nothing open is settled without it

    return torch.cuda.is_available()


def settled(job: Job, before: Job | None = None, gpu: bool | None = None, tell: Callable[[str], None] = print) -> Job:
    """Return the job with the values that `auto` has in it; `tell` is called with a line if fp32 was chosen.

    They are those of `before`, the job that the run began with, if there is one. `gpu`: whether the job computes on
    GPUs (default: `computes_on_gpu`). Raises UserError for a new job whose sequences GPUs would have to fill up,
    because context parallelism divides them into equal parts, and attention computes blocks.
    """
    for section, key in (("train", "precision"), ("rollout", "engine")):
        if getattr(getattr(job, section), key, None) != "auto":
            continue
        if before and (then := getattr(before, section)):
            job = _with(job, section, key, getattr(then, key))
            continue
        gpu = computes_on_gpu(job.compute) if gpu is None else gpu
        if section == "rollout":
            first, other = ("vllm", "native") if gpu else ("native", "vllm")
            chosen = _with(job, section, key, first)
            job = _with(job, section, key, other) if broken(chosen) else chosen
        else:
            job = _with(job, section, key, "bf16" if gpu or multiplies_bf16() else "fp32")
            if job.train.precision == "fp32":
                tell("train.precision: auto is fp32 here, because this CPU has no units for bf16")
    ranks, length = job.compute.mesh.sizes(job.compute.workers), job.data.seq_len
    block = math.lcm(BLOCK, ranks.model)
    if not before and ranks.context > 1 and length % block and (computes_on_gpu(job.compute) if gpu is None else gpu):
        raise UserError(
            f"data.seq_len ({length}) must be a multiple of {block} on GPUs: compute.mesh divides a sequence over "
            f"{ranks.model} workers, and attention computes blocks of {BLOCK} tokens; use "
            f"{-(-length // block) * block}"
        )
    return job


def _with(job: Job, section: str, key: str, value: object) -> Job:
    return job.model_copy(update={section: getattr(job, section).model_copy(update={key: value})})
