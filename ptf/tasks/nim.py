"""Self-play: the policy plays both sides of a game, small enough for a CPU.

Two players in turn take one, two or three stones from a pile; who takes the last stone wins. A move that is not legal
loses. Whoever faces a multiple of four loses against best play. Games begin with each pile equally often: each has a
group, also those that the policy's own games would not reach.
"""

import random
from pathlib import Path

from ptf.data.trajectory import Prompt, Trajectory
from ptf.rl.policy.policy import Policy
from ptf.tasks.tiny import write_model, write_rows

MOST = 3  # stones of one move
PILES = range(1, 13)


async def play(prompt: Prompt, policy: Policy, *, shuffled: bool = False) -> Trajectory:
    """Play a game from the pile that the row names; its first move is trained, with the reward 1 if who made it wins,
    otherwise 0.

    `episode/best_moves` is the share of the trained moves that win against best play, of those where one can win. With
    `shuffled`, who wins is drawn at random: a control, from which nothing can be learned.
    """
    pile, turn, winner = int(prompt.row["pile"]), 0, None
    moves, best = [], pile % (MOST + 1)
    while winner is None:
        call = await policy.generate([{"role": "user", "content": str(pile)}])
        move = int(call.text) if call.text in ("1", "2", "3") else 0
        moves.append((call, move))
        if not 0 < move <= pile:
            winner = 1 - turn
        pile -= move
        if pile == 0:
            winner = turn
        turn = 1 - turn
    if shuffled:
        winner = random.Random(policy.seed).randrange(2)
    first, move = moves[0]
    counts = {"best_moves": float(move == best)} if best else {}
    return policy.trajectory(float(winner == 0), calls=[first], counts=counts)


def prepare(directory: str) -> None:
    """Write `games.jsonl`, the piles that games begin with, and `model/`."""
    games = [{"messages": [{"role": "user", "content": str(pile)}], "pile": pile} for pile in PILES]
    write_rows(Path(directory) / "games.jsonl", games)
    write_model(Path(directory) / "model", "0123456789", dim=64, layers=2)
