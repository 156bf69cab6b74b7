"""The rewards of a job: one of all sources, or one for each of several."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ptf.data.trajectory import Group, NoResult, Reward, Trajectory
from ptf.rl.rewards.scoring import RewardWorkers, Scoring, responses_left_to


class Rewards:
    """Rewards and the factors on them, by source; the one of all sources has the name ""."""

    def __init__(self, by_source: Mapping[str, tuple[RewardWorkers, float]]) -> None:
        self.by_source = dict(by_source)

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


class GroupScoring:
    """Groups that are scored while others are still generated.

    `add` is called with each group as soon as it is there, from any thread; `finish` returns all of them with their
    outcomes: those that their rollout functions gave, otherwise those of their sources' rewards. Responses of a source
    without a reward stay as they are.
    """

    def __init__(self, rewards: Rewards | None) -> None:
        self.by_source = rewards.by_source if rewards else {}
        self.lock = threading.Lock()
        self.scorings: dict[str, Scoring] = {}
        self.places: dict[int, tuple[str, int]] = {}  # number of a group → its reward, and its place there

    def __enter__(self) -> "GroupScoring":
        return self

    def __exit__(self, *_: object) -> None:
        for scoring in self.scorings.values():
            scoring.__exit__()

    def add(self, number: int, group: Group) -> None:
        """Begin to score a group, which has this number among all groups."""
        source = group[0].prompt.source
        source = source if source in self.by_source else ""
        if source not in self.by_source:
            return
        workers, _ = self.by_source[source]
        responses = responses_left_to(workers, group)
        with self.lock:
            if number in self.places:  # a replica that was replaced gave it before
                return
            scoring = self.scorings.setdefault(source, Scoring(workers))
            self.places[number] = (source, len(scoring.groups))
            scoring.add(responses)

    def finish(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with their outcomes."""
        for number, group in enumerate(groups):
            self.add(number, group)
        outcomes = {source: scoring.finish() for source, scoring in self.scorings.items()}
        scored = list(groups)
        for number, (source, place) in self.places.items():
            _, weight = self.by_source[source]
            rest = iter(outcomes[source][place])  # of the responses that have no outcome from their rollout function
            scored[number] = tuple(
                t if t.outcome is not None else _with_outcome(t, next(rest), weight) for t in groups[number]
            )
        return scored


def _with_outcome(t: Trajectory, outcome: Reward | NoResult, weight: float) -> Trajectory:
    if isinstance(outcome, Reward) and weight != 1:
        outcome = Reward(weight * outcome.value)
    return replace(t, outcome=outcome)


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
