"""The search of `ptf plan --fit`: the cheapest change of a job with which every phase fits its GPUs.

For the given number of GPUs, then for 2, 4, … and up to 64 times as many, the search tries, in the order of what they
cost in time: activation checkpointing, fewer sequences per pass, the optimizer in host memory, tensor parallelism, and
context parallelism. With each mesh and number of GPUs, the setting that needs the least memory is tried first: if it
does not fit, no other one does.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ptf.config import Job
from ptf.errors import UserError
from ptf.model.recompute import Recompute

FACTORS = (1, 2, 4, 8, 16, 32, 64)  # numbers of GPUs that are tried, as multiples of the given one
SIZES = {"tensor_parallel_size": (2, 4, 8), "context_parallel_size": (2, 4, 8, 16, 32)}  # tried, beside the job's
MODES: tuple[Recompute, ...] = ("none", "selective", "block", "offload")  # from the fastest to that of the least memory


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
class Candidate:
    """A setting with its plan, or, if the job cannot have the setting, with the reason (`refused`) and no plan."""

    setting: Setting
    plan: Plan | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Whether the setting fits."""
        return self.plan is not None and self.plan.fits


def search(job: Job, gpus: int, planned: Callable[[Setting], Plan]) -> Iterator[Candidate]:
    """Yield the candidates up to and including the first one that fits; if none fits, yield all of them.

    Nothing is yielded if no mesh that is tried divides any of the numbers of GPUs. `planned` returns
    the plan of a setting, or raises UserError if the job cannot have that setting.
    """

    def tried(setting: Setting) -> Candidate:
        try:
            return Candidate(setting, planned(setting))
        except UserError as error:
            return Candidate(setting, None, str(error).strip().splitlines()[0])

    own, meshes = job.compute.mesh, [dict[str, int]()]
    for name, sizes in SIZES.items():
        meshes += [{name: size} for size in sizes if size > getattr(own, name)]
    for factor in FACTORS:
        for changed in meshes:
            if own.model_copy(update=changed).sizes(gpus * factor).ranks != gpus * factor:
                continue
            mesh = {f"compute.mesh.{name}": str(size) for name, size in changed.items()}
            *others, smallest = _within(job)
            least = tried(Setting(gpus * factor, {**mesh, **smallest}))
            if not least.fits:
                yield least
                continue
            for keys in others:
                candidate = tried(Setting(gpus * factor, {**mesh, **keys}))
                yield candidate
                if candidate.fits:
                    return
            yield least
            return


def _within(job: Job) -> list[dict[str, str]]:
    """Return the changes that need no other mesh, from the one that costs the least time to the one that needs the
    least memory."""
    changes = []
    for mode in MODES[MODES.index(job.train.activation_checkpointing) :]:
        same = {} if mode == job.train.activation_checkpointing else {"train.activation_checkpointing": mode}
        changes.append(same)
        sequences = job.train.micro_batch_sequences // 2
        while sequences:
            changes.append({**same, "train.micro_batch_sequences": str(sequences)})
            sequences //= 2
    if job.train.optimizer == "adamw":
        changes.append({**changes[-1], "train.optimizer": "adamw_offload"})
    return changes
