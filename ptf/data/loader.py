"""From lanes to global steps: packs ahead in a background thread, and its state is what was *consumed*.

The one idea: global row g comes from lane g % lanes whoever trains it, and rank r of W owns the lanes ≡ r mod W. As W divides lanes and rows,
those are the rows ≡ r mod W of every step: the global batches do not depend on W, and a run may resume on another W. A rank makes the rows of its own
lanes only; which rank of a group then trains a row is decided by the work of attention (ptf/data/exchange.py).
"""

import contextlib
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ptf.data.batch import Batch, Memory, laid_out
from ptf.data.documents import Documents
from ptf.data.exchange import FAILED, GOES_ON, STEPS, STOPS, Peers, exchanged
from ptf.data.items import Item, atoms_of, documents_of, items_of
from ptf.data.packing import idle
from ptf.data.sample import Atom
from ptf.data.stream import Stream, settle
from ptf.errors import UserError


class Counted(Stream[list[Atom]], Protocol):
    """A lane: packed rows, and running totals of what went into them."""

    def row(self) -> list[Item]:
        """The next, in place of `__next__`."""
        ...

    def counts(self) -> Mapping[str, int]: ...


class LaneFactory(Protocol):
    def __call__(self, lane: int) -> Counted: ...

    @property
    def endless(self) -> bool:
        """Whether its lanes are."""
        ...


def _rest(stream: Stream[Any]) -> Iterator[Any]:
    with contextlib.suppress(StopIteration):
        while True:
            yield next(stream)


_States = tuple[dict[int, dict[str, Any]], dict[str, int]]  # of each lane, behind a step; and what was counted


@dataclass(frozen=True, slots=True)
class _Step:
    batches: list[Batch]
    numbers: list[int]  # of their rows in the global step
    fill: float
    states: dict[int, dict[str, Any]]  # of each lane, behind this step
    counts: dict[str, int]


