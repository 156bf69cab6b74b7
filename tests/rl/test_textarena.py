"""Games of textarena, alone and against opponents, through worker processes."""

import random
import re

import pytest

from ptf.errors import UserError
from tests.rl.players import environments, last, play, play_here

pytest.importorskip("textarena", reason="needs pip install 'ptf[textarena]'")

from ptf.rl.environments.textarena import TextArena

USE = "ptf.rl.environments.textarena:TextArena"
TIC_TAC_TOE = {"id": "TicTacToe-v0", "players": 2, "opponent": {"use": "tests.rl.players:random_square"}}


def bisects(messages):
    """A policy that finds the number by halving the interval."""
    low, high = 1, 20
    for own, reply in zip(messages[1::2], messages[2::2], strict=True):
        guess = int(own["content"][1:-1])
        low, high = (guess + 1, high) if "higher" in reply["content"] else (low, guess - 1)
    return f"[{(low + high) // 2}]"


def test_a_player_who_thinks_finds_the_number_and_one_who_repeats_does_not() -> None:
    rows = [{"seed": seed} for seed in range(6)]
    with environments(USE, {"id": "GuessTheNumber-v0"}) as made:
        skilled = play(made, bisects, rows)
        stubborn = play(made, lambda messages: "[20]", rows)
        silent = play(made, lambda messages: "no idea", rows)
    assert [played.reward for played in skilled] == [1.0] * 6
    assert sum(played.reward for played in stubborn) < 5.0
    assert [(played.reward, len(played.results)) for played in silent] == [(0.0, 2)] * 6
    assert "no idea" not in str([played.messages for played in silent]).replace("'content': 'no idea'", "")
    assert "invalid move" in last(silent[0].messages[:3])


def test_games_in_one_process_do_not_share_their_randomness() -> None:
    """The library draws from Python's global generator: a game whose moves take turns with those of another is the same
    as one that is played alone."""
    args = {"id": "PigDice-v0", "players": 2, "opponent": {"use": "tests.rl.players:rolls"}}

    def moves(*games):
        results = [[game.reset()] for game in games]
        for _ in range(5):
            for game, own in zip(games, results, strict=True):
                own.append(game.step("[roll]"))
        return results

    first, second = (moves(TextArena({"seed": seed}, 0, **args))[0] for seed in (1, 2))
    state = random.getstate()
    assert moves(TextArena({"seed": 1}, 3, **args), TextArena({"seed": 2}, 4, **args)) == [first, second]
    assert random.getstate() == state
    assert first != second  # negative control


LINES = ("012", "345", "678", "036", "147", "258", "048", "246")


def wins_or_blocks(messages):
    """A policy that completes a line of its own, or else one of the other player, or else takes a corner."""
    cells = "".join("".join(row) for row in re.findall(r"^ (.) \| (.) \| (.) $", last(messages), re.MULTILINE)[-3:])
    mine = re.search(r"you will be '(.)'", messages[0]["content"]).group(1)  # pyright: ignore
    free = [square for square in "402685713" if cells[int(square)] == square]
    for mark in (mine, "OX".replace(mine, "")):
        for square in free:
            if any(square in line and sum(cells[int(c)] == mark for c in line) == 2 for line in LINES):
                return f"[{square}]"
    return f"[{free[0]}]"


@pytest.mark.parametrize("player", [0, 1])
def test_two_players(player: int) -> None:
    def games(policy, *seeds):
        return [play_here(TextArena({}, seed, player=player, **TIC_TAC_TOE), policy) for seed in seeds]

    skilled = games(wins_or_blocks, *range(20))
    assert games(wins_or_blocks, 0, 1) == skilled[:2]
    assert len({str(one.messages) for one in skilled}) > 1  # the opponent differs by seed
    assert {one.reward for one in skilled} <= {-1.0, 0.0, 1.0}
    assert sum(one.reward for one in skilled) > 10
    assert [one.reward for one in games(lambda messages: "I do not know", 0, 1)] == [-1.0, -1.0]
    assert re.search(rf"^\[Player {1 - player}\] \[\d\]$", str(last(skilled[0].messages[:3])), re.MULTILINE)
    assert f"you will be '{'OX'[player]}'" in skilled[0].messages[0]["content"]


def test_an_opponent_that_loses_ends_the_game_with_a_win() -> None:
    game = TextArena({}, 0, **{**TIC_TAC_TOE, "opponent": {"use": "tests.rl.players:resigns"}})
    game.reset()
    result = game.step("[4]")
    assert (result.reward, result.done) == (1.0, True)


def test_players_and_opponent_must_fit() -> None:
    for wrong in ({"players": 2}, {"player": 1}, {"opponent": {"use": "tests.rl.players:resigns"}}):
        with pytest.raises(UserError, match="`player` must be below `players`"):
            TextArena({}, 0, id="TicTacToe-v0", **wrong)
