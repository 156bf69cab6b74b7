"""Killing a run at a named instant, and whether it then ends as one that never stopped.

The one idea: a run is a forked process that first arms one trap: the n-th visit to a phase, the n-th file operation, the first byte over a size in
whatever file, or a moment on the clock. What trips it is SIGKILL (or, for a size, the kernel's SIGXFSZ): nothing of the process is left to
tidy up.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from ptf.compute.tracking import is_clock, read_metrics
from ptf.config import loads
from ptf.run import run
from tests.tiny import arithmetic

DEADLINE_S = 120.0
FILES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "shutil.copyfile", "shutil.rmtree"}  # audited by Python


@dataclass(frozen=True)
class Trap:
    kind: str  # phase, file, bytes, time
    at: float

    def __str__(self) -> str:
        return f"{self.kind} {self.at:g}"


def job(directory: Path) -> dict[str, Any]:
    """Twelve steps on sums, a checkpoint every three, held-out losses; everything that a run writes it writes."""
    raw = arithmetic(directory)
    raw["checkpoint"] = {"every": 3, "keep": 2}
    return raw


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(trap: Trap, output: str) -> None:
    """In the process that is to die."""
    if trap.kind == "time":
        threading.Timer(trap.at, _die).start()
    elif trap.kind == "bytes":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(trap.at), resource.RLIM_INFINITY))
    elif trap.kind == "file":
        _count_files(output, lambda n: n == trap.at and _die())
    else:
        _count_phases(lambda n: n == trap.at and _die())


def _count_files(output: str, visit: Callable[[int], Any]) -> None:
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in FILES or not str(arguments[0]).startswith(output):
            return
        if event == "open" and not (isinstance(arguments[1], str) and set("wax+") & set(arguments[1])):
            return
        seen += 1
        visit(seen)

    sys.addaudithook(hook)


def _count_phases(visit: Callable[[int], Any]) -> None:
    """Before and after each of what a step and a save consist of."""
    import ptf.compute.saver
    import ptf.train.fit
    from ptf import storage
    from ptf.data.loader import Loader
    from ptf.recipes.sft.recipe import SFT
    from ptf.train.trainer import Trainer

    seen = 0
    lock = threading.Lock()

    def passed() -> None:
        nonlocal seen
        with lock:
            seen += 1
            visit(seen)

    def watched(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def traced(*args: Any, **kwargs: Any) -> Any:
            passed()
            result = whole(*args, **kwargs)
            passed()
            return result

        setattr(owner, name, traced)

    for owner, name in (
        (Loader, "__next__"), (SFT, "loss"), (torch.Tensor, "backward"), (torch.optim.AdamW, "step"), (Trainer, "step"), (ptf.train.fit, "held_out_loss"),
        (ptf.compute.saver, "copied"), (ptf.compute.saver, "write"), (storage, "finish"), (storage, "remove"), (storage.Hashing, "write"),
        (ptf.train.fit, "export"),
    ):  # fmt: skip
        watched(owner, name)


def attempt(raw: dict[str, Any], lineage: str, trap: Trap | None, log: Path) -> int:
    """Run it in a process of its own, and how that ended: 0, a status, or minus a signal."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            if trap:
                arm(trap, raw["output"])
            run(loads(yaml.safe_dump(raw)), lineage)
            status = 0
        except BaseException as e:
            print(f"{type(e).__name__}: {e}", flush=True)
        finally:
            os._exit(status)
    return _ended(pid)


def _ended(pid: int) -> int:
    ends = time.monotonic() + DEADLINE_S
    while time.monotonic() < ends:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError(f"a run did not end within {DEADLINE_S:g} s")


def result(directory: Path) -> dict[str, Any]:
    """What a finished run left, without what a clock made: metrics, exported weights, and all tensors of its last checkpoint (weights, optimizer)."""
    rows = [{k: v for k, v in row.items() if not is_clock(k)} for row in read_metrics(directory / "metrics.jsonl")]
    last = max((directory / "checkpoints").glob("step_*"))
    return {
        "metrics": json.dumps(rows), "model": (directory / "model" / "model.safetensors").read_bytes(), "checkpoint": last.name,
        "state": tensors(last / "tensors"), "config": (directory / "model" / "config.json").read_bytes(),
    }  # fmt: skip


def tensors(directory: Path) -> dict[str, bytes]:
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(directory)
    found: dict[str, Any] = {}
    for name, what in reader.read_metadata().state_dict_metadata.items():
        if isinstance(what, TensorStorageMetadata):
            found[name] = torch.empty(what.size, dtype=what.properties.dtype)
        elif isinstance(what, BytesStorageMetadata):
            found[name] = None
    load(found, storage_reader=reader, no_dist=True)
    return {name: value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode() for name, value in found.items()}


def counted(raw: dict[str, Any], log: Path) -> dict[str, int]:
    """How many phases and file operations a whole run visits, and how large the largest file that it writes is."""
    counts = {}
    for kind, count in (("phase", _count_phases), ("file", lambda visit: _count_files(raw["output"], visit))):
        note = Path(raw["output"]) / f"count-{kind}"
        note.parent.mkdir(parents=True, exist_ok=True)
        pid = os.fork()
        if not pid:
            seen = [0]
            with contextlib.suppress(BaseException):
                count(lambda n, seen=seen: seen.__setitem__(0, n))
                with log.open("a") as out, contextlib.redirect_stdout(out):
                    run(loads(yaml.safe_dump(raw)), f"count-{kind}-run")
                total = seen[0]
                note.write_text(str(total))
                os._exit(0)
            os._exit(1)
        assert _ended(pid) == 0, log.read_text()[-2000:]
        counts[kind] = int(note.read_text())
    files = [f for f in (Path(raw["output"]) / "count-file-run").rglob("*") if f.is_file()]
    return counts | {"bytes": max(f.stat().st_size for f in files)}


def survives(raw: dict[str, Any], whole: dict[str, Any], trap: Trap, lineage: str, log: Path) -> tuple[bool, str]:
    """Kill a run at the trap and continue it: whether the trap was reached at all, and what differs from the whole run ('' for nothing)."""
    killed = attempt(raw, lineage, trap, log) != 0
    if killed and (status := attempt(raw, lineage, None, log)) != 0:
        return killed, f"the run that continued ended with {status}"
    found = result(Path(raw["output"]) / lineage)
    return killed, ", ".join(key for key in whole if found[key] != whole[key])


def main() -> None:
    """`python -m tests.reliability.kills DIRECTORY KIND:AT…`: a JSON line of traps that were reached, and one of what then differed."""
    directory, given = Path(sys.argv[1]), [Trap(kind, float(at)) for kind, at in (word.split(":") for word in sys.argv[2:])]
    raw, log = job(directory), directory / "log"
    assert attempt(raw, "whole", None, log) == 0, log.read_text()[-3000:]
    whole = result(directory / "runs" / "whole")
    found = {str(trap): survives(raw, whole, trap, f"killed-{n}", log) for n, trap in enumerate(given)}
    print(json.dumps([trap for trap, (killed, _) in found.items() if killed]))
    print(json.dumps({trap: difference for trap, (_, difference) in found.items() if difference}))


if __name__ == "__main__":
    main()
