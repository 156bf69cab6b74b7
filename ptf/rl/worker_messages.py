"""What a worker process and its parent say to each other (ptf.rl.worker_process, ptf.rl.worker_server)."""

from dataclasses import dataclass

READY, STARTED, REPLY, LEFT = "ready", "started", "reply", "left"  # to the parent, each with a number and a value


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why a question has no reply."""

    reason: str
    fatal: bool = False  # True: the process has ended, and its state is lost
    crowded: bool = False  # True: it took too long beside other calls, and may not alone


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The process ended while several calls were in flight, or before this one began, so it is not known to be at
    fault; or it does not have the episode any more. `suspect`: whether the call had begun."""

    suspect: bool = False
