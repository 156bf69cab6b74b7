"""Sequences that share beginnings: every sample is in one of them, whole or from where it parts, and none is too
long."""

import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.data.batch import Batch
from ptf.data.document import Document, PackUnit, length
from ptf.data.encode import encode_document
from ptf.data.packing import pack_all
from ptf.data.partitions import Partitions
from ptf.data.prefixes import pack_shared, prefix_groups, separate
from ptf.data.sources.rows import SourceSpec
from ptf.data.token_file import unit_columns
from ptf.data.training_length import planned
from ptf.errors import UserError
from tests.data.templates import templated
from tests.tiny import write_jsonl

SEQ_LEN = 40


def answered(prompt: list[int], answer: list[int], source: str = "a") -> Document:
    tokens, weights = np.array(prompt + answer, np.int32), np.array([0] * len(prompt) + [1] * len(answer), np.float32)
    return Document(tokens, weights, source, {"advantages": np.arange(len(tokens), dtype=np.float32) * (weights != 0)})


answers = st.builds(
    answered,
    st.sampled_from([[1], [1, 2], [1, 2, 3], [4, 5, 6, 7, 8, 9, 1, 2], list(range(20))]),
    st.lists(st.integers(0, 9), max_size=20),
)
pairs = st.tuples(*[st.builds(answered, st.just([1, 2, 3]), st.lists(st.integers(0, 9), min_size=1, max_size=9))] * 2)


def whole(sequence: list[PackUnit]) -> list[tuple]:
    """Its samples, each with what it goes on from."""
    out, last = [], sequence[0][0]
    for sample in (sample for unit in sequence for sample in unit):
        last = sample if sample.prefix_length == 0 else last
        tokens = np.concatenate([last.tokens[: sample.prefix_length], sample.tokens])
        token_columns = {
            name: np.concatenate([np.zeros(sample.prefix_length, v.dtype), v])
            for name, v in sample.token_columns.items()
        }
        weights = np.concatenate([np.zeros(sample.prefix_length, np.float32), sample.loss_weights])
        out.append((tuple(tokens), tuple(weights), sample.source, *(tuple(v) for v in token_columns.values())))
    return out


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(answers.map(lambda s: (s,)), pairs), max_size=40))
def test_every_sample_is_in_one_sequence_and_is_what_it_was(units: list[PackUnit]) -> None:
    sequences = pack_shared(units, SEQ_LEN)
    assert all(0 < sum(map(length, sequence)) <= SEQ_LEN for sequence in sequences)
    assert Counter(one for sequence in sequences for one in whole(sequence)) == Counter(
        one for unit in units for one in whole([unit])
    )
    assert {tuple(map(id, unit)) for unit in units if len(unit) > 1} <= {
        tuple(map(id, unit)) for sequence in sequences for unit in sequence
    }, "pairs stay together"
    assert sum(map(len, sequences)) == len(units), "who shares a beginning is still a unit of its own"
    for sequence in sequences:
        first = [
            unit[0] for unit in sequence if len(unit) == 1 and unit[0].prefix_length == 0 and unit[0].loss_weights.any()
        ]
        prompts = [tuple(sample.tokens[: np.flatnonzero(sample.loss_weights)[0]]) for sample in first]
        shared = [prompt for prompt in prompts if len(prompt) > 1]
        assert len(shared) == len(set(shared)), "a beginning of two tokens and more is in a sequence once"


def test_the_answers_to_a_prompt_read_it_once_but_for_its_last_token():
    units = [(answered(list(range(10)), [n] * 5),) for n in range(4)]
    (sequence,) = pack_shared(units, SEQ_LEN)
    first, *others = [sample for (sample,) in sequence]
    assert (len(first), first.prefix_length) == (15, 0)
    assert [(len(s), s.prefix_length, s.tokens[0]) for s in others] == [(6, 9, 9)] * 3
    batch = Batch.of([sequence], SEQ_LEN)
    assert batch.positions[0, :33].tolist() == [*range(15), *[9, 10, 11, 12, 13, 14] * 3]
    assert batch.targets[0, 15:20].tolist() == [others[0].tokens[-1]] * 5
    assert batch.loss_weights[0, 15:21].tolist() == [1, 1, 1, 1, 1, 0]


def test_sequences_are_filled_with_what_is_left_of_other_families():
    """12 answers of 8 to each of 3 prompts of 101: 36 sequences of 128 without sharing; with it three answers to a
    sequence, and what is left over together."""
    units = [(answered([p] * 101, [n % 10] * 8),) for p in range(3) for n in range(12)]
    assert len(pack_all(units, 128)) == 36
    assert [sum(map(length, sequence)) for sequence in pack_shared(units, 128)] == [100 + 3 * 9] * 12
    assert [sum(map(length, sequence)) for sequence in pack_shared(units, 512)] == [2 * (100 + 12 * 9), 100 + 12 * 9]


@settings(max_examples=50, deadline=None)
@given(st.lists(answers, min_size=1, max_size=30))
def test_sharing_never_takes_more_tokens(samples: list[Document]) -> None:
    units: list[PackUnit] = [(s,) for s in samples]

    def tokens(sequences):
        return sum(length(unit) for sequence in sequences for unit in sequence)

    assert tokens(pack_shared(units, SEQ_LEN)) <= tokens(pack_all(units, SEQ_LEN))


def test_a_sample_that_is_longer_than_a_sequence_is_refused():
    with pytest.raises(UserError, match="41 tokens does not fit a sequence of seq_len 40"):
        pack_shared([(answered([1] * 30, [2] * 11),)], SEQ_LEN)


