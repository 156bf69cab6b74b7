"""The output of a rollout: `Generation` is one request as served, `Trajectory` is one episode, and `Group` is the
episodes of one prompt.

Sampled ids are kept as the engine returned them and are never tokenized again. An outcome has a type, so a reward that
crashed cannot be mistaken for a reward of 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptf.data.document import Document


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for the policy, tokenized as a server would tokenize it."""

    tokens: np.ndarray  # [c] int32
    row: Mapping[str, Any]  # the data row, which the reward receives
    source: str
    index: int  # index in the stream of prompts; with the sample's number it keys the randomness
    weight: float = 1.0  # how much the sampled tokens count: the row's own `weight`
    where: str = ""  # the row's file and line, for messages


@dataclass(frozen=True, slots=True)
class Generation:
    """What the engine sampled for one request, with the context exactly as it was served."""

    context: np.ndarray  # [c] int32, token ids that the engine received
    sampled_ids: np.ndarray  # [n] int32, token ids that the engine returned, end-of-turn included
    logprobs: np.ndarray  # [n] float32, under the distribution that was sampled from
    versions: np.ndarray  # [n] int32, the policy step that produced each token
    finished: bool  # False: truncated at the token limit


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
    """One episode: its prompt, what was sampled for each request to the policy, and its outcome."""

    prompt: Prompt
    generations: tuple[Generation, ...]
    text: str  # the response, or the text of both sides, decoded for the reward and the log
    outcome: Reward | NoResult | None = None  # None: not scored yet
    # Per-token values, [n, …] each, aligned with the sampled tokens of all generations.
    token_columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    complete: bool = True  # it ended by itself, not at a limit of tokens or turns
    counts: Mapping[str, float] = field(default_factory=dict)  # of the episode; metrics are their means over episodes
    turn_rewards: np.ndarray | None = None  # [generations] float64, whose sum is the outcome; None: not known by turn
    value_after: float | None = None  # the critic's value of the state after the last token; None: not computed

    @property
    def num_sampled_tokens(self) -> int:
        """Return the number of tokens that the policy sampled in all generations."""
        return sum(len(generation.sampled_ids) for generation in self.generations)

    @property
    def logprobs(self) -> np.ndarray:
        """Return the engine's log-probabilities of the sampled tokens of all generations, [n] float32."""
        return np.concatenate([np.zeros(0, np.float32), *(generation.logprobs for generation in self.generations)])

    @property
    def turn_lengths(self) -> np.ndarray:
        """Return the number of sampled tokens of each generation, [generations] int64."""
        return np.array([len(generation.sampled_ids) for generation in self.generations], np.int64)


def response_record(t: Trajectory) -> dict[str, Any]:
    """Return the record of an episode in `samples.jsonl`, in the evaluate stage's `responses/`, and for
    `evaluate.metrics`: `row`, the data row; `response`, the policy's text; `reward`, or null without one; and
    `no_result`, the reason if scoring failed, otherwise null."""
    outcome = t.outcome
    return {
        "row": t.prompt.row,
        "response": t.text,
        "reward": outcome.value if isinstance(outcome, Reward) else None,
        "no_result": outcome.reason if isinstance(outcome, NoResult) else None,
    }


def group_into_documents(generations: Sequence[Generation]) -> list[list[int]]:
    """Group generations, by their indices, into runs that make one document each.

    In a run, the context of each generation begins with the context and the sampled ids of the generation before it. A
    generation joins the longest run that it continues, of equal ones the latest, so the generations of several
    conversations may be interleaved. If it continues none, as the first of a branch, it begins a run.
    """
    runs: list[list[int]] = []
    ends: list[np.ndarray] = []  # the tokens of each run so far
    for i, generation in enumerate(generations):
        context = generation.context
        continued = [
            run for run, end in enumerate(ends) if len(end) <= len(context) and np.array_equal(context[: len(end)], end)
        ]
        after = np.concatenate([context, generation.sampled_ids])
        if continued:
            best = max(continued, key=lambda run: (len(ends[run]), run))
            runs[best].append(i)
            ends[best] = after
        else:
            runs.append([i])
            ends.append(after)
    return runs


@dataclass(frozen=True, slots=True)
class TokenRun:
    """The tokens of a run of generations, and where its sampled tokens are."""

    tokens: np.ndarray  # [t] int32
    positions: np.ndarray  # [n], of the sampled tokens in `tokens`
    indices: np.ndarray  # [n], of the same tokens among those that all generations sampled


def documents_of(generations: Sequence[Generation]) -> list[TokenRun]:
    """Return the documents of an episode, in which each sampled token is once."""
    ends = np.cumsum([len(generation.sampled_ids) for generation in generations])
    documents = []
    for run in group_into_documents(generations):
        last = generations[run[-1]]
        lengths = [len(generations[i].sampled_ids) for i in run]
        starts = [len(generations[i].context) for i in run]
        documents.append(
            TokenRun(
                np.concatenate([last.context, last.sampled_ids]).astype(np.int32),
                np.concatenate([np.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)]),
                np.concatenate([np.arange(ends[i] - n, ends[i]) for i, n in zip(run, lengths, strict=True)]),
            )
        )
    return documents


Group = tuple[Trajectory, ...]


def samples_of(trajectory: Trajectory, advantage: float | np.ndarray = 0.0) -> list[Document]:
    """Return an episode as samples, one for each run of generations that extend each other.

    Every sampled token is trained once, with the same advantage or, for an array [n], with its own, and is weighted by
    the `weight` of the prompt's row. All other tokens are context. The samples of an episode that has several of them
    also have the column `episode_tokens`, the number of the episode's sampled tokens.
    """
    n, documents = trajectory.num_sampled_tokens, documents_of(trajectory.generations)
    columns_of_all = {
        "advantages": np.broadcast_to(advantage, n),
        "rollout_logprobs": trajectory.logprobs,
        **trajectory.token_columns,
    }
    if len(documents) > 1:
        columns_of_all["episode_tokens"] = np.full(n, n, np.float32)
    samples = []
    for document in documents:
        n, positions = len(document.tokens), document.positions
        token_columns = {
            name: scatter(values[document.indices], positions, n, np.int32 if name == "trie_states" else np.float32)
            for name, values in columns_of_all.items()
        }
        weights = scatter(np.full(len(positions), trajectory.prompt.weight), positions, n)
        samples.append(Document(document.tokens, weights, trajectory.prompt.source, token_columns))
    return samples


def last_sample_of(trajectory: Trajectory) -> Document:
    """Return the sample of an episode that ends with its last sampled token."""
    last = trajectory.num_sampled_tokens - 1
    documents = documents_of(trajectory.generations)
    (number,) = [i for i, document in enumerate(documents) if len(document.indices) and document.indices[-1] == last]
    return samples_of(trajectory)[number]


def token_column(trajectory: Trajectory, values: Sequence[np.ndarray]) -> np.ndarray:
    """Return values of the sampled tokens of all generations, [n], from those of the tokens of each sample
    (`samples_of`)."""
    column = np.zeros(trajectory.num_sampled_tokens, np.float32)
    for document, of_sample in zip(documents_of(trajectory.generations), values, strict=True):
        column[document.indices] = of_sample[document.positions]
    return column


def scatter(values: np.ndarray, positions: np.ndarray, length: int, dtype: type = np.float32) -> np.ndarray:
    """Return an array [length, …] that holds `values` at `positions` and 0 elsewhere."""
    result = np.zeros((length, *values.shape[1:]), dtype)
    result[positions] = values
    return result