class Loader:
    """Stream[list[Batch]]: this rank's rows of one global step, in micro-batches."""

    def __init__(
        self, lane_factory: LaneFactory, *, lanes: int, rows: int, rank: int = 0, world_size: int = 1, micro_rows: int,
        seq_len: int, prefetch: int = 2, timeout_s: float = 1800.0, peers: Peers | None = None,
    ):  # fmt: skip
        """`peers` are the ranks with which rows are exchanged, a group of neighbours; without them a rank trains what it made."""
        if lanes % world_size or rows % world_size:
            raise UserError(f"the number of workers ({world_size}) must divide data.lanes ({lanes}) and train.rows ({rows})")
        self._factory, self._lanes, self._rows, self._rank, self._world = lane_factory, lanes, rows, rank, world_size
        self._micro_rows, self._seq_len, self._prefetch = micro_rows, seq_len, prefetch
        self._peers = peers if peers is not None and peers.size > 1 else None
        self._memory = Memory()
        self._thread: threading.Thread | None = None
        self._timeout_s = timeout_s
        self._seen: Atom | None = None
        self.step = 0  # the next to be yielded
        self.waited_s = 0.0  # how long the last step kept the consumer waiting
        self.numbers: list[int] = []  # of this rank's rows in the last global step
        self.fill = 0.0  # share of the last step's slots that hold tokens
        self._open()

    def _open(self) -> None:
        self._served = {lane: self._factory(lane) for lane in self.served}
        self._settle_on()

    def _settle_on(self) -> None:
        self._states, self.counts = self._snapshot()

    def _snapshot(self) -> _States:
        each = [stream.counts() for stream in self._served.values()]
        return {lane: stream.state_dict() for lane, stream in self._served.items()}, {key: sum(c[key] for c in each) for key in each[0]}

    def _pack(self, step: int) -> _Step:
        """A step of this rank alone."""
        return self._laid_out(self._own, documents_of(self._items(step)), self._snapshot())

    @property
    def _own(self) -> list[int]:
        """Numbers of the rows that this rank makes in a step."""
        return list(range(self._rank, self._rows, self._world))

    def _items(self, step: int) -> list[list[Item]]:
        """This rank's rows of a step."""
        rows = [self._row((step * self._rows + j) % self._lanes) for j in self._own]
        if not all(rows):  # of a lane that has ended: a row that trains nothing
            nothing = items_of([idle([[self._like(rows)]])], "", 0, (0, 0), 0, 0)
            rows = [row or nothing for row in rows]
        return rows

    def _laid_out(self, numbers: list[int], documents: Documents, states: _States) -> _Step:
        batches = laid_out(documents, self._seq_len, self._micro_rows, self._memory)
        fill = len(documents.weights) / (len(documents.rows) * self._seq_len)
        return _Step(batches, numbers, fill, *states)

    def _steps(self, step: int, stop: threading.Event) -> Iterator[_Step]:
        """From `step` on, until `stop`."""
        if self._peers is None:
            while not stop.is_set():
                yield self._pack(step)
                step += 1
        else:
            yield from self._exchanged(step, stop, self._peers)

    def _exchanged(self, step: int, stop: threading.Event, peers: Peers) -> Iterator[_Step]:
        """Steps are made and exchanged several at a time: a single one at first, so that training begins soon, then twice as many each time. While some
        are made, those before are laid out and yielded, so that making them keeps nobody waiting."""
        ready: deque[tuple[list[int], Documents, _States]] = deque()  # steps that were exchanged, and not yielded
        together, error, ended = 1, None, None
        while not ended:
            made: list[tuple[list[list[Atom]], _States]] = []
            while len(made) < together and not error:
                if ready:
                    yield self._laid_out(*ready.popleft())
                if stop.is_set():
                    exchanged([], self._own, peers, STOPS)
                    return
                try:
                    made.append((atoms_of(self._items(step + len(made))), self._snapshot()))
                except BaseException as e:  # those who wait for this rank's rows hear of it first, and train what was made before
                    error = e
            found, ended = exchanged([rows for rows, _ in made], self._own, peers, FAILED if error else GOES_ON)
            ready += [(numbers, Documents.of(rows), states) for (rows, numbers), (_, states) in zip(found, made, strict=False)]
            step, together = step + len(made), min(2 * together, STEPS)
        for one in ready:
            yield self._laid_out(*one)
        raise error or ended

    def _row(self, lane: int) -> list[Item]:
        """A lane's next; nothing where it has ended."""
        try:
            return self._served[lane].row()
        except StopIteration:
            return []

    def _like(self, rows: list[list[Item]]) -> Atom:
        """An atom that carries the streams that all do, though this rank may have none left."""
        seen = self._seen or next((atoms_of([row[:1]])[0][0] for row in rows if row), None)
        if seen is None:
            lanes = (row for lane in range(self._lanes) for row in itertools.islice(_rest(self._factory(lane)), 1))  # of some lane: others may have none
            seen = next(lanes)[0]
        self._seen = seen
        return seen

    def _work(self, step: int, out: queue.Queue, stop: threading.Event) -> None:
        steps = self._steps(step, stop)
        while True:
            item: _Step | BaseException
            try:
                item = next(steps)
            except StopIteration:
                return
            except BaseException as e:  # whatever it is, it belongs to the consumer
                item = e
            while not stop.is_set():
                try:
                    out.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> list[Batch]:
        if self._thread is None:
            self._queue: queue.Queue = queue.Queue(maxsize=self._prefetch)
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._work, args=(self.step, self._queue, self._stop), name="ptf-loader", daemon=True)
            self._thread.start()
        start = time.perf_counter()
        try:
            item = self._queue.get(timeout=self._timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no data for step {self.step} within {self._timeout_s:g} s: a read of the data hangs") from None
        self.waited_s = time.perf_counter() - start
        if isinstance(item, BaseException):
            self._queue.put(item)  # and again, should one ask again
            raise item
        self.step += 1
        self.fill, self.numbers, self._states, self.counts = item.fill, item.numbers, item.states, item.counts
        return item.batches

    @property
    def endless(self) -> bool:
        return self._factory.endless

    @property
    def served(self) -> range:
        """The lanes of this rank."""
        return range(self._rank, self._lanes, self._world)

    def state_dict(self) -> dict[str, Any]:
        """The state behind the last step that was yielded, of the lanes that this rank serves."""
        return {"step": self.step, "lanes": {str(lane): settle(state) for lane, state in self._states.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the states of any ranks' loaders together, as long as this rank's lanes are among them."""
        self.close()
        missing = [lane for lane in self._served if str(lane) not in state["lanes"]]
        if missing:
            raise UserError(f"the checkpoint has no state of lanes {missing}: data.lanes cannot change on resume")
        self._open()
        self.step = int(state["step"])
        for lane, stream in self._served.items():
            stream.load_state_dict(state["lanes"][str(lane)])
        self._settle_on()

    def close(self, timeout_s: float = 30.0) -> None:
        """Stop packing. What was packed ahead is gone from this loader; its state is not."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive() and self._peers is None:  # else it waits for peers that are gone, and ends with the process
            raise TimeoutError(f"the loader's thread did not stop within {timeout_s} s: a read of the data hangs")
        self._thread = None
