"""Shares hold at every moment, and a mixture ends where its policy says."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptf.data.mixture import Mixer, Mixture
from ptf.data.sources.rows import SourceSpec
from ptf.errors import UserError


class Numbers:
    """Passes[(name, epoch, i)]: 0 … n - 1, again and again."""

    def __init__(self, name: str, n: int) -> None:
        self.name, self.n, self.at = name, n, -1

    def __next__(self) -> tuple[str, int, int]:
        self.at += 1
        return self.name, self.at // self.n, self.at % self.n

    def passes(self) -> int:
        return (self.at + 1) // self.n

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


def mixer(sizes: dict[str, int], weights: dict[str, float] | None = None, **options: Any) -> Mixer:
    streams = {name: Numbers(name, n) for name, n in sizes.items()}
    return Mixer(streams, weights or dict.fromkeys(sizes, 1.0), **options)


def take(mixed: Mixer, n: int) -> list[Any]:
    return [next(mixed) for _ in range(n)]


def drained(mixed: Mixer) -> list[Any]:
    found = []
    for _ in range(100_000):
        try:
            found.append(next(mixed))
        except StopIteration:
            return found
    raise AssertionError("it does not end")


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5), st.integers(1, 300))
def test_shares_hold_at_every_moment(weights: list[float], n: int) -> None:
    named = {str(i): weight for i, weight in enumerate(weights)}
    counts = Counter(name for name, *_ in take(mixer(dict.fromkeys(named, 7), named), n))
    for name, weight in named.items():
        assert abs(counts[name] - n * weight / sum(weights)) < len(weights)


def test_shares_of_10000_samples_are_within_one_percent_by_samples_and_by_tokens() -> None:
    weights = {"short": 0.2, "long": 0.5, "rare": 0.003}
    size = {"short": lambda i: 1 + i % 5, "long": lambda i: 500 + i % 1500, "rare": lambda i: 90}
    for by in ("samples", "tokens"):
        mixed = mixer(
            dict.fromkeys(weights, 1000), weights, size=None if by == "samples" else lambda item: size[item[0]](item[2])
        )
        got: Counter[str] = Counter()
        for name, _, i in take(mixed, 10_000):
            got[name] += 1 if by == "samples" else size[name](i)
        assert got == mixed.taken
        for name, weight in weights.items():
            assert abs(got[name] / got.total() - weight / sum(weights.values())) < 1e-3


def test_temperature_brings_shares_nearer() -> None:
    sources = {"a": SourceSpec("a", 16.0), "b": SourceSpec("b")}
    assert Mixture(sources, 0, temperature=2.0).shares({"a": 1, "b": 1}) == {"a": 4.0, "b": 1.0}
    without = {"a": SourceSpec("a"), "b": SourceSpec("b")}
    assert Mixture(without, 0, temperature=2.0).shares({"a": 100, "b": 400}) == {"a": 10.0, "b": 20.0}


def test_rows_are_asked_for_where_they_matter_and_are_not_known() -> None:
    sources = {"a": SourceSpec("a.jsonl.gz"), "b": SourceSpec("b.jsonl")}
    with pytest.raises(
        UserError,
        match=r"data\.sources\.a do not tell how many rows they have.*give it `row_count`.*or.* `sampling_weight`",
    ):
        Mixture(sources, 0).shares({"a": None, "b": 10})
    assert Mixture({**sources, "a": SourceSpec("a.jsonl.gz", rows=30)}, 0).shares({"a": None, "b": 10}) == {
        "a": 30.0,
        "b": 10.0,
    }
    assert Mixture({**sources, "b": SourceSpec("b.jsonl", 2.0)}, 0).shares({"a": None, "b": 10}) == {"a": 1.0, "b": 2.0}
    assert Mixture({"a": sources["a"]}, 0).shares({"a": None}) == {"a": 1.0}
    with pytest.raises(UserError, match=r"sources\.b\.row_count is 11, but its files contain 10 rows; remove"):
        Mixture({"b": SourceSpec("b.jsonl", rows=11)}, 0).shares({"b": 10})


def test_every_policy_ends_where_it_says() -> None:
    sizes, epochs = {"a": 10, "b": 25}, {"a": 2, "b": 1}
    dropped = drained(mixer(sizes, exhausted="drop", epochs=epochs))
    assert Counter(dropped) == Counter(
        [("a", e, i) for e in (0, 1) for i in range(10)] + [("b", 0, i) for i in range(25)]
    )
    assert {name for name, *_ in dropped[-5:]} == {"b"}
    stopped = Counter(name for name, *_ in drained(mixer(sizes, exhausted="stop", epochs=epochs)))
    assert (stopped["a"], stopped["b"]) == (20, 19)
    repeated = drained(mixer(sizes, exhausted="repeat", epochs=epochs))
    assert Counter(item for item in repeated if item[0] == "b") == Counter(("b", 0, i) for i in range(25))
    assert Counter(name for name, *_ in repeated)["a"] == 25  # the share holds to the end
    assert len(take(mixer(sizes, exhausted="drop", epochs={"a": 1}), 500)) == 500  # b is endless


@given(
    steps=st.integers(0, 60),
    policy=st.sampled_from(["repeat", "drop", "stop"]),
    by=st.booleans(),
)
def test_a_mixture_resumes_and_ends_alike(steps: int, policy: str, by: bool) -> None:
    def make() -> Mixer:
        size = (lambda item: 1 + item[2]) if by else None
        return mixer(
            {"a": 11, "b": 17},
            {"a": 1.0, "b": 2.5},
            exhausted=policy,
            epochs={"a": 2, "b": 2},
            size=size,
        )

    whole, one, other = drained(make()), make(), make()
    steps = min(steps, len(whole))
    take(one, steps)
    other.load_state_dict(one.state_dict())
    assert drained(other) == whole[steps:]
    with pytest.raises(StopIteration):  # and stays ended
        next(other)
