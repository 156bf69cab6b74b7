"""Every row says its own number, so what was trained can be read back from the batches."""

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ptf.data.batch import Batch
from ptf.data.encode import encode_document
from ptf.data.loader import Loader
from ptf.data.partitions import Partitions
from ptf.data.rank_balancing import PeerEnded, _assign_shares
from ptf.data.sources.rows import SourceSpec
from ptf.data.tokenizer import Tokenizer
from ptf.data.training_length import DataPlan, planned, rows_taken
from ptf.errors import UserError
from tests.data.ledger import ledger
from tests.data.peers import Threads, close
from tests.data.trials import state_of
from tests.tiny import write_jsonl

PARTITIONS, SEQUENCES, SEQ_LEN = 4, 8, 64


def chat(name: str, i: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"{name}{i}."},
            {"role": "assistant", "content": "x" * (1 + i * i % 23)},
        ]
    }


def history(name: str, i: int) -> dict[str, Any]:
    """Its baskets are read in another order each time."""
    return {
        "events": [f"{name}{i}.", ["xy", "z", "vw"][: 1 + i % 3], "-", [*"abcdefghij"[: 1 + i * i % 10]]],
        "inside": 0.3,
    }


@pytest.fixture(scope="module", params=[chat, history])
def sources(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, SourceSpec]:
    """61 + 29 rows; a at twice the share of b."""
    root = tmp_path_factory.mktemp("loader")
    for name, n in (("a", 61), ("b", 29)):
        write_jsonl(root / f"{name}.jsonl", [request.param(name, i) for i in range(n)])
    return {"a": SourceSpec(str(root / "a.jsonl"), 2.0), "b": SourceSpec(str(root / "b.jsonl"), 1.0)}


def once(row: Any, name: str, tokenizer: Tokenizer) -> list[Any]:
    return encode_document(row, tokenizer, name)


def repeated(row: Any, name: str, tokenizer: Tokenizer) -> list[Any]:
    """One to three units, as of conversations that had to be split."""
    units = encode_document(row, tokenizer, name)
    return units * (1 + len(row["messages"][1]["content"] if "messages" in row else row["events"][3]) % 3)


def make(
    sources: dict[str, SourceSpec],
    tokenizer: Tokenizer,
    rank: int = 0,
    world: int = 1,
    micro_batch_sequences: int = 8,
    encode: Any = repeated,
    **kwargs: Any,
) -> Loader:
    peers = kwargs.pop("peers", None)
    options: dict[str, Any] = {
        "partitions": PARTITIONS,
        "seed": 0,
        "shuffle": 8,
        "seq_len": SEQ_LEN,
        "lookahead": 6,
    } | kwargs
    made = Partitions(sources, tokenizer, lambda row, name: encode(row, name, tokenizer), **options)
    return Loader(
        made,
        partitions=options["partitions"],
        sequences=SEQUENCES,
        rank=rank,
        world_size=world,
        micro_batch_sequences=micro_batch_sequences,
        seq_len=SEQ_LEN,
        peers=peers,
    )


def plan_of(loader: Loader, steps: int | None = None, **options: Any) -> DataPlan:
    return planned(loader._factory, SEQUENCES, steps, **options)  # type: ignore[arg-type]


def documents(batches: list[Batch], tokenizer: Tokenizer) -> Iterator[str]:
    """The name of each document: what the user said, up to the full stop."""
    for batch in batches:
        for i, n in enumerate(batch.lengths):
            at = (batch.segments == i).nonzero()
            ids = batch.tokens[at[0, 0], at[0, 1] : at[0, 1] + n]
            if n > 1:
                yield tokenizer.decode(ids).split(".")[0].removeprefix("<|im_start|><|user|>")


def sequences_of(batches: list[Batch]) -> list[tuple[bytes, bytes]]:
    """Each sequence's bytes."""
    return [
        (b.tokens[i].numpy().tobytes(), b.loss_weights[i].numpy().tobytes())
        for b in batches
        for i in range(len(b.tokens))
    ]


