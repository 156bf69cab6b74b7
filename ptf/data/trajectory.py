"""What a rollout makes of a prompt: `Call` is one request as served, `Trajectory` one episode, `Group` the episodes of one prompt.

The one idea: sampled ids are kept as the engine returned them and are never tokenized again, and an outcome is typed, so that a
reward that crashed cannot pass for a reward of 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question to the policy, tokenized as a server would before it answers."""

    tokens: np.ndarray  # [c] int32
    row: Mapping[str, Any]  # the data row; what the reward sees
    source: str
    index: int  # place in the stream of prompts: with the sample's number it keys the randomness


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the policy, exactly as served."""

    context: np.ndarray  # [c] int32, ids the engine was given
    sampled: np.ndarray  # [n] int32, ids it returned, end-of-turn included
    logprobs: np.ndarray  # [n] float32, under the distribution really sampled from
    versions: np.ndarray  # [n] int32, the policy step behind each token
    finished: bool  # False: cut off at the token limit


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
    text: str  # the answer, decoded for the reward and the log
    outcome: Reward | NoResult | None = None  # None: not scored yet
    streams: Mapping[str, np.ndarray] = field(default_factory=dict)  # [n] each, aligned with the sampled tokens


Group = tuple[Trajectory, ...]
