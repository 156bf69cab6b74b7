"""The game of self-play: who wins, which move is trained, when it is counted as the best, and which games there are."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ptf.tasks.nim import play, prepare
from tests.tiny import read_jsonl


class Player:
    """A policy that answers from a list, and returns what the play says of the episode."""

    seed = 5

    def __init__(self, moves: str) -> None:
        self.moves, self.asked = iter(moves), list[str]()

    async def generate(self, messages: Any) -> Any:
        self.asked.append(messages[-1]["content"])
        return SimpleNamespace(text=next(self.moves), of=self.asked[-1])

    def trajectory(self, outcome: float, *, calls: Any, counts: Any) -> Any:
        return outcome, [call.of for call in calls], counts


def played(pile: int, moves: str, **args: Any) -> Any:
    player = Player(moves)
    outcome, trained, counts = asyncio.run(play(SimpleNamespace(row={"pile": pile}), player, **args))  # pyright: ignore
    assert trained == [str(pile)]  # the first move alone
    return outcome, player.asked, counts


@pytest.mark.parametrize(
    ("pile", "moves", "reward", "asked"),
    [
        (5, "131", 1.0, ["5", "4", "1"]),  # one, three, and the last one
        (5, "1211", 0.0, ["5", "4", "2", "1"]),
        (4, "3x", 1.0, ["4", "1"]),  # no number
        (4, "32", 1.0, ["4", "1"]),  # more than there are
        (2, "3", 0.0, ["2"]),
        (5, "0", 0.0, ["5"]),
        (5, "4", 0.0, ["5"]),
        (3, "3", 1.0, ["3"]),
    ],
)
def test_who_takes_the_last_stone_wins(pile, moves, reward, asked):
    assert played(pile, moves)[:2] == (reward, asked)


def test_the_best_move_leaves_a_multiple_of_four():
    assert played(5, "1211")[2] == {"best_moves": 1.0}  # also in a game that is lost
    assert played(5, "2x")[2] == {"best_moves": 0.0}  # also in a game that is won
    assert played(5, "0")[2] == {"best_moves": 0.0}
    assert played(6, "222")[2] == {"best_moves": 1.0}
    assert played(4, "13")[2] == {}  # against best play nothing wins


def test_the_winner_of_the_control_depends_on_the_seed_alone():
    assert {played(5, moves, shuffled=True)[0] for moves in ("131", "0", "4")} in ({0.0}, {1.0})


def test_games_begin_with_each_pile_once(tmp_path):
    prepare(str(tmp_path))
    rows = read_jsonl(tmp_path / "games.jsonl")
    assert [row["pile"] for row in rows] == list(range(1, 13))
    assert all(row["messages"] == [{"role": "user", "content": str(row["pile"])}] for row in rows)
    assert (tmp_path / "model" / "config.json").exists()
