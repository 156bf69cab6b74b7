"""Killing a process at a named instant: the n-th visit to a phase, the n-th file operation,
the first byte over a size in whatever file. And killing a worker of a run on Ray, which the run has to survive.

The trap is armed in the process that is to die, and what trips it is SIGKILL (or, for a size, the kernel's SIGXFSZ, in
the middle of a write): nothing of the process is left to tidy up. Moments on the clock are the parent's affair, which
kills the whole process group.
"""

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# audited by Python
FILES = {
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.truncate",
    "os.link",
    "shutil.copyfile",
    "shutil.rmtree",
}


@dataclass(frozen=True)
class Trap:
    kind: str  # phase, file, bytes, time, worker
    at: float  # which visit, which operation, how many bytes, after how many seconds
    phase: str = ""  # before or after which function; the gang of which worker

    def __str__(self) -> str:
        return f"{self.kind} {self.at:g}" + (f" {self.phase}" if self.phase else "")


def arm(trap: Trap, output: str, note: Path) -> None:
    """In the process that is to die, which first writes to `note` where it was. Moments on the clock are not armed."""

    def die(where: str) -> None:
        note.write_text(f"{where}, thread {threading.current_thread().name}")
        os.kill(os.getpid(), signal.SIGKILL)

    if trap.kind == "bytes":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.RLIM_INFINITY))  # SIGXFSZ would write one
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(trap.at), resource.RLIM_INFINITY))
    elif trap.kind == "file":
        count_files(output, lambda n, what: n == trap.at and die(what))
    elif trap.kind == "worker":
        kill_worker(trap, note)
    elif trap.kind == "phase":
        count_phases(lambda n, phase: phase == trap.phase and n == trap.at and die(f"{phase}, visit {n}"))


def kill_worker(trap: Trap, note: Path) -> None:
    """Kill the first process of a gang so many seconds after it has started. The process that trains goes on."""
    from ptf.compute.gang import Gang

    begin, armed = Gang.__init__, threading.Lock()

    def beginning(self: Gang, label: str, **more: Any) -> None:
        begin(self, label, **more)
        if label == trap.phase and armed.acquire(blocking=False):  # not its successor
            timer = threading.Timer(trap.at, die, [self.members[0].pid])
            timer.daemon = True
            timer.start()

    def die(pid: int) -> None:
        note.write_text(f"process of {trap.phase}")
        os.kill(pid, signal.SIGKILL)

    Gang.__init__ = beginning


def groups() -> list[Any]:
    """Return the classes of role groups that a run may use: those on Ray, where it has been imported."""
    from ptf.rl.cluster import LocalRoleGroup

    on_ray = (("ptf.rl.ray_cluster", "VerlRoleGroup"), ("ptf.rl.replicas", "Replicas"))
    return [LocalRoleGroup, *(getattr(sys.modules[module], name) for module, name in on_ray if module in sys.modules)]


def count_files(output: str, visit: Callable[[int, str], Any]) -> None:
    """`visit` is called before each operation that changes files below `output`, with its number and what it is."""
    seen, lock = 0, threading.RLock()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in FILES or not str(arguments[0]).startswith(output):
            return
        if event == "open" and not (isinstance(arguments[1], str) and set("wax+") & set(arguments[1])):
            return
        with lock:
            seen += 1
            number = seen
        visit(number, f"{event} {str(arguments[0]).removeprefix(output)}")

    sys.addaudithook(hook)


def count_phases(visit: Callable[[int, str], Any]) -> None:
    """`visit` is called before and after each of what a step, a save, a start and an export consist of,
    with the number of such visits so far."""
    import torch

    import ptf.compute.saver
    import ptf.rl.controller
    import ptf.rl.roles
    import ptf.run
    import ptf.train.loop
    from ptf import storage
    from ptf.compute import checkpoint, tracking
    from ptf.data import tokenized
    from ptf.data.loader import Loader
    from ptf.recipes.dpo.recipe import DPO
    from ptf.recipes.kd.recipe import KD
    from ptf.recipes.opd.recipe import OPD
    from ptf.recipes.policy import ClippedPolicy
    from ptf.recipes.ppo.recipe import Critic
    from ptf.recipes.rm.recipe import RM
    from ptf.recipes.sft.recipe import SFT
    from ptf.rl.in_flight import InFlight
    from ptf.rl.response_log import ResponseLog
    from ptf.rl.rewards.scoring import GroupScoring
    from ptf.rl.worker_process import WorkerProcess
    from ptf.train import precompute
    from ptf.train.trainer import Trainer

    seen: dict[str, int] = {}
    lock = threading.RLock()

    def passed(phase: str) -> None:
        with lock:
            seen[phase] = number = seen.get(phase, 0) + 1
        visit(number, phase)

    def watched(owner: Any, name: str, named: Callable[..., str] | None = None) -> None:
        whole, known = getattr(owner, name), f"{owner.__name__.rpartition('.')[2]}.{name}"

        def traced(*args: Any, **kwargs: Any) -> Any:
            phase = named(*args) if named else known
            passed(f"before {phase}")
            result = whole(*args, **kwargs)
            passed(f"after {phase}")
            return result

        setattr(owner, name, traced)

    losses = [(of, "loss") for of in (SFT, DPO, RM, KD, ClippedPolicy, Critic, OPD)]
    for owner, name in (
        *losses,
        (Loader, "__next__"),
        (torch.Tensor, "backward"),
        (torch.optim.AdamW, "step"),
        (Trainer, "step"),
        (ptf.train.loop, "held_out_metrics"),
        (ptf.train.loop, "export"),
        (ptf.train.loop.Loop, "restore"),
        (ptf.run, "write_job_file"),
        (ptf.run, "remove_leftovers"),
        (ptf.rl.roles, "export"),
        (ptf.compute.saver, "tree_map_only"),
        (ptf.compute.saver, "write"),
        (checkpoint, "write"),
        (checkpoint, "save_host"),
        (checkpoint, "load_tensors"),
        (checkpoint, "load_host"),
        (storage, "finish"),
        (storage, "remove"),
        (storage, "commit"),
        (checkpoint.file_verification, "verify"),
        (storage.Hashing, "write"),
        (tracking.StepLines, "add"),
        (tokenized.RowFile, "write"),
        (precompute, "tokenize"),
        (precompute._Precomputing, "compute"),
        (InFlight, "advance"),
        (InFlight, "take_groups"),
        (InFlight, "beside_update"),
        (GroupScoring, "finish"),
        (ptf.rl.controller.Controller, "save_if_due"),
        (ptf.rl.controller.Controller, "_restore"),
        (ResponseLog, "log"),
        (WorkerProcess, "_start"),
    ):
        watched(owner, name)
    for group in groups():
        watched(group, "call", lambda group, method, *_: f"{group.spec.name}.{method}")