def test_what_has_something_in_a_stream_is_not_shared():
    """A recipe of one's own may train on more than its weights say."""
    made = [answered([1, 2, 3, 4, 5], [n]) for n in range(3)]
    felt = np.array([0, 0, 0, 1, 0, 0], np.float32)
    (sequence,) = pack_shared(
        [(replace(s, token_columns={"felt": felt, "pairs": np.zeros((6, 2))}),) for s in made], SEQ_LEN
    )
    assert [s.prefix_length for (s,) in sequence] == [0, 2, 2]
    assert [s.token_columns["felt"].sum() for (s,) in sequence] == [1, 1, 1]


def test_what_is_written_down_is_whole():
    (sequence,) = pack_shared([(answered([1, 2, 3], [n]),) for n in range(3)], SEQ_LEN)
    with pytest.raises(AssertionError, match="are complete"):
        unit_columns(sequence)


@st.composite
def conversations(draw: st.DrawFn) -> list[Document]:
    """Samples of one conversation: each answers after a beginning of what was said,
    shown otherwise from some point on."""
    said = draw(st.lists(st.integers(0, 3), min_size=24, max_size=24))
    made = []
    for _ in range(draw(st.integers(1, 6))):
        context = said[: draw(st.integers(1, 24))]
        other = draw(st.none() | st.integers(0, len(context) - 1))
        if other is not None:
            context = [*context[:other], 7, *context[other + 1 :]]
        made.append(answered(context, draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))))
    return made


@settings(max_examples=200, deadline=None)
@given(conversations())
def test_samples_of_one_row_in_families_are_what_they_were(samples: list[Document]) -> None:
    units = prefix_groups(samples, SEQ_LEN)
    assert Counter(one for unit in units for one in whole([unit])) == Counter(
        one for s in samples for one in whole([(s,)])
    )
    assert sorted((tuple(s.tokens), tuple(s.loss_weights)) for unit in units for s in separate(unit)) == sorted(
        (tuple(s.tokens), tuple(s.loss_weights)) for s in samples
    )
    assert all(length(unit) <= SEQ_LEN for unit in units)
    assert sum(map(length, units)) <= sum(map(len, samples))
    for unit in units:
        assert [s.prefix_length == 0 for s in unit] == [True] + [False] * (len(unit) - 1), (
            "one is whole, and it comes first"
        )


def test_a_conversation_that_had_to_be_split_is_read_about_once() -> None:
    said = list(range(30))
    turns = [answered(said[:n], [90, 91]) for n in (5, 10, 20, 30)]
    (unit,) = prefix_groups(turns, 64)
    assert [(len(s), s.prefix_length) for s in unit] == [(32, 0), (3, 19), (3, 9), (3, 4)]
    assert [len(unit) for unit in prefix_groups(turns, 32)] == [1, 3], "no unit is longer than a sequence"


@pytest.fixture
def chats(tmp_path) -> str:
    def said(n, k):
        return [{"role": r, "content": f"{w} {n} {k} more"} for r, w in (("user", "question"), ("assistant", "answer"))]

    rows = [{"messages": [m for k in range(1 + n % 4) for m in said(n, k)]} for n in range(40)]
    return str(write_jsonl(tmp_path / "chats.jsonl", rows))


def partitions(path: str, share: bool, epochs: int | None = 1) -> Partitions:
    tokenizer = templated("drops_thinking")

    def encode(row, source):
        return encode_document(row, tokenizer, source)

    spec = SourceSpec(path, epochs=epochs)
    return Partitions(
        {"chats": spec},
        tokenizer,
        encode,
        partitions=2,
        seed=0,
        shuffle=8,
        seq_len=256,
        lookahead=4,
        share_prefixes=share,
    )


def test_a_run_that_shares_beginnings_trains_the_same_samples_in_fewer_tokens(chats: str) -> None:
    sequences = {
        share: [sequence for partition in range(2) for sequence in partitions(chats, share)(partition)]
        for share in (True, False)
    }
    shared, plain = (
        Counter(one for sequence in sequences[share] for one in whole(sequence)) for share in (True, False)
    )
    assert shared == plain
    assert plain.total() == 40 * 2.5, "every turn is a sample of its own"
    tokens = {share: sum(length(unit) for sequence in found for unit in sequence) for share, found in sequences.items()}
    assert tokens[True] < 0.7 * tokens[False]
    found = {share: planned(partitions(chats, share), 4, None) for share in (True, False)}
    assert {share: p.steps[0] for share, p in found.items()} == {
        share: -(-max(ends(partitions(chats, share), k) for k in range(2)) // 4) for share in found
    }


def ends(made: Partitions, partition: int) -> int:
    """The number after that of the last sequence of a partition."""
    return 2 * (sum(1 for _ in made(partition)) - 1) + partition + 1


def test_what_is_shared_resumes_and_travels(chats: str) -> None:
    stream, again = partitions(chats, True, None)(1), partitions(chats, True, None)(1)
    for _ in range(3):
        next(stream)
    again.load_state_dict(stream.state_dict())
    following = [next(stream) for _ in range(6)]
    assert any(sample.prefix_length for sequence in following for unit in sequence for sample in unit)
    assert [whole(sequence) for sequence in following] == [whole(next(again)) for _ in range(6)]
    assert list(map(whole, pickle.loads(pickle.dumps(following)))) == list(map(whole, following))
