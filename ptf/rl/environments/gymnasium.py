"""Environments of gymnasium that an agent plays in words: observations are written as text, and actions are read from
the agent's text.

`environment: {use: ptf.rl.environments.gymnasium:Gymnasium, args: {id: FrozenLake-v1}}`, with rows of
`ptf.rl.environments.seeds:prepare`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ptf.errors import UserError, raise_if_missing
from ptf.rl.environments.protocol import Message, StepResult
from ptf.rl.environments.seeds import seed_of_row

raise_if_missing("gymnasium", "gymnasium")

COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")  # of terminals: 30 to 37, 40 to 47
COLOURED = re.compile(r"\x1b\[[34]([0-7])(?:;\d+)*m(.*?)\x1b\[0m", re.DOTALL)


class Gymnasium:
    """One game of an environment with a Discrete or Text action space.

    `make` holds arguments of `gymnasium.make`. Environments that render as text (`render_mode: ansi`) do so; of others,
    the observation is written as JSON. `actions` names the actions in their order; they always have their numbers.
    `instruction` begins the first message. The last name or number of an action in the agent's text is its action. A
    text without one is a turn with the reward -`penalty`, in which the game does not move.
    """

    def __init__(
        self,
        row: Mapping[str, Any],
        seed: int,
        *,
        id: str,
        make: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        instruction: str = "",
        penalty: float = 0.1,
    ) -> None:
        import gymnasium
        from gymnasium.envs.registration import load_env_creator, spec

        entry = spec(id).entry_point
        creator = load_env_creator(entry) if isinstance(entry, str) else entry
        is_text = "ansi" in getattr(creator, "metadata", {}).get("render_modes", ())
        self.game = gymnasium.make(id, **{**({"render_mode": "ansi"} if is_text else {}), **(make or {})})
        self.seed, self.instruction, self.penalty = seed_of_row(row, seed), instruction, penalty
        self.space = self.game.action_space
        self.choices: dict[str, int] = {}  # name or number of an action → the action
        if isinstance(self.space, gymnasium.spaces.Discrete):
            numbers = range(int(self.space.start), int(self.space.start + self.space.n))
            if len(actions) not in (0, len(numbers)):
                raise UserError(f"{id} has {len(numbers)} actions, and `actions` names {len(actions)}")
            self.choices = {str(number): number for number in numbers}
            self.choices |= {name.casefold(): n for name, n in zip(actions, numbers, strict=False)}
            self.wanted = f"one of {', '.join(actions or self.choices)}"
        elif isinstance(self.space, gymnasium.spaces.Text):
            self.wanted = f"a text of the form {self.space}"
        else:
            raise UserError(f"{id} has the action space {self.space}; only Discrete and Text can be read from a text")

    def reset(self) -> Sequence[Message]:
        """Return the first observation, after the instruction."""
        observation, _ = self.game.reset(seed=self.seed)
        return [{"role": "user", "content": "\n".join(filter(None, (self.instruction, self.written(observation))))}]

    def step(self, text: str) -> StepResult:
        """Play the action that the text names; return the next observation and the reward of the game."""
        if (action := self.action(text)) is None:
            message = {"role": "user", "content": f"Your answer has no action. Answer with {self.wanted}."}
            return StepResult([message], reward=-self.penalty)
        observation, reward, terminated, truncated, _ = self.game.step(action)
        message = {"role": "user", "content": self.written(observation)}
        return StepResult([message], reward=float(reward), done=bool(terminated or truncated))

    def close(self) -> None:
        """Free what the game holds."""
        self.game.close()

    def action(self, text: str) -> int | str | None:
        """Return the action of the game that a text names last, or None."""
        if not self.choices:
            return text.strip() if self.space.contains(text.strip()) else None
        names = "|".join(re.escape(name) for name in sorted(self.choices, key=len, reverse=True))
        found = re.findall(rf"(?<![\w.-])(?:{names})(?!\w|[.-]\d)", text.casefold())
        return self.choices[found[-1]] if found else None

    def written(self, observation: Any) -> str:
        """Return an observation as text; coloured parts of a rendering become `<red>…</red>`."""
        if self.game.render_mode != "ansi":
            return (
                observation if isinstance(observation, str) else json.dumps(observation, default=lambda x: x.tolist())
            )
        text = str(self.game.render()).strip("\n")
        return COLOURED.sub(lambda part: "<{0}>{1}</{0}>".format(COLOURS[int(part[1])], part[2]), text)
