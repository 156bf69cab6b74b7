"""The search of `ptf plan --fit`: the cheapest change of a job with which every phase fits its GPUs.

Tried are, on the GPUs that were given and then on twice as many, up to 64 times: activation checkpointing, fewer
sequences a pass, the optimizer in host memory, and tensor parallelism, in the order of what they cost in time. A change
of the mesh or of the number of GPUs is tried with the smallest memory first, so that one trial tells whether any other
one can fit.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ptf.config import Job
from ptf.errors import UserError
from ptf.model.recompute import Recompute

MOST_FACTOR = 64  # times the number of GPUs that was given
TENSOR = (1, 2, 4, 8)
MODES: tuple[Recompute, ...] = ("none", "selective", "block")  # from the fastest to that of the least memory


class Plan(Protocol):
    """A budget of a job, offline or online."""

    @property
    def fits(self) -> bool:
        """Whether every phase fits the GPU."""
        ...


@dataclass(frozen=True)
class Setting:
    """A number of GPUs, and the keys that differ from the job's."""

    gpus: int
    keys: Mapping[str, str]

    def __str__(self) -> str:
        return ", ".join([f"{self.gpus} GPUs", *(f"{key}: {value}" for key, value in self.keys.items())])


@dataclass(frozen=True)
class Trial:
    """What was planned with a setting, or why it is refused; without a plan there is a reason."""

    setting: Setting
    plan: Plan | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Whether the setting fits."""
        return self.plan is not None and self.plan.fits


def search(job: Job, gpus: int, planned: Callable[[Setting], Plan]) -> Iterator[Trial]:
    """Yield the trials until one fits, which is the last one; none of them does if the search found nothing. There is
    no trial at all if the job's tensor groups divide none of the numbers of GPUs.

    `planned` returns the plan of a setting, or raises UserError where the job cannot have it.
    """

    def tried(setting: Setting) -> Trial:
        try:
            return Trial(setting, planned(setting))
        except UserError as error:
            return Trial(setting, None, str(error).strip().splitlines()[0])

    factor, own = 1, job.compute.mesh.tensor
    while factor <= MOST_FACTOR:
        for tensor in [own, *(size for size in TENSOR if size > own)]:
            if gpus * factor % tensor:
                continue
            mesh = {} if tensor == own else {"compute.mesh.tensor": str(tensor)}
            *others, smallest = _within(job)
            least = tried(Setting(gpus * factor, {**mesh, **smallest}))
            if not least.fits:
                yield least
                continue
            for keys in others:
                trial = tried(Setting(gpus * factor, {**mesh, **keys}))
                yield trial
                if trial.fits:
                    return
            yield least
            return
        factor *= 2


def _within(job: Job) -> list[dict[str, str]]:
    """Return the changes that need no other mesh, from that of the least cost to that of the least memory."""
    changes = []
    for mode in MODES[MODES.index(job.train.activation_checkpointing) :]:
        same = {} if mode == job.train.activation_checkpointing else {"train.activation_checkpointing": mode}
        changes.append(same)
        sequences = job.train.micro_sequences // 2
        while sequences:
            changes.append({**same, "train.micro_sequences": str(sequences)})
            sequences //= 2
    if not job.train.optimizer_offload:
        changes.append({**changes[-1], "train.optimizer_offload": "true"})
    return changes
