"""Checkpoints of an online run: each role that is trained writes its part beside training, and the controller commits
the checkpoint once all parts are written."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ptf.compute import checkpoint
from ptf.compute.checkpoint import Checkpoints, Entries
from ptf.compute.saver import why_not_written
from ptf.errors import Lost, UserError
from ptf.rl.cluster import Cluster, RoleGroup

CONTROLLER_FILE = "controller.pt"
CALL_S = 5.0  # of one call of a role while a part is waited for: calls have a deadline of their own


@dataclass(slots=True)
class Unfinished:
    """A checkpoint whose parts are being written."""

    step: int
    manifest: Mapping[str, Any]
    entries: Entries  # of what is written
    writing: dict[str, int]  # bytes of the parts that are being written, by the role's directory


@dataclass(eq=False)
class OnlineSaver:
    """Writes checkpoints one at a time."""

    saves: Checkpoints
    cluster: Cluster
    roles: Mapping[str, RoleGroup]  # those that are trained, by their directory in a checkpoint; the policy's is ""
    timeout_s: float  # for which a checkpoint is waited for
    unfinished: Unfinished | None = None

    def begin(self, step: int, state: dict[str, Any], manifest: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint, once the one before is committed; return when the roles have copied their state.

        `state` is the controller's own.
        """
        self.wait()
        path, writing = self.saves.begin(step), dict[str, int]()
        for directory, role in self.roles.items():
            with self.cluster.phase(role, "save"):
                writing[directory] = role.call("save", f"{path}/{directory}".rstrip("/"), self.timeout_s)
        entries = {CONTROLLER_FILE: checkpoint.save_host(f"{path}/{CONTROLLER_FILE}", state)}
        self.unfinished = Unfinished(step, manifest, entries, writing)

    def commit_if_written(self, wait_s: float = 0.0) -> bool:
        """Commit the checkpoint if all roles have written their parts within `wait_s` seconds. Return whether no
        checkpoint is unfinished.

        Raises UserError if a disk is full, otherwise what writing it raised; LeaseLost.
        """
        if (unfinished := self.unfinished) is None:
            return True
        deadline = time.monotonic() + wait_s
        while unfinished.writing:
            directory = next(iter(unfinished.writing))
            left = max(0.0, deadline - time.monotonic())
            entries = self._part(unfinished, directory, min(left, CALL_S))
            if entries is not None:
                unfinished.entries |= {f"{directory}/{name}".lstrip("/"): entry for name, entry in entries.items()}
                del unfinished.writing[directory]
            elif left == 0.0:
                return False
        self.unfinished = None
        self.saves.commit(unfinished.step, unfinished.entries, unfinished.manifest)
        return True

    def _part(self, unfinished: Unfinished, directory: str, wait_s: float) -> Entries | None:
        """Return the entries of a role's part; None if it is not written within `wait_s` seconds."""
        try:
            return self.roles[directory].call("saved", wait_s)
        except Lost:
            raise
        except Exception as error:
            self.unfinished = None
            why = why_not_written(error, self.saves.root, unfinished.writing[directory])
            if why == str(error):
                raise
            raise UserError(
                f"the checkpoint of step {unfinished.step} could not be written to {self.saves.path(unfinished.step)}: "
                f"{why}; the one before it is whole"
            ) from error

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, and commit it. Raises TimeoutError."""
        unfinished = self.unfinished
        if unfinished and not self.commit_if_written(self.timeout_s):
            raise TimeoutError(
                f"the checkpoint of step {unfinished.step} was not written within {self.timeout_s:g} s "
                "(compute.timeout_s)"
            )

    def close(self, grace_s: float = 60.0) -> None:
        """After another error, wait up to `grace_s` seconds for a checkpoint that is being written, and commit it.

        Prints why it is lost if it is.
        """
        if (unfinished := self.unfinished) is None:
            return
        try:
            why = "" if self.commit_if_written(grace_s) else f"it was not written within {grace_s:g} s"
        except Exception as error:  # the one that ends the run is raised
            why = str(error)
        if why:
            print(f"the checkpoint of step {unfinished.step} is lost: {why}", flush=True)