def run(loaders: list[Loader], steps: int) -> list[list[tuple[bytes, bytes]]]:
    """Global steps, put together from the ranks: sequence j of a step is with rank j % W."""
    out = []
    for _ in range(steps):
        ranks = [sequences_of(next(loader)) for loader in loaders]
        out.append([ranks[j % len(ranks)][j // len(ranks)] for j in range(SEQUENCES)])
    return out


@pytest.fixture(scope="module")
def whole(sources: dict[str, SourceSpec], characters: Tokenizer) -> list[list[tuple[bytes, bytes]]]:
    loader = make(sources, characters)
    steps = run([loader], 30)
    loader.close()
    return steps


@pytest.mark.parametrize("world", [2, 4])
def test_global_batches_do_not_depend_on_the_number_of_workers(
    sources: Any, characters: Tokenizer, whole: Any, world: int
) -> None:
    loaders = [make(sources, characters, rank, world, micro_batch_sequences=3) for rank in range(world)]
    assert run(loaders, 30) == whole
    close(loaders)


def test_ranks_exchange_sequences_by_work(sources: Any, characters: Tokenizer, whole: Any) -> None:
    """Every step has the sequences that it has alone, each once; a rank makes its own partitions' only; the counts add
    up; the state is of the partitions."""
    peers = Threads.group(4)
    loaders = [make(sources, characters, rank, 4, peers=peers[rank]) for rank in range(4)]
    alone, heaviest = make(sources, characters), {"exchanged": 0, "in turn": 0}
    with ThreadPoolExecutor(4) as pool:
        for step in range(12):
            ranks = list(pool.map(next, loaders))
            sequences = [sequences_of(batches) for batches in ranks]
            assert [len(mine) for mine in sequences] == [2] * 4
            numbers = (j for loader in loaders for j in loader.numbers)
            dealt = (sequence for mine in sequences for sequence in mine)
            assert sorted(zip(numbers, dealt, strict=True)) == list(enumerate(whole[step]))
            heaviest["exchanged"] += max(sum(n * n for b in batches for n in b.lengths) for batches in ranks)
            (batch,) = next(alone)
            squares = torch.tensor([float(n * n) for n in batch.lengths])
            sequence_of = torch.tensor([int((batch.segments == i).nonzero()[0, 0]) for i in range(len(batch.lengths))])
            work = torch.zeros(SEQUENCES).index_add(0, sequence_of, squares)
            heaviest["in turn"] += int(max(work[rank::4].sum() for rank in range(4)))
    assert heaviest["exchanged"] < heaviest["in turn"]
    assert all(peer.sent for peer in peers)
    assert [sorted(loader._served) for loader in loaders] == [[rank] for rank in range(4)]
    assert sum(loader.counts["samples"] for loader in loaders) == alone.counts["samples"]
    state = state_of(loaders)
    close([*loaders, alone])
    again = make(sources, characters)
    again.load_state_dict(state)
    assert run([again], 3) == whole[12:15]
    again.close()


def test_shares_stay_where_their_sequences_were_made() -> None:
    shares, made_by = [[0, 3], [1, 4], [2, 5]], [2, 0, 1, 2, 1, 0]
    assert _assign_shares(shares, made_by) == [2, 0, 1]  # of its two sequences, both, one and one


@pytest.mark.parametrize("sources", [chat], indirect=True)
def test_ranks_that_exchange_end_together(sources: Any, characters: Tokenizer, tmp_path: Path) -> None:
    """Where one fails, the others say so; where one is closed, none hangs."""
    (tmp_path / "bad.jsonl").write_text(
        "".join(json.dumps(chat("a", i)) + "\n" for i in range(400)) + '{"messages": 1}\n'
    )
    peers = Threads.group(2)
    bad = {"bad": SourceSpec(str(tmp_path / "bad.jsonl"), kind="chat")}
    loaders = [make(bad, characters, rank, 2, peers=peers[rank]) for rank in range(2)]

    def error_of(loader: Loader) -> tuple[str, int]:
        with pytest.raises((UserError, PeerEnded)) as error:
            list(itertools.islice(loader, 100))
        return str(error.value), loader.step

    with ThreadPoolExecutor(2) as pool:
        errors, steps = zip(*pool.map(error_of, loaders), strict=True)
    alone = make(bad, characters)
    # what was made before is trained, whatever else is made and exchanged with it
    assert steps == (error_of(alone)[1],) * 2
    assert steps[0] > 0
    assert sorted("bad.jsonl:401" in error for error in errors) == [False, True]
    assert any("the loader of another worker failed" in error for error in errors)
    close(loaders)
    peers = Threads.group(2)
    loaders = [make(sources, characters, rank, 2, peers=peers[rank]) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(next, loaders))
    before = threading.active_count()
    close(loaders)
    assert threading.active_count() == before - 2


def test_elastic_resume_repeats_and_loses_nothing(sources: Any, characters: Tokenizer, whole: Any) -> None:
    steps: list[Any] = []
    state = None
    for world in (1, 2, 4, 1):
        loaders = [make(sources, characters, rank, world) for rank in range(world)]
        for loader in loaders if state else []:
            loader.load_state_dict(state)
        steps += run(loaders, 7)
        state = state_of(loaders)
        close(loaders)
    assert steps == whole[:28]


def test_every_row_once_before_any_twice(sources: Any, characters: Tokenizer, whole: Any) -> None:
    """Each partition deals a source's rows in turn, so over all partitions the counts differ by no more than the
    partitions' windows can hold back."""
    loader = make(sources, characters, encode=once)
    seen: Counter[str] = Counter()
    for _ in range(60):
        seen.update(documents(next(loader), characters))
    loader.close()
    assert len(seen) == 61 + 29
    for name in ("a", "b"):
        counts = [n for key, n in seen.items() if key[0] == name]
        assert max(counts) - min(counts) <= 2
    share = sum(n for key, n in seen.items() if key[0] == "a") / seen.total()
    assert abs(share - 2 / 3) < 0.02


def test_batches_are_what_a_loss_expects(sources: Any, characters: Tokenizer) -> None:
    loader = make(sources, characters, micro_batch_sequences=3)
    batches = next(loader)
    loader.close()
    assert [b.tokens.shape for b in batches] == [(3, SEQ_LEN), (3, SEQ_LEN), (2, SEQ_LEN)]
    tokens = sum(sum(b.lengths) for b in batches)
    assert loader.fill == tokens / (SEQUENCES * SEQ_LEN)
    assert loader.waited_s > 0
    for b in batches:
        assert (b.targets[b.loss_weights > 0] != 0).all()
        assert torch.equal(b.positions[:, 0], torch.zeros(len(b.tokens), dtype=torch.int64))
        assert (b.loss_weights[b.segments < 0] == 0).all()


def test_the_state_is_of_what_was_consumed_not_of_what_was_packed(sources: Any, characters: Tokenizer) -> None:
    loader = make(sources, characters)
    fresh = loader.state_dict()
    assert fresh["step"] == 0
    next(loader)
    while loader._queue.qsize() < 2:  # two steps ahead
        pass
    counted = loader.state_dict()
    assert counted["step"] == 1
    assert loader.counts["samples"] == sum(
        partition["mixer"]["streams"][s]["counts"]["samples"]
        for partition in counted["partitions"].values()
        for s in "ab"
    )
    second = sequences_of(next(loader))
    loader.close()
    other = make(sources, characters)
    other.load_state_dict(counted)
    assert sequences_of(next(other)) == second
    other.load_state_dict(fresh)  # a loader that runs may be set back
    next(other)
    assert sequences_of(next(other)) == second
    other.close()


@pytest.mark.parametrize("sources", [chat], indirect=True)
def test_an_error_in_the_background_reaches_the_consumer(sources: Any, characters: Tokenizer, tmp_path: Path) -> None:
    good = Path(sources["b"].path).read_text()
    (tmp_path / "bad.jsonl").write_text(good + '{"messages": 1}\n')
    loader = make({"bad": SourceSpec(str(tmp_path / "bad.jsonl"))}, characters)
    for _ in range(2):  # it stays broken
        with pytest.raises(UserError, match=r"bad\.jsonl:30 \(source bad\): `messages` must be a list"):
            list(itertools.islice(loader, 20))
    loader.close()


def test_close_leaves_no_thread(sources: Any, characters: Tokenizer) -> None:
    before = threading.active_count()
    loader = make(sources, characters)
    loader.close()  # not started
    next(loader)
    assert threading.active_count() == before + 1
    loader.close()
    assert threading.active_count() == before


def test_workers_must_divide_and_partitions_must_be_there(sources: Any, characters: Tokenizer) -> None:
    with pytest.raises(
        UserError, match=r"workers \(3\) must divide data.partitions \(4\) and train.global_batch_sequences \(8\)"
    ):
        make(sources, characters, world=3)
    half = make(sources, characters, 0, 2).state_dict()
    with pytest.raises(UserError, match=r"no state of the partitions \[1, 3\]"):
        make(sources, characters, 1, 2).load_state_dict(half)


@pytest.mark.parametrize("sources", [chat], indirect=True)
def test_a_source_of_which_nothing_is_left_is_an_error(sources: Any, characters: Tokenizer) -> None:
    loader = make(sources, characters, seq_len=8, too_long="drop")
    with pytest.raises(UserError, match=r"no row of .*a\.jsonl left a sample"):
        next(loader)
    loader.close()


@pytest.mark.parametrize("exhausted", ["repeat", "drop", "stop"])
def test_an_epoch_is_every_row_once_and_then_nothing(sources: Any, characters: Tokenizer, exhausted: str) -> None:
    finite = {name: replace(spec, epochs=1) for name, spec in sources.items()}
    ranks = [make(finite, characters, rank, 2, encode=once, exhausted=exhausted) for rank in range(2)]
    parts = [rows_taken(loader._factory, loader.served, None) for loader in ranks]  # type: ignore[arg-type]
    steps = -(-max(ends for ends, *_ in parts) // SEQUENCES)
    close(ranks)
    seen: Counter[str] = Counter()
    weights = []
    loader = make(finite, characters, encode=once, exhausted=exhausted)
    said = plan_of(loader)
    assert (said.steps, said.exact) == ((steps, steps), True)
    for _ in range(steps + 2):
        batches = next(loader)
        weights.append(sum(float(b.loss_weights.sum()) for b in batches))
        seen.update(documents(batches, characters))
    loader.close()
    assert all(weights[:steps])
    assert weights[steps:] == [0, 0]
    counted = Counter(key[0] for key in seen.elements())
    assert said.passes == {name: (pytest.approx(counted[name] / n),) * 2 for name, n in (("a", 61), ("b", 29))}
    a, b = ([n for key, n in seen.items() if key[0] == name] for name in "ab")
    if exhausted == "drop":
        assert set(seen.values()) == {1}
        assert len(seen) == 61 + 29
    if exhausted == "repeat":
        assert len(a) == 61
        assert len(b) == 29
        assert set(a) == {1}  # twice the share, and twice the rows: both end about together
    if exhausted == "stop":
        assert set(a + b) == {1}
        assert 61 + 29 - 3 * PARTITIONS <= len(seen) < 61 + 29


def trained(
    sources: dict[str, SourceSpec], characters: Tokenizer, partitions: int, shuffle: int = 8, **options: Any
) -> Counter[str]:
    """Of one epoch, the documents."""
    finite = {name: replace(spec, epochs=1) for name, spec in sources.items()}

    loader = make(finite, characters, encode=once, partitions=partitions, shuffle=shuffle, **options)
    seen: Counter[str] = Counter()
    for _ in range(plan_of(loader).steps[1]):
        seen.update(documents(next(loader), characters))
    assert not list(documents(next(loader), characters))
    loader.close()
    return seen


def write(path: Path, name: str, rows: int, bad: range = range(0)) -> SourceSpec:
    lines = (json.dumps({"messages": 1} if i in bad else chat(name, i)) + "\n" for i in range(rows))
    (path / f"{name}.jsonl").write_text("".join(lines))
    return SourceSpec(str(path / f"{name}.jsonl"))


@pytest.mark.parametrize(("rows", "partitions"), [(1, 8), (7, 8), (100, 512), (100, 3)])
@pytest.mark.parametrize("shuffle", [0, 8])
def test_an_epoch_is_every_row_once_whatever_the_partitions(
    characters: Tokenizer, tmp_path: Path, rows: int, partitions: int, shuffle: int
) -> None:
    """Also where most partitions have no row: they end at once, and do not take the next epoch's."""
    seen = trained({"a": write(tmp_path, "a", rows)}, characters, partitions, shuffle=shuffle)
    assert seen == Counter(f"a{i}" for i in range(rows))


def test_without_weights_every_row_comes_once_and_sources_are_interleaved(
    characters: Tokenizer, tmp_path: Path
) -> None:
    sources = {"a": write(tmp_path, "a", 10), "b": write(tmp_path, "b", 500)}
    assert trained(sources, characters, 2) == Counter([f"a{i}" for i in range(10)] + [f"b{i}" for i in range(500)])
    finite = {name: replace(spec, epochs=1) for name, spec in sources.items()}

    made = make(finite, characters, encode=once, partitions=1, shuffle=2)
    partition = made._factory(0)
    order = [sample.source for sequence in partition for unit in sequence for sample in unit]
    at = [i for i, name in enumerate(order) if name == "a"]
    assert len(order) == 510
    assert max(b - a for a, b in itertools.pairwise([0, *at, 509])) < 80  # 51 apart, but for what the packer moves
    weighted = {"a": replace(sources["a"], sampling_weight=1.0), "b": sources["b"]}
    assert trained(weighted, characters, 2)["a3"] > 40  # shares, as soon as there is a weight: 1 and 1


def test_a_partition_of_which_nothing_is_left_does_not_end_the_run(characters: Tokenizer, tmp_path: Path) -> None:
    """Of 8 rows in the order of the file, a partition has the same ones in every epoch; those of two partitions are
    bad."""
    options: dict[str, Any] = {"quarantine": str(tmp_path / "q"), "max_bad_rows_share": 1.0}
    bad = {"a": write(tmp_path, "a", 8, range(2, 4))}
    assert trained(bad, characters, 8, **options) == Counter(f"a{i}" for i in (0, 1, 4, 5, 6, 7))
    endless = make(bad, characters, encode=once, partitions=4, shuffle=0, **options)
    assert all(sum(float(b.loss_weights.sum()) for b in next(endless)) for _ in range(5))
    endless.close()
    nothing = make({"b": write(tmp_path, "b", 8, range(8))}, characters, encode=once, partitions=4, **options)
    with pytest.raises(UserError, match=r"no row of .*b\.jsonl left a sample"):
        next(nothing)
    nothing.close()


def test_a_checkpoint_of_another_order_is_refused(sources: Any, characters: Tokenizer) -> None:
    loader = make(sources, characters)
    state = loader.state_dict()
    for partition in state["partitions"].values():
        assert partition.pop("order")
    with pytest.raises(
        UserError, match="read the data in another order: continue it with that version, or start a new run"
    ):
        loader.load_state_dict(state)
    loader.close()


def test_a_state_holds_places(sources: Any, characters: Tokenizer) -> None:
    """Of the samples that wait to be packed, however long they are; what stands there must be what stood there. What a
    group of rows holds is no part of it."""
    loader = make(sources, characters, shuffle=50)
    run([loader], 3)
    state = loader.state_dict()
    loader.close()
    for partition in state["partitions"].values():
        assert 0 < len(partition["pending"]) <= 6
        assert {tuple(map(type, place)) for place in partition["pending"]} == {(str, *[int] * 7, float)}
        assert all(len(stream["pending"]) <= 3 for stream in partition["mixer"]["streams"].values())
    assert json.loads(json.dumps(state))
    other = make(
        sources,
        characters,
        shuffle=50,
        encode=lambda row, name, tokenizer: encode_document({"text": "another"}, tokenizer, name),
    )
    with pytest.raises(UserError, match=r"a\.jsonl:\d+ is not what it was when the checkpoint was written"):
        other.load_state_dict(state)
    other.close()


def test_partitions_have_one_pass_to_count_and_the_next_to_train(
    sources: Any, characters: Tokenizer, whole: Any
) -> None:
    """Counting the steps does not move the loader."""
    finite = {name: replace(spec, epochs=3) for name, spec in sources.items()}
    loader = make(finite, characters)
    plan_of(loader)
    assert run([loader], 2) == whole[:2]
    loader.close()


@pytest.mark.long
def test_elastic_resume_loses_and_repeats_nothing_of_40000(tmp_path: Path) -> None:
    """The same over 1,000,000 is `make ledger`."""
    counts = ledger(40_000, tmp_path)
    assert counts.min() == counts.max() == 1
    with pytest.MonkeyPatch.context() as patch:  # a loader whose state is of what was packed, not of what was consumed
        patch.setattr(
            Loader,
            "state_dict",
            lambda self: {
                "step": self.step,
                "partitions": {str(n): partition.state_dict() for n, partition in self._served.items()},
            },
        )
        counts = ledger(4_000, tmp_path)
    assert counts.min() == 0


class Added(int):
    """A number that counts how often it is added to another, or subtracted."""

    operations = 0

    def __radd__(self, other: int) -> int:
        Added.operations += 1
        return other + int(self)

    def __rsub__(self, other: int) -> int:
        Added.operations += 1
        return other - int(self)


class Telling:
    """A partition that changes its counts in place."""

    def __init__(self) -> None:
        self.own: dict[str, int] = {"rows": Added(0), "samples": Added(0)}

    def __next__(self) -> list[Any]:
        self.own.update(rows=Added(int(self.own["rows"]) + 2), samples=Added(int(self.own["samples"]) + 1))
        return [None]

    def state_dict(self) -> dict[str, int]:
        return dict(self.own)

    def counts(self) -> dict[str, int]:
        return self.own


def test_a_step_adds_up_the_counts_of_those_partitions_alone_that_it_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four sequences a step, whose counts cost the same of 64 partitions and of 1,024."""
    for partitions in (64, 1024):
        made: Any = {partition: Telling() for partition in range(partitions)}.__getitem__
        loader = Loader(made, partitions=partitions, sequences=4, micro_batch_sequences=4, seq_len=8)
        monkeypatch.setattr(Added, "operations", 0)
        for step in range(40):
            read = [(step * 4 + j) % partitions for j in range(4)]
            loader._read(read)
            states, counts = loader._snapshot(read)
            assert counts == {"rows": 8 * (step + 1), "samples": 4 * (step + 1)}
            assert counts["rows"] == sum(int(state["rows"]) for state in states.values())
        assert 0 < Added.operations <= 40 * 4 * 2 * 2, "each of two counts is added, and the one before subtracted"
