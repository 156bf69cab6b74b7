"""Games of textarena, alone or against scripted opponents.

`environment: {use: ptf.rl.environments.textarena:TextArena, args: {id: GuessTheNumber-v0}}`, with rows of
`ptf.rl.environments.seeds:prepare`.
"""

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ptf.config import Plugin, plugin
from ptf.errors import UserError, raise_if_missing
from ptf.rl.environments.protocol import Message, StepResult
from ptf.rl.environments.seeds import seed_of_row

raise_if_missing("textarena", "textarena")


def replace_states(states: tuple[Any, Any]) -> tuple[Any, Any]:
    """Set the states of Python's and numpy's global generators; return those that they had."""
    before = random.getstate(), np.random.get_state()
    random.setstate(states[0])
    np.random.set_state(states[1])
    return before


class TextArena:
    """One game, in which the agent is number `player` of `players`.

    `make` holds arguments of `textarena.make`. `opponent`, `{use: …, args: {…}}`, plays for all others: it is called as
    `opponent(messages, rng, **args)` with the texts that its player has received and a `random.Random`, and returns the
    text of its move. The reward is the game's own, at its end.
    """

    max_concurrent_calls = 1  # the global generators belong to one game at a time

    def __init__(
        self,
        row: Mapping[str, Any],
        seed: int,
        *,
        id: str,
        make: Mapping[str, Any] | None = None,
        players: int = 1,
        player: int = 0,
        opponent: Mapping[str, Any] | None = None,
    ) -> None:
        if not 0 <= player < players or (players > 1) != (opponent is not None):
            raise UserError(
                "`player` must be below `players`; an `opponent` is needed if there are others, and only then"
            )
        self.id, self.make, self.players, self.player = id, dict(make or {}), players, player
        self.opponent = plugin.bind(Plugin(**opponent)) if opponent else None
        self.seed = seed_of_row(row, seed)
        self.rng = random.Random(f"opponent/{self.seed}")  # of the opponents
        # of the global generators, from which the library draws: each game has its own
        self.states: tuple[Any, Any] = (
            random.Random(self.seed).getstate(),
            np.random.RandomState(self.seed % 2**32).get_state(),
        )
        self.received: list[list[str]] = [
            [] for _ in range(players)
        ]  # by each player; what the agent has read is removed

    @contextlib.contextmanager
    def own_randomness(self) -> Iterator[None]:
        """Let the block draw from the game's states, where the last such block ended; then restore the others.

        No other thread may use the global generators meanwhile.
        """
        others = replace_states(self.states)
        try:
            yield
        finally:
            self.states = replace_states(others)

    def reset(self) -> Sequence[Message]:
        """Return the game's first messages; opponents who move first have moved."""
        import textarena

        with self.own_randomness():
            self.game = self.core = textarena.make(self.id, **self.make)
            while isinstance(self.core, textarena.Wrapper):  # wrappers of observations repeat the whole conversation
                self.core = self.core.env
            self.game.reset(num_players=self.players, seed=self.seed)
            if self.others_move():
                raise RuntimeError(f"the game {self.id} ended before the agent's first move")
            return self.new_messages()

    def step(self, text: str) -> StepResult:
        """Make the agent's move, and those of the opponents until the agent's next one."""
        with self.own_randomness():
            if self.game.step(action=text)[0] or self.others_move():
                return StepResult(reward=float(self.game.close()[0][self.player]), done=True)
            return StepResult(self.new_messages())

    def others_move(self) -> bool:
        """Let opponents move until it is the agent's turn; return whether the game has ended."""
        while (number := self.receive()) != self.player:
            assert self.opponent is not None
            if self.game.step(action=self.opponent(tuple(self.received[number]), self.rng))[0]:
                return True
        return False

    def receive(self) -> int:
        """Read the messages of the player whose turn it is, but for its own moves; return its number."""
        number, messages = self.core.get_observation()
        names = self.core.state.role_mapping  # of players; the game itself needs no name
        for sender, text, _ in messages:
            if sender != number:
                name = f"[{names.get(sender, f'Player {sender}')}] " if sender >= 0 else ""
                self.received[number].append(f"{name}{text}")
        return number

    def new_messages(self) -> Sequence[Message]:
        """Return what the agent has received since its last move."""
        texts, self.received[self.player] = self.received[self.player], []
        return [{"role": "user", "content": "\n".join(texts) or "It is your turn."}]
