"""What a preview found, as plain values and as the JSON object that `ptf try` prints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptf.data.trajectory import Prompt


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of one response of the policy, and of what follows it until the policy is asked again or the episode
    ends."""

    policy_seconds: float
    other_seconds: float  # of the environment, the rollout function or the harness

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole turn."""
        return self.policy_seconds + self.other_seconds


@dataclass(frozen=True, slots=True)
class PreviewEpisode:
    """One episode that was played."""

    prompt: Prompt
    reward: float | None  # None: it has no result, or the job has no reward
    reason: str | None  # why it has no result
    complete: bool  # it ended by itself, not at a limit
    seconds: float
    start_seconds: float  # until the policy was asked first
    turns: Sequence[Turn]
    documents: Sequence[Sequence[tuple[str, float]]]  # its training samples in pieces; weight 1: sampled, 0: context
    counts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Probe:
    """The rewards of a scripted policy's responses."""

    name: str
    rewards: Sequence[float]
    without_result: int


@dataclass(frozen=True, slots=True)
class Preview:
    """The episodes of a preview, and what was found."""

    policy: str  # in words
    episodes: Sequence[PreviewEpisode]
    seconds: float  # of play, all episodes together, without the start of worker processes
    scoring_seconds: float
    differences: Sequence[str]  # between two plays with the same seeds, one line for each episode
    probes: Sequence[Probe]
    counts: Mapping[str, float]  # over all episodes
    warnings: Sequence[str]

    @property
    def repeatable(self) -> bool:
        """Whether playing the episodes twice with the same seeds gave the same contexts, responses and rewards; False
        where no episode has a result, since nothing was seen."""
        return self.has_result and not self.differences

    @property
    def rewards(self) -> list[float]:
        """Return the rewards of the episodes that have one."""
        return [episode.reward for episode in self.episodes if episode.reward is not None]

    @property
    def no_result(self) -> list[str]:
        """Return where and why episodes have no result."""
        return [
            f"{episode.prompt.source}, prompt {episode.prompt.index}: {episode.reason}"
            for episode in self.episodes
            if episode.reason is not None
        ]

    @property
    def has_result(self) -> bool:
        """Whether at least one episode has a result."""
        return any(episode.reason is None for episode in self.episodes)

    @property
    def turns(self) -> list[Turn]:
        """Return the turns of all episodes."""
        return [turn for episode in self.episodes for turn in episode.turns]


def median_and_max(values: Sequence[float]) -> dict[str, float] | None:
    """Return the median and the largest of some seconds; None if there are none."""
    return {"median": round(float(np.median(values)), 6), "max": round(max(values), 6)} if values else None


def as_dict(preview: Preview) -> dict[str, Any]:
    """Return the preview as JSON values."""
    return {
        "episodes": len(preview.episodes),
        "seconds": round(preview.seconds, 6),
        "rewards": preview.rewards,
        "no_result": preview.no_result,
        "repeatable": preview.repeatable,
        "differences": list(preview.differences),
        "warnings": list(preview.warnings),
        "policy": preview.policy,
        "scoring_seconds": round(preview.scoring_seconds, 6),
        "start_seconds": median_and_max([episode.start_seconds for episode in preview.episodes]),
        "turn_seconds": median_and_max([turn.seconds for turn in preview.turns]),
        "turn_seconds_without_policy": median_and_max([turn.other_seconds for turn in preview.turns]),
        "counts": dict(preview.counts),
        "probes": {
            probe.name: {"rewards": list(probe.rewards), "no_result": probe.without_result} for probe in preview.probes
        },
        "by_episode": [_episode(episode) for episode in preview.episodes],
    }


def _episode(episode: PreviewEpisode) -> dict[str, Any]:
    return {
        "source": episode.prompt.source,
        "prompt_index": episode.prompt.index,
        "row": dict(episode.prompt.row),
        "reward": episode.reward,
        "no_result": episode.reason,
        "complete": episode.complete,
        "seconds": round(episode.seconds, 6),
        "turns": [
            {"policy_seconds": round(turn.policy_seconds, 6), "other_seconds": round(turn.other_seconds, 6)}
            for turn in episode.turns
        ],
        "counts": dict(episode.counts),
        "documents": [
            [{"text": text, "sampled": bool(weight)} for text, weight in document] for document in episode.documents
        ],
    }
