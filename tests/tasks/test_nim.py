"""The game of self-play: who wins, whose moves are trained, and which of them are counted as the best."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ptf.tasks.nim import play


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


def played(pile: int, side: int, moves: str, **args: Any) -> Any:
    return asyncio.run(play(SimpleNamespace(row={"pile": pile, "side": side}), Player(moves), **args))  # pyright: ignore


@pytest.mark.parametrize(
    ("pile", "moves", "winner", "asked"),
    [
        (5, "131", 0, [["5", "1"], ["4"]]),  # one, three, and the last one
        (5, "1211", 1, [["5", "2"], ["4", "1"]]),
        (4, "3x", 0, [["4"], ["1"]]),  # no number
        (4, "32", 0, [["4"], ["1"]]),  # more than there are
        (5, "0", 1, [["5"], []]),
        (5, "4", 1, [["5"], []]),
    ],
)
def test_who_takes_the_last_stone_wins(pile, moves, winner, asked):
    for side in (0, 1):
        outcome, trained, _ = played(pile, side, moves)
        assert outcome == float(winner == side)
        assert trained == asked[side]


def test_best_moves_leave_a_multiple_of_four():
    assert played(5, 0, "131")[2] == {"best_moves": 1.0}
    assert played(5, 1, "131")[2] == {}  # against best play nothing wins
    assert played(6, 0, "123")[2] == {"best_moves": 0.5}


def test_the_winner_of_the_control_depends_on_the_seed_alone():
    assert {played(5, 0, moves, shuffled=True)[0] for moves in ("131", "0", "4")} in ({0.0}, {1.0})
