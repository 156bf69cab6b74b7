"""Which requests a slice computes, and which episodes have ended after it: by the virtual or by the wall clock.

With the virtual clock a slice waits for every episode that is due, and an episode that is early waits for its slice.
With the wall clock a slice takes the requests that have arrived; a ledger gets these choices before they take effect,
and where it already has lines, of a run that is continued or replayed, these decide.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from ptf.errors import UserError
from ptf.rl.in_flight_group import EpisodeInFlight, InFlightGroup

if TYPE_CHECKING:
    from ptf.rl.flight_ledger import EpisodeId, FlightLedger
    from ptf.rl.in_flight import InFlight

POLL_S = 0.02  # seconds between looks whether an update goes on, while no request is there
Updating = Callable[[], bool]


class VirtualClock:
    """Waits for every episode that is due."""

    def __init__(self, update_slices: int) -> None:
        self.update_slices = update_slices

    async def to_compute(
        self, flight: "InFlight", version: int, updating: Updating | None
    ) -> list[tuple[int, EpisodeInFlight]]:
        """Return the episodes whose requests the next slice computes, with the numbers of their groups, in order."""
        await self._wait(flight)
        return [(g.number, m) for g, _, m in members_of(flight.groups) if m.pending and m.due <= flight.slice]

    async def ended(self, flight: "InFlight") -> list[EpisodeInFlight]:
        """Return the episodes whose end counts from now on."""
        await self._wait(flight)
        return [m for _, _, m in members_of(flight.groups) if m.trajectory is not None and m.due <= flight.slice]

    def has_slice(self, slice_number: int, version: int, number: int, updating: Updating) -> bool:
        """Return whether a slice, the `number`-th beside the update of the weights of `version`, begins before the new
        ones are loaded."""
        return number < self.update_slices

    async def _wait(self, flight: "InFlight") -> None:
        flying = [m for _, _, m in members_of(flight.groups) if m.due <= flight.slice]
        await flight.until(lambda: [m for m in flying if m.awaits_environment])


class WallClock:
    """Takes what is there, and waits only while nothing is."""

    def __init__(self, ledger: "FlightLedger") -> None:
        self.ledger = ledger

    async def to_compute(
        self, flight: "InFlight", version: int, updating: Updating | None
    ) -> list[tuple[int, EpisodeInFlight]]:
        """See VirtualClock."""
        flying = members_of(flight.groups)
        if (known := self.ledger.computed(flight.slice, version)) is not None:
            return await self._again(flight, flight.slice, known, lambda m: m.pending is not None)

        def awaiting_environment() -> list[EpisodeInFlight]:
            awaiting = [m for _, _, m in flying if m.awaits_environment]
            is_over = len(awaiting) < len(flying) or (updating is not None and not updating())
            return [] if is_over else awaiting

        await flight.until(awaiting_environment, None if updating is None else POLL_S)
        found = [(g, i, m) for g, i, m in flying if m.pending]
        computed, beside = [(g.number, i) for g, i, _ in found], updating is not None
        self.ledger.write(slice=flight.slice, version=version, beside_update=beside, computed=computed)
        return [(g.number, m) for g, _, m in found]

    async def ended(self, flight: "InFlight") -> list[EpisodeInFlight]:
        """See VirtualClock."""
        flying, number = members_of(flight.groups), flight.slice - 1
        if (known := self.ledger.ends.get(number)) is not None:
            return [m for _, m in await self._again(flight, number, known, lambda m: m.trajectory is not None)]
        for _ in range(3):  # episodes that end without waiting for anything
            await asyncio.sleep(0)
        found = [(g, i, m) for g, i, m in flying if m.trajectory is not None]
        self.ledger.write(slice=number, ended=[(g.number, i) for g, i, _ in found])
        return [m for _, _, m in found]

    def has_slice(self, slice_number: int, version: int, number: int, updating: Updating) -> bool:
        """See VirtualClock."""
        if (slice_number, version) in self.ledger.updates:
            return False
        if (known := self.ledger.slices.get(slice_number)) is not None:
            return known["beside_update"] and known["version"] == version
        if updating():
            return True
        self.ledger.write(update_ended=version, slice=slice_number)
        return False

    async def _again(
        self,
        flight: "InFlight",
        slice_number: int,
        known: "frozenset[EpisodeId]",
        has_come: Callable[[EpisodeInFlight], bool],
    ) -> list[tuple[int, EpisodeInFlight]]:
        """Wait for the episodes that the ledger has; return them, with the numbers of their groups. Raises UserError if
        one of them does otherwise than before."""
        chosen = [(g.number, m) for g, i, m in members_of(flight.groups) if (g.number, i) in known]
        await flight.until(lambda: [m for _, m in chosen if m.awaits_environment])
        if len(chosen) < len(known) or not all(has_come(m) for _, m in chosen):
            raise UserError(
                f"{self.ledger.path}: by slice {slice_number} an episode ended or asked the policy otherwise than "
                "before: its environment is not deterministic (ptf try checks that), so the run cannot be continued or "
                "replayed"
            )
        return chosen


def members_of(groups: list[InFlightGroup]) -> list[tuple[InFlightGroup, int, EpisodeInFlight]]:
    """Return the episodes whose end does not count yet, with their groups and numbers, in order."""
    return [(group, i, member) for group in groups for i, member in group.in_flight]
