"""A role whose workers are independent replicas, each in its own gang, so that a lost one is replaced while the others
continue.

Results that arrived from a replica before it was lost are kept. Its replacement gets the replayed broadcasts (the last
weights) and then computes the missing results.
"""

import itertools
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, ThreadPoolExecutor, wait
from operator import itemgetter
from typing import Any

from ptf.compute.gang import Gang, put
from ptf.errors import Lost, Retryable, UserError, full_text
from ptf.rl.cluster import JOINED, OnResult, RoleSpec
from ptf.rl.weights.verification import SyncError
from ptf.workspace.credentials import redacted

HUNG_S = 60.0  # a replica whose heartbeat is older than this is replaced


def by_cost(items: Sequence[Any], parts: int, cost: Callable[[Any], float]) -> list[list[int]]:
    """Divide the indices of the items into parts of nearly the same cost.

    The most expensive item is assigned first, each to the part that has the least so far.
    """
    shares, sums = [list[int]() for _ in range(parts)], [0.0] * parts
    for i in sorted(range(len(items)), key=lambda i: (-cost(items[i]), i)):
        least = min(range(parts), key=lambda part: (sums[part], part))
        shares[least].append(i)
        sums[least] += cost(items[i])
    return [sorted(share) for share in shares]


class Replicas:
    """RoleGroup of independent replicas.

    `start_gang` starts the gang of one replica; a replica that fails is started again up to `restarts` times in a call.
    """

    def __init__(self, spec: RoleSpec, start_gang: Callable[[int], Gang], device: str, restarts: int) -> None:
        self.spec, self.start_gang, self.device, self.restarts = spec, start_gang, device, restarts
        # method → its last arguments, which stay in Ray's object store; they include a copy of the weights
        self.replayed: dict[str, tuple[Any, ...]] = {}
        self.offloaded = self.closed = self.irreplaceable = False
        self.count = spec.mesh.data
        self.gangs: list[Any] = [None] * self.count  # the gang of each replica, once it is started
        self.threads = ThreadPoolExecutor(self.count)
        try:
            devices = self._each(self._start)
        except BaseException:
            self.close()
            raise
        print(f"{spec.name}: {spec.cls.__name__} on {', '.join(devices)}", flush=True)

    def call(self, method: str, *args: Any, on_result: OnResult | None = None) -> Any:
        """See RoleGroup.call. A replica that fails is replaced. Raises Retryable if it fails too often."""
        dispatch = getattr(getattr(self.spec.cls, method), "dispatch", "broadcast")
        if dispatch == "split":
            return self._call_split(method, args[0], args[1:], on_result)
        shared = tuple(put(arg) for arg in args)
        unreplayable = dispatch == "unreplayable_broadcast"
        self.irreplaceable |= unreplayable
        results = self._each(
            lambda i: self._with_restarts(i, method, lambda gang: self._ask(gang, method, shared)),
            wait_for_all=not unreplayable,
        )
        if dispatch == "replayed_broadcast":
            # after the call, not before: a replica that replaces one that fails in this call gets the arguments of the
            # previous call first, and then this call. What was called after the previous call was meant for its weights
            before = itertools.takewhile(lambda each: each != method, list(self.replayed))
            self.replayed = {each: self.replayed[each] for each in before} | {method: shared}
        if method in ("offload", "onload"):
            self.offloaded = method == "offload"
        return JOINED.get(dispatch, itemgetter(0))(results)

    def _call_split(self, method: str, items: Sequence[Any], rest: Sequence[Any], on_result: OnResult | None) -> list:
        """Return the result of each item. The items are divided among all replicas, or, if the method is `queued`, each
        replica takes one after the other."""
        function, shared = getattr(self.spec.cls, method), [put(arg) for arg in rest]  # stored once for all replicas
        if function.queued:
            order = sorted(range(len(items)), key=lambda k: (-function.cost(items[k]), k))
            lots = [deque([k] for k in order)] * self.count
        else:
            lots = [deque([share]) for share in by_cost(items, self.count, function.cost)]

        def take(i: int) -> Mapping[int, Any]:
            results: dict[int, Any] = {}
            while True:
                try:
                    lot = lots[i].popleft()  # of several threads, each gets another one
                except IndexError:
                    return results
                results |= self._part(i, method, items, lot, shared, on_result)

        results = {k: result for part in self._each(take) for k, result in part.items()}
        return [results[k] for k in range(len(items))]

    def close(self) -> None:
        """End all replicas; no replacement is started afterwards."""
        self.closed = True
        for gang in self.gangs:
            if gang:
                gang.close()
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _part(
        self,
        i: int,
        method: str,
        items: Sequence[Any],
        mine: Sequence[int],
        shared: Sequence[Any],
        on_result: OnResult | None,
    ) -> Mapping[int, Any]:
        """Return the results of one replica's items, by their indices."""
        results: dict[int, Any] = {}

        def ask(gang: Gang) -> None:
            if missing := [k for k in mine if k not in results]:
                arguments = (method, [items[k] for k in missing], *shared)
                for part in gang.stream("call_streaming", arguments, doing=f"{self.spec.name}.{method}"):
                    for which, result in part:
                        results[missing[which]] = result
                        if on_result:
                            on_result(missing[which], result)

        def progress() -> str:
            return f"; {len(mine) - len(results)} of its {len(mine)} items are computed again"

        self._with_restarts(i, method, ask, progress)
        return results

    def _with_restarts(self, i: int, method: str, ask: Callable[[Gang], Any], progress: Callable[[], str] = str) -> Any:
        """Return the result of `ask` for a replica; if it fails, replace the replica and repeat.

        Raises Retryable after `restarts` replacements, Lost if a replacement cannot get the weights.
        """
        for attempt in itertools.count():
            try:
                if attempt:
                    self._replace(i)
                return ask(self.gangs[i])
            except (UserError, SyncError, TimeoutError):  # a new replica would fail in the same way
                raise
            except Exception as error:
                if self.closed or not self.restarts:
                    raise
                failed, reason = f"{self._name(i)} failed at {method}", redacted(full_text(error))
                if self.irreplaceable:
                    raise Lost(
                        f"{failed}, and this rollout.transport cannot send the weights to a replacement alone: {reason}"
                    ) from error
                if attempt == self.restarts:
                    raise Retryable(f"{failed}, {attempt + 1} times: {reason}") from error
                print(f"{failed} and is replaced{progress()}: {reason}", flush=True)

    def _replace(self, i: int) -> None:
        self.gangs[i].close()
        self._start(i)
        for method, shared in self.replayed.items():
            self._ask(self.gangs[i], method, shared)
        if self.offloaded:
            self._ask(self.gangs[i], "offload")

    def _start(self, i: int) -> str:
        self.gangs[i] = gang = self.start_gang(i)
        if self.closed:
            gang.close()
            raise RuntimeError(f"{self.spec.name} is closed")
        size, visible = self.spec.mesh.model, list[str]()
        if size > 1:  # the first process holds the role, which uses the devices of all
            visible = gang.execute(os.getenv, [("CUDA_VISIBLE_DEVICES", "")] * size)
        arguments = (self.spec, self.device, gang.timeout_s, ",".join(filter(None, visible)))
        return gang.invoke("build", [arguments], doing=f"building {self.spec.cls.__name__}")[0]

    def _ask(self, gang: Gang, method: str, shared: Sequence[Any] = ()) -> Any:
        return gang.invoke("call", [(method, *shared)], doing=f"{self.spec.name}.{method}")[0]

    def _name(self, i: int) -> str:
        return self.spec.name if self.count == 1 else f"{self.spec.name} replica {i}"

    def _each(self, act: Callable[[int], Any], wait_for_all: bool = True) -> list[Any]:
        """Call `act` for every replica at the same time and return the results.

        An error is raised when all calls are done. If the replicas wait for each other, use `wait_for_all` False: then
        it is raised at once.
        """
        futures = [self.threads.submit(act, i) for i in range(self.count)]
        done, _ = wait(futures, return_when=ALL_COMPLETED if wait_for_all else FIRST_EXCEPTION)
        for future in done:
            future.result()  # raises what the call raised
        return [future.result() for future in futures]
