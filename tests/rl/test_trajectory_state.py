"""Generations as values of a checkpoint: what is restored is what was stored, in bytes that grow with the tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ptf.data.trajectory import Generation
from ptf.rl.in_flight_group import generations_state, restored_generations

IDS = st.lists(st.integers(0, 3), max_size=6)


def generation(context: list[int], sampled: list[int]) -> Generation:
    n = len(sampled)
    logprobs, versions = np.linspace(-1, 0, n, dtype=np.float32), np.arange(n, dtype=np.int32)
    return Generation(np.array(context, np.int32), np.array(sampled, np.int32), logprobs, versions, bool(n % 2))


def fields(generations):
    return [
        (g.context.tolist(), g.sampled_ids.tolist(), g.logprobs.tolist(), g.versions.tolist(), g.finished)
        for g in generations
    ]


def conversation(turns: int) -> list[Generation]:
    """An episode in which each context is the one before it, its response, and ten ids of the environment."""
    found, context = list[Generation](), [1] * 100
    for turn in range(turns):
        sampled = [2, 3, 4, turn % 7] * 5
        found.append(generation(context, sampled))
        context = [*context, *sampled, *[5] * 10]
    return found


def stored_bytes(states) -> int:
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, np.ndarray))


@given(st.lists(st.tuples(IDS, IDS), max_size=5))
def test_restored_generations_are_those_that_were_stored(pairs):
    """Contexts that go on from the generation before, leave it anywhere, or have nothing of it."""
    given_ = [generation(context, sampled) for context, sampled in pairs]
    assert fields(restored_generations(generations_state(given_))) == fields(given_)


def test_bytes_are_at_most_twice_those_of_the_tokens():
    episode = conversation(50)
    tokens = len(episode[-1].context) + len(episode[-1].sampled_ids)
    each = 12  # of a sampled token: its id, log-prob and version
    assert stored_bytes(generations_state(episode)) <= 2 * each * tokens
    whole = sum(g.context.nbytes + g.sampled_ids.nbytes * 3 for g in episode)
    assert whole > 2 * each * tokens, "negative control: whole contexts take more"
    assert fields(restored_generations(generations_state(episode))) == fields(episode)
