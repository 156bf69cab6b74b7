"""Environments of gymnasium, played in words through worker processes."""

import json
import random
from itertools import pairwise

import pytest

from ptf.errors import UserError
from ptf.rl.environments.seeds import prepare, seed_of_row
from tests.rl.players import environments, last, play

gymnasium = pytest.importorskip("gymnasium", reason="needs pip install 'ptf[gymnasium]'")

from ptf.rl.environments.gymnasium import Gymnasium  # noqa: E402

USE = "ptf.rl.environments.gymnasium:Gymnasium"
LAKE = {"id": "FrozenLake-v1", "make": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]}


def walks(*moves):
    """A policy that makes these moves, whatever it sees."""
    return lambda messages: moves[sum(message["role"] == "assistant" for message in messages) % len(moves)]


def test_the_way_to_the_goal_is_rewarded_and_others_are_not() -> None:
    with environments(USE, LAKE) as made:
        (right,) = play(made, walks("down", "I go Down.", "2", "right?", "left, no: down", "RIGHT"), [{}])
        (wrong,) = play(made, walks("right", "down"), [{}])
    assert (right.reward, len(right.results), right.results[-1].done) == (1.0, 6, True)
    assert (wrong.reward, len(wrong.results), wrong.results[-1].done) == (0.0, 2, True)  # a hole
    assert right.messages[0]["content"] == "<red>S</red>FFF\nFHFH\nFFFH\nHFFG"
    assert right.messages[2]["content"] == "  (Down)\nSFFF\n<red>F</red>HFH\nFFFH\nHFFG"


def test_an_unreadable_action_is_a_turn_with_a_penalty_and_not_a_move() -> None:
    with environments(USE, {**LAKE, "penalty": 0.25, "instruction": "Walk to G."}) as made:
        (played,) = play(made, walks("", "downstairs", "7", "down"), [{}])
    assert [result.reward for result in played.results[:4]] == [-0.25, -0.25, -0.25, 0.0]
    assert played.messages[0]["content"].startswith("Walk to G.\n<red>S</red>")
    assert played.messages[2]["content"] == "Your answer has no action. Answer with one of left, down, right, up."
    assert "(Down)" in played.messages[8]["content"]


def test_the_seed_of_the_row_decides_the_game() -> None:
    rows = [{"seed": seed % 8} for seed in range(16)]
    with environments(USE, {"id": "FrozenLake-v1"}) as made:  # slippery: moves are random
        first = play(made, walks("1", "2"), rows, seed=1)
        again = play(made, walks("1", "2"), rows, seed=2)
    assert first == again
    assert first[:8] == first[8:]
    assert any(a != b for a, b in pairwise(first))  # negative control
    assert seed_of_row({}, 3) == 3
    for wrong in (-1, True, "1", 1.0):
        with pytest.raises(UserError, match="`seed`"):
            seed_of_row({"seed": wrong}, 3)


def test_a_good_strategy_earns_more_than_random_play() -> None:
    """Blackjack has no rendering as text, so the observation is JSON: own sum, dealer's card, usable ace."""

    def strategy(messages):
        own, dealer, ace = json.loads(last(messages))
        return "stick" if own >= (18 if ace else 17 if dealer > 6 or dealer == 1 else 13) else "hit"

    rng = random.Random(0)
    rows = [{"seed": seed} for seed in range(200)]
    with environments(USE, {"id": "Blackjack-v1", "actions": ["stick", "hit"]}) as made:
        skilled = play(made, strategy, rows)
        careless = play(made, lambda messages: rng.choice(["stick", "hit"]), rows)
    assert sum(played.reward for played in skilled) > sum(played.reward for played in careless) + 30


def test_a_text_space_takes_the_text_as_it_is() -> None:
    class Guess(gymnasium.Env):
        action_space, observation_space = gymnasium.spaces.Text(3), gymnasium.spaces.Text(9, charset="a word?")

        def reset(self, *, seed=None, options=None):
            return "a word?", {}

        def step(self, action):
            return "a", float(action == "cat"), True, False, {}

    if "ptf/Guess-v0" not in gymnasium.registry:
        gymnasium.register("ptf/Guess-v0", entry_point=Guess)
    game = Gymnasium({}, 0, id="ptf/Guess-v0")
    assert game.reset()[0]["content"] == "a word?"
    assert game.step("a dog").reward == -0.1
    assert game.step(" cat\n").reward == 1.0


def test_what_cannot_be_played_in_words_is_refused() -> None:
    with pytest.raises(UserError, match="only Discrete and Text"):
        Gymnasium({}, 0, id="MountainCarContinuous-v0")
    with pytest.raises(UserError, match="4 actions, and `actions` names 2"):
        Gymnasium({}, 0, id="FrozenLake-v1", actions=["a", "b"])
    with pytest.raises(gymnasium.error.NameNotFound):
        Gymnasium({}, 0, id="FrozenLakes-v1")


def test_every_row_has_a_seed_of_its_own(tmp_path) -> None:
    prepare(str(tmp_path), train=5, test=3, first=10)
    rows = {name: [json.loads(x) for x in (tmp_path / f"{name}.jsonl").open()] for name in ("train", "test")}
    assert [row["seed"] for row in rows["train"]] == [10, 11, 12, 13, 14]
    assert [row["seed"] for row in rows["test"]] == [15, 16, 17]
    with pytest.raises(UserError, match="at least 1"):
        prepare(str(tmp_path), train=0)
