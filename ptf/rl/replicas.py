"""A role whose workers do not know of each other, each in a gang of its own, so that one that is lost is replaced while the others go on.

The one idea: what a replica gave before it was lost is kept, and its successor is told what lasts (the last weights), then asked for the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from ptf.compute.gang import Gang, share
from ptf.credentials import redacted
from ptf.errors import Lost, Retryable, UserError, told
from ptf.rl.cluster import RoleSpec
from ptf.rl.sync import SyncError

FROZEN_S = 60.0  # a replica of which nothing was heard for so long is replaced


def by_cost(items: Sequence[Any], parts: int, cost: Callable[[Any], float]) -> list[list[int]]:
    """The numbers of the items, in parts of nearly the same cost: the dearest first, each to the part that has least so far."""
    shares, sums = [list[int]() for _ in range(parts)], [0.0] * parts
    for i in sorted(range(len(items)), key=lambda i: (-cost(items[i]), i)):
        least = min(range(parts), key=lambda part: (sums[part], part))
        shares[least].append(i)
        sums[least] += cost(items[i])
    return [sorted(mine) for mine in shares]


class Replicas:
    """RoleGroup. `made` starts the gang of one replica; one that fails is made anew up to `restarts` times in a call."""

    def __init__(self, spec: RoleSpec, made: Callable[[int], Gang], device: str, restarts: int) -> None:
        self.spec, self.made, self.device, self.restarts = spec, made, device, restarts
        self.lasting: dict[str, tuple[Any, ...]] = {}  # method → its last arguments, which stay in Ray's object store: a copy of the weights
        self.parked = self.closed = self.irreplaceable = False
        self.count = spec.workers // spec.tensor
        self.gangs: list[Gang | None] = [None] * self.count
        self.threads = ThreadPoolExecutor(self.count)
        try:
            devices = self._each(self._start)
        except BaseException:
            self.close()
            raise
        print(f"{spec.name}: {spec.cls.__name__} on {', '.join(devices)}", flush=True)

    def call(self, method: str, *args: Any) -> Any:
        kind = getattr(self.spec.cls, method)
        dispatch = getattr(kind, "dispatch", "everywhere")
        if dispatch == "sharded":
            items, *rest = args
            shared = [share(arg) for arg in rest]  # once, however many replicas read it
            shares = by_cost(items, self.count, kind.cost)
            found: dict[int, Any] = {}
            for part in self._each(lambda i: self._part(i, method, items, shares[i], shared)):
                found |= part
            return [found[i] for i in range(len(items))]
        shared = tuple(share(arg) for arg in args)
        self.irreplaceable |= dispatch == "once"
        said = self._each(lambda i: self._kept(i, method, lambda gang: self._told(gang, method, shared)), patient=dispatch != "once")[0]
        if dispatch == "lasting":
            self.lasting[method] = shared  # now, not before: one that fails at it has a successor that is told what was before, and asked
        if method in ("park", "wake"):
            self.parked = method == "park"
        return said

    def memory(self) -> list[float]:
        return self._each(lambda i: self._kept(i, "memory_gib", lambda gang: self._told(gang, "memory_gib")))

    def where(self) -> list[str]:
        """Each worker with the memory that it holds now."""
        return [f"{self._name(i)} {self._gang(i).members[0]} {gib:.2f} GiB" for i, gib in enumerate(self.memory())]

    def close(self) -> None:
        self.closed = True
        for gang in self.gangs:
            if gang:
                gang.close()
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _part(self, i: int, method: str, items: Sequence[Any], mine: Sequence[int], shared: Sequence[Any]) -> Mapping[int, Any]:
        """The results of one replica's items, by their numbers."""
        found: dict[int, Any] = {}
        doing = f"{self.spec.name}.{method}"

        def ask(gang: Gang) -> None:
            left = [k for k in mine if k not in found]
            if left:
                for which, result in gang.stream("given", (method, [items[k] for k in left], *shared), doing=doing):
                    found[left[which]] = result

        self._kept(i, method, ask, lambda: f"; {len(mine) - len(found)} of its {len(mine)} items are asked for again")
        return found

    def _kept(self, i: int, method: str, ask: Callable[[Gang], Any], more: Callable[[], str] = str) -> Any:
        """What a replica answers; one that fails is replaced, and its successor asked. Raises Retryable after `restarts` of that."""
        lost = False
        for attempt in range(self.restarts + 1):
            try:
                if lost:
                    self._replace(i)
                return ask(self._gang(i))
            except (UserError, SyncError, TimeoutError):  # of others it would be the same
                raise
            except Exception as error:
                if self.closed or not self.restarts:
                    raise
                if self.irreplaceable:
                    why = "the weights that it was sent (rollout.transport) cannot be sent again to it alone"
                    raise Lost(f"{self._name(i)} failed at {method}, and {why}: {redacted(told(error))}") from error
                if attempt == self.restarts:
                    raise Retryable(f"{self._name(i)} failed at {method}, {attempt + 1} times: {redacted(told(error))}") from error
                print(f"{self._name(i)} failed at {method} and is replaced{more()}: {redacted(told(error))}", flush=True)
                lost = True
        raise AssertionError("not reached")

    def _replace(self, i: int) -> None:
        self._gang(i).close()
        self._start(i)
        for method, shared in self.lasting.items():
            self._told(self._gang(i), method, shared)
        if self.parked:
            self._told(self._gang(i), "park")

    def _start(self, i: int) -> str:
        self.gangs[i] = gang = self.made(i)
        if self.closed:
            gang.close()
            raise RuntimeError(f"{self.spec.name} is closed")
        if self.spec.tensor > 1:  # the first has the role, which uses the devices of all
            seen = gang.invoke("devices", [()] * self.spec.tensor, doing="looking for devices")
            gang.ask("see", (",".join(filter(None, seen)),), doing="looking for devices")
        what = (self.spec.cls, dict(self.spec.kwargs), self.device, gang.timeout_s, 1, 1)
        return gang.ask("build", what, doing=f"building {self.spec.cls.__name__}")

    def _told(self, gang: Gang, method: str, shared: Sequence[Any] = ()) -> Any:
        return gang.ask("call", (method, *shared), doing=f"{self.spec.name}.{method}")

    def _gang(self, i: int) -> Gang:
        gang = self.gangs[i]
        assert gang is not None, f"{self.spec.name} is closed"
        return gang

    def _name(self, i: int) -> str:
        return self.spec.name if self.count == 1 else f"{self.spec.name} replica {i}"

    def _each(self, act: Callable[[int], Any], patient: bool = True) -> list[Any]:
        """Of every replica, at the same time. An error is raised when all are done; or, where they wait for each other, at once."""
        asked = [self.threads.submit(act, i) for i in range(self.count)]
        done, _ = wait(asked, return_when=ALL_COMPLETED if patient else FIRST_EXCEPTION)
        for future in done:
            if error := future.exception():
                raise error
        return [future.result() for future in asked]
