"""The weighted sum of several rewards, each of which scores one response at a time."""

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from ptf.config import Plugin, plugin
from ptf.config.reward_signature import RewardSignature, reward_fault
from ptf.errors import UserError
from ptf.rl.rewards.calls import EpisodeView, checked_reward
from ptf.rl.rewards.declarations import (
    first_lines,
    is_asynchronous,
    max_concurrent_calls,
    overlapping_call,
    reward_of,
)
from ptf.rl.worker_messages import Fault

Parts = Sequence[Mapping[str, Any]]  # each {use, args, weight}


def plugin_of(part: Mapping[str, Any]) -> Plugin:
    """Return the reward of a part as a plugin."""
    return Plugin(use=part["use"], args=part.get("args") or {})


class Part:
    """One reward of the sum, with its arguments bound."""

    def __init__(self, part: Mapping[str, Any]) -> None:
        what = plugin_of(part)
        self.use, self.weight = what.use, float(part.get("weight", 1.0))
        self.function = reward_of(what)
        self.sees_episode = RewardSignature.of(plugin.resolve(what.use), what.args).sees_episodes
        self.is_coroutine = is_asynchronous(self.function)
        self.max_concurrent_calls = max_concurrent_calls(self.function)

    def __call__(self, row: Mapping[str, Any], text: str, episode: EpisodeView | None) -> Any:
        """Call the reward with copies of its own; of a coroutine function the result is a coroutine."""
        row, episode = plugin.own_copy((row, episode))
        return self.function(row, text, **({"episode": episode} if self.sees_episode else {}))

    def weighed(self, value: Any) -> float:
        """Return the reward times the weight. Raises ValueError if it is no reward."""
        reward = checked_reward(value)
        if isinstance(reward, Fault):
            raise ValueError(f"{self.use}: {reward.reason}")
        return self.weight * reward


class WeightedSum:
    """Σ weight · reward over `parts`, each {use, args, weight}; the default weight is 1.

    If one part has no result, the sum has none. Parts that score groups or batches are refused.

    A call is a coroutine if a part is one, or if one part needs the main thread and another does not. Its other parts
    then run in threads, or in the main thread if their calls must not overlap.
    """

    def __init__(self, *, parts: Parts) -> None:
        self.parts = [Part(part) for part in parts]
        self.is_coroutine = any(part.is_coroutine for part in self.parts) or (
            len({part.max_concurrent_calls == 1 for part in self.parts}) > 1
        )
        overlapping = [part for part in self.parts if part.is_coroutine or part.max_concurrent_calls > 1]
        self.max_concurrent_calls = min((part.max_concurrent_calls for part in overlapping), default=1)

    def __call__(
        self, row: Mapping[str, Any], text: str, *, episode: EpisodeView | None = None
    ) -> float | Coroutine[Any, Any, float]:
        """Return the sum for one response."""
        if self.is_coroutine:
            return self._sum_concurrently(row, text, episode)
        return sum((part.weighed(part(row, text, episode)) for part in self.parts), 0.0)

    async def _sum_concurrently(self, row: Mapping[str, Any], text: str, episode: EpisodeView | None) -> float:
        return sum([part.weighed(await overlapping_call(part, row, text, episode)) for part in self.parts], 0.0)

    @staticmethod
    def sees_episodes(*, parts: Parts) -> bool:
        """Return whether a part asks for the episode."""
        return any(RewardSignature.of(plugin.resolve(p["use"]), p.get("args") or {}).sees_episodes for p in parts)

    @staticmethod
    def first_lines(*, parts: Parts) -> list[str]:
        """Return the first lines that a run prints about the parts."""
        return [line for part in parts for line in first_lines(plugin_of(part))]

    @staticmethod
    def check_arguments(*, parts: Parts) -> None:
        """Raise UserError unless each part is a reward of one response, with a weight."""
        if not isinstance(parts, Sequence) or isinstance(parts, str) or not parts:
            raise UserError("parts: it must be a list of rewards, each {use, args, weight}")
        for number, part in enumerate(parts):
            where = f"parts.{number}"
            if not isinstance(part, Mapping) or "use" not in part or not part.keys() <= {"use", "args", "weight"}:
                raise UserError(f"{where}: a part is {{use, args, weight}}, this one is {str(part)[:60]}")
            weight = part.get("weight", 1.0)
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                raise UserError(f"{where}.weight: it must be a number, not {str(weight)[:60]!r}")
            what = plugin_of(part)
            target = plugin.resolve(what.use)
            if fault := reward_fault(target, what.use, what.args):
                raise UserError(f"{where}: {fault}")
            if RewardSignature.of(target, what.args).scores != "response":
                raise UserError(
                    f"{where}.use: {what.use} scores several responses at once, and this sum scores one at a time; "
                    "call the parts in a reward of your own that is declared with `scores_groups` or `batched`"
                )
