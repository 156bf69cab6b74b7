"""What a rollout makes of a prompt: `Call` is one request as served, `Trajectory` one episode, `Group` the episodes of one prompt.

The one idea: sampled ids are kept as the engine returned them and are never tokenized again, and an outcome is typed, so that a
reward that crashed cannot pass for a reward of 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptf.data.sample import Sample


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question to the policy, tokenized as a server would before it answers."""

    tokens: np.ndarray  # [c] int32
    row: Mapping[str, Any]  # the data row; what the reward sees
    source: str
    index: int  # place in the stream of prompts: with the sample's number it keys the randomness
    weight: float = 1.0  # how much what is sampled counts: the row's own `weight`


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the policy, exactly as served."""

    context: np.ndarray  # [c] int32, ids the engine was given
    sampled: np.ndarray  # [n] int32, ids it returned, end-of-turn included
    logprobs: np.ndarray  # [n] float32, under the distribution really sampled from
    versions: np.ndarray  # [n] int32, the policy step behind each token
    finished: bool  # False: cut off at the token limit


MOST_REWARD = 1e12  # beyond it, sums and squares of a group's rewards do not fit into the numbers that training uses


def is_reward(value: float) -> bool:
    """Whether a number can be a reward: finite, and not so large that its square is not."""
    return abs(value) <= MOST_REWARD


@dataclass(frozen=True, slots=True)
class Reward:
    value: float


@dataclass(frozen=True, slots=True)
class NoResult:
    """The reward or the environment failed; such an episode enters no advantage."""

    reason: str


@dataclass(frozen=True, slots=True)
class Trajectory:
    prompt: Prompt
    calls: tuple[Call, ...]
    text: str  # the answer, or what both sides said, decoded for the reward and the log
    outcome: Reward | NoResult | None = None  # None: not scored yet
    streams: Mapping[str, np.ndarray] = field(default_factory=dict)  # [n, …] each, aligned with the sampled tokens of all calls
    complete: bool = True  # it ended by itself, and not at a limit of tokens or turns

    @property
    def sampled(self) -> int:
        """Tokens that the policy said, in all calls."""
        return sum(len(call.sampled) for call in self.calls)

    @property
    def logprobs(self) -> np.ndarray:
        """[n] float32, the engine's, of the sampled tokens of all calls."""
        return np.concatenate([np.zeros(0, np.float32), *(call.logprobs for call in self.calls)])


def merged(calls: Sequence[Call]) -> list[list[Call]]:
    """Runs of calls that make one document: each context begins with the ids of the call before it, those that were said included."""
    runs: list[list[Call]] = []
    for call in calls:
        if runs:
            before = np.concatenate([runs[-1][-1].context, runs[-1][-1].sampled])
            if len(call.context) >= len(before) and np.array_equal(call.context[: len(before)], before):
                runs[-1].append(call)
                continue
        runs.append([call])
    return runs


Group = tuple[Trajectory, ...]


def samples_of(trajectory: Trajectory, advantage: float | np.ndarray = 0.0) -> list[Sample]:
    """An episode as samples, one for each run of calls that extend each other: every sampled token is trained once, with the same advantage or one of its
    own, [n], and counts as much as the `weight` of the prompt's row says; what the policy was shown is context."""
    n = trajectory.sampled
    known = {"advantages": np.broadcast_to(advantage, n), "rollout_logprobs": trajectory.logprobs, **trajectory.streams}
    samples, done = [], 0
    for run in merged(trajectory.calls):
        tokens = np.concatenate([run[-1].context, run[-1].sampled]).astype(np.int32)
        where = np.concatenate([np.arange(len(call.context), len(call.context) + len(call.sampled)) for call in run])
        part = slice(done, done + len(where))
        streams = {name: placed(values[part], where, len(tokens), np.int32 if name == "states" else np.float32) for name, values in known.items()}
        samples.append(Sample(tokens, placed(np.full(len(where), trajectory.prompt.weight), where, len(tokens)), trajectory.prompt.source, streams))
        done += len(where)
    return samples


def placed(values: np.ndarray, where: np.ndarray, length: int, kind: type = np.float32) -> np.ndarray:
    """[length, …]: the values there, 0 elsewhere."""
    found = np.zeros((length, *values.shape[1:]), kind)
    found[where] = values
    return found
