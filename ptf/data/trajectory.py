"""The output of a rollout: `Generation` is one request as served, `Trajectory` is one episode, and `Group` is the
episodes of one prompt.

Sampled ids are kept as the engine returned them and are never tokenized again. An outcome has a type, so a reward that
crashed cannot be mistaken for a reward of 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptf.data.sample import Sample
from ptf.errors import raise_if_old_names


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for the policy, tokenized as a server would tokenize it."""

    tokens: np.ndarray  # [c] int32
    row: Mapping[str, Any]  # the data row, which the reward receives
    source: str
    index: int  # index in the stream of prompts; with the sample's number it keys the randomness
    weight: float = 1.0  # how much the sampled tokens count: the row's own `weight`


@dataclass(frozen=True, slots=True)
class Generation:
    """One request to the policy, exactly as served."""

    context: np.ndarray  # [c] int32, token ids that the engine received
    sampled_ids: np.ndarray  # [n] int32, token ids that the engine returned, end-of-turn included
    logprobs: np.ndarray  # [n] float32, under the distribution that was sampled from
    versions: np.ndarray  # [n] int32, the policy step that produced each token
    finished: bool  # False: cut off at the token limit


__getattr__ = raise_if_old_names(
    __name__,
    {
        "Call": "is now Generation, and its field `sampled` is `sampled_ids`; the field `calls` of a Trajectory is "
        "`generations`"
    },
)
MAX_REWARD = 1e12  # a larger value, squared and summed over a group, overflows the numbers that training uses


def is_reward(value: float) -> bool:
    """Return whether a number can be a reward: it is finite, and so is its square."""
    return abs(value) <= MAX_REWARD


@dataclass(frozen=True, slots=True)
class Reward:
    """The result of scoring an episode."""

    value: float


@dataclass(frozen=True, slots=True)
class NoResult:
    """The reward function or the environment failed. Recipes that train on rewards leave the episode out."""

    reason: str


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode: its prompt, its requests to the policy, and its outcome."""

    prompt: Prompt
    generations: tuple[Generation, ...]
    text: str  # the answer, or the text of both sides, decoded for the reward and the log
    outcome: Reward | NoResult | None = None  # None: not scored yet
    # Per-token values, [n, …] each, aligned with the sampled tokens of all generations.
    token_columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    complete: bool = True  # it ended by itself, not at a limit of tokens or turns

    @property
    def num_sampled_tokens(self) -> int:
        """Return the number of tokens that the policy sampled in all generations."""
        return sum(len(generation.sampled_ids) for generation in self.generations)

    @property
    def logprobs(self) -> np.ndarray:
        """Return the engine's log-probabilities of the sampled tokens of all generations, [n] float32."""
        return np.concatenate([np.zeros(0, np.float32), *(generation.logprobs for generation in self.generations)])


def group_into_documents(generations: Sequence[Generation]) -> list[list[Generation]]:
    """Group generations into runs that make one document each.

    In a run, the context of each generation begins with the context and the sampled ids of the generation before it.
    """
    runs: list[list[Generation]] = []
    for generation in generations:
        if runs:
            before = np.concatenate([runs[-1][-1].context, runs[-1][-1].sampled_ids])
            if len(generation.context) >= len(before) and np.array_equal(generation.context[: len(before)], before):
                runs[-1].append(generation)
                continue
        runs.append([generation])
    return runs


Group = tuple[Trajectory, ...]


def samples_of(trajectory: Trajectory, advantage: float | np.ndarray = 0.0) -> list[Sample]:
    """Return an episode as samples, one for each run of generations that extend each other.

    Every sampled token is trained once, with the same advantage or, for an array [n], with its own, and is weighted by
    the `weight` of the prompt's row. All other tokens are context.
    """
    n = trajectory.num_sampled_tokens
    columns_of_all = {
        "advantages": np.broadcast_to(advantage, n),
        "rollout_logprobs": trajectory.logprobs,
        **trajectory.token_columns,
    }
    samples, start = [], 0
    for run in group_into_documents(trajectory.generations):
        tokens = np.concatenate([run[-1].context, run[-1].sampled_ids]).astype(np.int32)
        positions = np.concatenate(
            [
                np.arange(len(generation.context), len(generation.context) + len(generation.sampled_ids))
                for generation in run
            ]
        )
        part = slice(start, start + len(positions))
        token_columns = {
            name: scatter(values[part], positions, len(tokens), np.int32 if name == "trie_states" else np.float32)
            for name, values in columns_of_all.items()
        }
        samples.append(
            Sample(
                tokens,
                scatter(np.full(len(positions), trajectory.prompt.weight), positions, len(tokens)),
                trajectory.prompt.source,
                token_columns,
            )
        )
        start += len(positions)
    return samples


def scatter(values: np.ndarray, positions: np.ndarray, length: int, dtype: type = np.float32) -> np.ndarray:
    """Return an array [length, …] that holds `values` at `positions` and 0 elsewhere."""
    result = np.zeros((length, *values.shape[1:]), dtype)
    result[positions] = values
    return result
