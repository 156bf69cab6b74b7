"""The ledger of what the wall clock decided in a run with rollouts in flight: `flight.jsonl` in the run's directory.

With `rollout.clock: wall` it has, for each slice, the episodes that it computed and those that ended by its end; with
either clock, the episodes that have no result, because that may be a deadline's doing. A line is on the disk before it
takes effect. A run that is continued, and one that is replayed, does what the lines say, as far as they reach.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from ptf.compute.lease import UNSHARED, Lease
from ptf.data.trajectory import Prompt, Trajectory
from ptf.errors import UserError
from ptf.rl.in_flight_group import array_from_json, array_to_json, restored_trajectory

LEDGER_FILE = "flight.jsonl"
EpisodeId = tuple[int, int]  # the number of a group and of an episode in it


class Decided(NamedTuple):
    """The end of an episode without a result, after so many responses."""

    responses: int
    trajectory: Trajectory


class FlightLedger:
    """The lines of a run; with `path` None they are kept nowhere.

    A line has one of these sets of keys: `slice`, `version`, `beside_update` and `computed`, the episodes that a slice
    computes; `slice` and `ended`, those that ended by its end; `update_ended`, a version beside whose update no further
    slice ran, and the next `slice`; `no_result`, an episode that has none after so many `responses`, and its
    `trajectory`.
    """

    def __init__(self, path: Path | None, lease: Lease = UNSHARED) -> None:
        self.path, self.lease = path, lease
        self.updates: set[tuple[int, int]] = set()  # the slice before which an update ended, and its version
        self.slices: dict[int, dict[str, Any]] = {}
        self.ends: dict[int, frozenset[EpisodeId]] = {}  # slice → the episodes that ended by its end
        self.no_results: dict[EpisodeId, tuple[int, Any]] = {}  # responses, and the trajectory as values
        if path is not None and path.exists():
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]  # without a last line that was cut off
            if len(whole) < len(data):
                os.truncate(path, len(whole))
            for number, line in enumerate(whole.splitlines(), 1):
                try:
                    self._read(json.loads(line, object_hook=array_from_json))
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(f"{path}: line {number} is damaged; restore the file") from error

    def computed(self, slice_number: int, version: int) -> frozenset[EpisodeId] | None:
        """Return the episodes that a slice computes; None if it is not known. Raises UserError for another version."""
        if (known := self.slices.get(slice_number)) is None:
            return None
        if known["version"] != version:
            raise UserError(
                f"{self.path}: slice {slice_number} was computed with the weights of version {known['version']}, and "
                f"now they would be {version}: the ledger is of another run"
            )
        return frozenset(map(tuple, known["computed"]))

    def no_result(self, group: int, number: int, prompt: Prompt) -> Decided | None:
        """Return the end of an episode that had no result; None if that is not known."""
        known = self.no_results.get((group, number))
        return known and Decided(known[0], restored_trajectory(known[1], prompt))

    def write(self, **line: Any) -> None:
        """Write a line, and return when it is on the disk."""
        if self.path is None:
            return
        with self.lease.commit(local=True), self.path.open("a") as file:
            file.write(json.dumps(line, default=array_to_json) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self, line: dict[str, Any]) -> None:
        if "no_result" in line:
            self.no_results[tuple(line["no_result"])] = line["responses"], line["trajectory"]
        elif "update_ended" in line:
            self.updates.add((line["slice"], line["update_ended"]))
        elif "ended" in line:
            self.ends[line["slice"]] = frozenset(map(tuple, line["ended"]))
        else:
            self.slices[line["slice"]] = line
