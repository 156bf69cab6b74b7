"""Checkpoints of an online run: each role that is trained writes its part beside training, and the controller commits
the checkpoint once all parts are written."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ptf.compute import checkpoint
from ptf.compute.checkpoint import Checkpoints, Entries
from ptf.rl.cluster import Cluster, RoleGroup

CONTROLLER_FILE = "controller.pt"


@dataclass(slots=True)
class Unfinished:
    """A checkpoint whose parts are being written."""

    step: int
    manifest: Mapping[str, Any]
    entries: Entries
    writing: list[str] = field(default_factory=list)  # directories of roles


class OnlineSaver:
    """Writes checkpoints one at a time. `roles` are those that are trained, by their directory in a checkpoint; the
    policy has the checkpoint's own, "". A part is waited for at most `timeout_s` seconds."""

    def __init__(self, saves: Checkpoints, cluster: Cluster, roles: Mapping[str, RoleGroup], timeout_s: float) -> None:
        self.saves, self.cluster, self.roles, self.timeout_s = saves, cluster, roles, timeout_s
        self.unfinished: Unfinished | None = None

    def begin(self, step: int, state: dict[str, Any], manifest: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint, once the one before is committed; return when the roles have copied their state.

        `state` is the controller's own.
        """
        self.wait()
        path = self.saves.begin(step)
        for directory, role in self.roles.items():
            with self.cluster.phase(role, "save"):
                role.call("save", _joined(path, directory), self.timeout_s)
        entries = {CONTROLLER_FILE: checkpoint.save_host(f"{path}/{CONTROLLER_FILE}", state)}
        self.unfinished = Unfinished(step, manifest, entries, list(self.roles))

    def commit_if_written(self, wait_s: float = 0.0) -> bool:
        """Commit the checkpoint if all roles have written their parts, each within `wait_s` seconds from now. Return
        whether no checkpoint is unfinished. Raises what writing it raised, and LeaseLost."""
        if (unfinished := self.unfinished) is None:
            return True
        while unfinished.writing:
            directory = unfinished.writing[0]
            entries = self.roles[directory].call("saved", wait_s)
            if entries is None:
                return False
            unfinished.entries |= {_joined(directory, name): entry for name, entry in entries.items()}
            del unfinished.writing[0]
        self.unfinished = None
        self.saves.commit(unfinished.step, unfinished.entries, unfinished.manifest)
        return True

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, and commit it. Raises TimeoutError."""
        if not self.commit_if_written(self.timeout_s):
            assert self.unfinished is not None
            raise TimeoutError(
                f"the checkpoint of step {self.unfinished.step} was not written within {self.timeout_s:g} s "
                "(compute.timeout_s)"
            )

    def close(self, grace_s: float = 60.0) -> None:
        """After an error, wait up to `grace_s` seconds for a checkpoint that is being written, and commit it."""
        with contextlib.suppress(Exception):
            self.commit_if_written(grace_s)


def _joined(*parts: str) -> str:
    return "/".join(part for part in parts if part)
