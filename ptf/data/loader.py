"""From the partitions of the data to global steps. The loader packs ahead in a background thread; its
state is that of the steps that were *consumed*.

Sequence g of the run comes from partition g % partitions, whichever rank trains it, and rank r of W serves the
partitions ≡ r mod W. Since W divides the number of partitions and of sequences, these are the sequences ≡ r mod W of
every step. The global batches therefore do not depend on W, and a run may resume with a different W. A rank makes only
the sequences of its own partitions; the rank of a group that trains a sequence is chosen to balance the work of
attention (ptf/data/rank_balancing.py).
"""

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ptf.data.batch import Batch, lay_out
from ptf.data.document import PackUnit, length
from ptf.data.packing import idle
from ptf.data.partitions import Partitions
from ptf.data.rank_balancing import FAILED, STOPS, PeerEnded, Peers, exchange_sequences
from ptf.errors import UserError

AHEAD = 4  # global steps that are packed ahead


@dataclass(frozen=True, slots=True)
class _Share:
    """The part of one global step that this rank trains."""

    batches: list[Batch]
    numbers: list[int]  # numbers of their sequences in the global step
    fill: float
    states: dict[int, dict[str, Any]]  # the state of each partition after this step
    counts: dict[str, int]


class Loader(Iterator[list[Batch]]):
    """Stream[list[Batch]]: this rank's sequences of one global step, in micro-batches."""

    def __init__(
        self,
        partition_factory: Partitions,
        *,
        partitions: int,
        sequences: int,
        rank: int = 0,
        world_size: int = 1,
        micro_batch_sequences: int,
        seq_len: int,
        timeout_s: float = 1800.0,
        peers: Peers | None = None,
    ):
        """Make a loader for one rank.

        `peers` is the group of neighbouring ranks with which sequences are exchanged; without it, a rank trains the
        sequences that it makes.
        """
        if partitions % world_size or sequences % world_size:
            raise UserError(
                f"the number of workers ({world_size}) must divide data.partitions ({partitions}) "
                f"and train.global_batch_sequences ({sequences})"
            )
        self._factory, self._partitions, self._sequences = partition_factory, partitions, sequences
        self._micro_sequences, self._seq_len = micro_batch_sequences, seq_len
        self._peers = peers if peers is not None and peers.size > 1 else None
        self._thread: threading.Thread | None = None
        self._timeout_s = timeout_s
        self._template: PackUnit | None = None
        self.step = 0  # the number of the next step
        self.waited_s = 0.0  # seconds that the consumer waited for the last step
        self.numbers: list[int] = []  # numbers of this rank's sequences in the last global step
        self.fill = 0.0  # share of the last step's slots that hold tokens
        self.served = range(rank, partitions, world_size)  # the partitions of this rank
        self._sequence_numbers = list(range(rank, sequences, world_size))  # of those that this rank makes in a step
        self._open()

    def _open(self, states: Mapping[str, Any] | None = None) -> None:
        """Open this rank's partitions, at their states by number if given, and record the state of each."""
        self._served = {partition: self._factory(partition) for partition in self.served}
        if states:
            for partition, stream in self._served.items():
                stream.load_state_dict(states[str(partition)])
        self._partition_states: dict[int, dict[str, Any]] = {}
        self._partition_counts: dict[int, Mapping[str, int]] = {}
        self._totals: Counter[str] = Counter()  # the sums of these counts
        self._states, self.counts = self._snapshot(self._served)

    def _snapshot(self, partitions: Iterable[int]) -> tuple[dict[int, dict[str, Any]], dict[str, int]]:
        """Return the state of each partition and the counts of all, given those that were read since the last call.

        A step reads few partitions of a rank that serves many.
        """
        for partition in dict.fromkeys(partitions):  # a step may take several sequences of a partition
            self._partition_states[partition] = self._served[partition].state_dict()
            self._totals.subtract(self._partition_counts.get(partition, {}))
            self._partition_counts[partition] = dict(self._served[partition].counts())
            self._totals.update(self._partition_counts[partition])
        return dict(self._partition_states), dict(self._totals)

    def _read(self, partitions: Iterable[int]) -> list[list[PackUnit]]:
        """Return the next sequence of each of some partitions."""
        sequences = [next(self._served[partition], []) for partition in partitions]
        if not all(sequences):  # a partition that has ended gives sequences that train nothing
            # a unit that has the columns of all samples, even if this rank has no sequences left
            self._template = self._template or next((sequence[0] for sequence in sequences if sequence), None)
            if self._template is None:
                # from any partition that has sequences
                firsts = (next(self._factory(partition), None) for partition in range(self._partitions))
                self._template = next(sequence[0] for sequence in firsts if sequence)
            nothing = [idle([[self._template]])]
            sequences = [sequence or nothing for sequence in sequences]
        return sequences

    def _steps(self, step: int, stop: threading.Event) -> Iterator[_Share]:
        """Yield the steps from `step` on, until `stop` is set. The ranks that exchange sequences end together."""
        while not stop.is_set():
            partitions = [(step * self._sequences + j) % self._partitions for j in self._sequence_numbers]
            try:
                sequences, states = self._read(partitions), self._snapshot(partitions)
            except BaseException:
                self._leave(FAILED)
                raise
            numbers = self._sequence_numbers
            if self._peers is not None:
                sequences, numbers = exchange_sequences(sequences, numbers, self._peers)
            batches = lay_out(sequences, self._seq_len, self._micro_sequences)
            tokens = sum(length(unit) for sequence in sequences for unit in sequence)
            yield _Share(batches, numbers, tokens / (len(sequences) * self._seq_len), *states)
            step += 1
        self._leave(STOPS)

    def _leave(self, reason: int) -> None:
        """Tell the ranks that wait for this rank's sequences that it makes no more."""
        if self._peers is not None:
            with contextlib.suppress(PeerEnded):
                exchange_sequences([], self._sequence_numbers, self._peers, reason)

    def _work(self, step: int, out: queue.SimpleQueue, room: threading.Semaphore, stop: threading.Event) -> None:
        """Put steps into the queue, and the error that ends them; runs in the thread."""
        try:
            for share in self._steps(step, stop):
                room.acquire()
                out.put(share)
        except BaseException as e:  # the consumer raises it
            out.put(e)

    def __next__(self) -> list[Batch]:
        if self._thread is None:
            self._queue: queue.SimpleQueue = queue.SimpleQueue()
            self._room, self._stop = threading.Semaphore(AHEAD), threading.Event()
            self._thread = threading.Thread(
                target=self._work,
                args=(self.step, self._queue, self._room, self._stop),
                name="ptf-loader",
                daemon=True,
            )
            self._thread.start()
        start = time.perf_counter()
        try:
            item = self._queue.get(timeout=self._timeout_s)
        except queue.Empty:
            raise TimeoutError(
                f"no data for step {self.step} within {self._timeout_s:g} s: reading the data hangs"
            ) from None
        self.waited_s = time.perf_counter() - start
        if isinstance(item, BaseException):
            self._queue.put(item)  # so that the next call raises it too
            raise item
        self._room.release()
        self.step += 1
        self.fill, self.numbers, self._states, self.counts = item.fill, item.numbers, item.states, item.counts
        return item.batches

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last step that was yielded, with the partitions that this rank serves."""
        return {
            "step": self.step,
            "partitions": {str(partition): state for partition, state in self._states.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, which may be merged from several ranks' states; it must have this rank's
        partitions."""
        self.close()
        missing = [partition for partition in self._served if str(partition) not in state["partitions"]]
        if missing:
            raise UserError(
                f"the checkpoint has no state of the partitions {missing}: it was written with another "
                "data.partitions, which cannot change on resume; set it back"
            )
        self._open(state["partitions"])
        self.step = int(state["step"])

    def close(self, timeout_s: float = 30.0) -> None:
        """Stop packing. Steps that were packed ahead are dropped; the state does not change."""
        if self._thread is None:
            return
        self._stop.set()
        self._room.release()
        self._thread.join(timeout_s)
        # with peers, the thread may be waiting for ranks that have ended; it ends with the process
        if self._thread.is_alive() and self._peers is None:
            raise TimeoutError(f"the loader's thread did not stop within {timeout_s} s: reading the data hangs")
        self._thread = None
