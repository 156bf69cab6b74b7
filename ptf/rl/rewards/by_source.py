"""The rewards of a job: one of all sources, or one for each of several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ptf.data.trajectory import Group, NoResult, Reward, Trajectory
from ptf.rl.rewards.scoring import RewardWorkers, Scoring, responses_left_to


@dataclass(frozen=True)
class Rewards:
    """Rewards and the factors on them, by source; the one of all sources has the name ""."""

    by_source: Mapping[str, tuple[RewardWorkers, float]]

    @property
    def score_whole_groups(self) -> bool:
        """Return whether one of the rewards scores all responses to a prompt together."""
        return any(workers.signature.scores == "group" for workers, _ in self.by_source.values())

    def take_retries(self) -> int:
        """Return how many responses were scored once more since the last call."""
        return sum(workers.take_retries() for workers, _ in self.by_source.values())

    def close(self) -> None:
        """End the processes."""
        for workers, _ in self.by_source.values():
            workers.close()


class GroupScoring(Scoring):
    """Groups that are scored while others are still generated.

    `add` is called with each group as soon as it is there, from any thread; `finish` returns all of them with their
    outcomes: those that their rollout functions gave, otherwise those of their sources' rewards. Responses of a source
    without a reward stay as they are.
    """

    def __init__(self, rewards: Rewards | None) -> None:
        super().__init__()
        self.by_source = rewards.by_source if rewards else {}
        self.weights: dict[int, float] = {}  # number of a group → the factor on its rewards

    def add(self, number: int, group: Group) -> None:
        """Begin to score a group, which has this number among all groups.

        A replica that was replaced may have given it before.
        """
        reward = self.by_source.get(group[0].prompt.source, self.by_source.get(""))
        if reward is not None:
            workers, self.weights[number] = reward
            self.ask(number, workers, responses_left_to(workers, group))

    def finish(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with their outcomes."""
        for number, group in enumerate(groups):
            self.add(number, group)
        scored = list(groups)
        for number, outcomes in self.outcomes().items():
            weight, group = self.weights[number], groups[number]
            # of the responses that have no outcome from their rollout function
            rest = (Reward(weight * one.value) if isinstance(one, Reward) else one for one in outcomes)
            scored[number] = tuple(t if t.outcome is not None else replace(t, outcome=next(rest)) for t in group)
        return scored


def score_groups(rewards: Rewards | None, groups: Sequence[Group]) -> list[Group]:
    """Return the groups with their outcomes; without rewards, with those of their rollout functions."""
    with GroupScoring(rewards) as scoring:
        return scoring.finish(groups)


def mark_without_result(t: Trajectory) -> Trajectory:
    """Return the episode; one that nothing has scored gets the outcome NoResult."""
    if t.outcome is not None:
        return t
    reason = "nothing scored the episode: its agent or rollout function gave no reward, and there is no rollout.reward"
    return replace(t, outcome=NoResult(reason))
