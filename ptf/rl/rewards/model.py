"""A reward model as a role: its score of each response is the response's reward, or part of it.

The conversation is rendered and tokenized by the reward model's own template and tokenizer, as in its
training; the policy's ids are not used.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ptf.config import Job
from ptf.data.document import Document
from ptf.data.encode import answer_sample
from ptf.data.response_conversation import history_of
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Group, NoResult, Reward, Trajectory, is_reward
from ptf.errors import UserError
from ptf.model import model_files
from ptf.model.head import is_scalar
from ptf.recipes.documents import last_values
from ptf.rl.cluster import RoleGroup, split_over_workers
from ptf.rl.forward_passes import per_document
from ptf.rl.roles import ModelRole, ModelSettings
from ptf.train.job_tokenizer import with_run_rendering
from ptf.train.trainer import forget_forwards


def raise_if_without_score(place: Path) -> None:
    """Raise UserError unless the directory's model has a scalar head; a missing one would be drawn at random."""
    if not is_scalar(model_files.read_config(place)):
        raise UserError(
            f"rollout.reward_model.path: {place} is no reward model: its config.json names no "
            "…ForSequenceClassification; train one with the recipe rm"
        )


class RewardModel(ModelRole):
    """Role of a model that scores conversations."""

    head: Literal["lm", "scalar"] = "scalar"

    @split_over_workers
    def scores(self, samples: list[Document]) -> list[float]:
        """Return the score of each sample, at its last token."""
        values = per_document(self.model, samples, self.world, last_values, **self.scored)
        forget_forwards(self.model)
        return values


class RewardModelClient:
    """Converts responses to samples for the reward model, and its scores to outcomes.

    `longest` is the most tokens of a conversation that the model may read.
    """

    def __init__(self, role: RoleGroup, tokenizer: Tokenizer, longest: int, weight: float) -> None:
        self.role, self.tokenizer, self.longest, self.weight = role, tokenizer, longest, weight

    @classmethod
    def of(cls, job: Job, run: Path, role: RoleGroup | None) -> "RewardModelClient | None":
        """Return the client of a job's role; None without one."""
        reward_model = job.rollout and job.rollout.reward_model
        if role is None or not reward_model:
            return None
        settings: ModelSettings = role.spec.settings
        tokenizer = with_run_rendering(job, Tokenizer.load(str(settings.directory)), run)
        return cls(role, tokenizer, settings.seq_len, reward_model.weight)

    def score(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with `weight` times the score as reward, added to the reward that a response has already.

        A response without a result still has none.
        """
        samples = [[self._sample(t) for t in group] for group in groups]
        scores = iter(self.role.call("scores", [one for of in samples for one in of if isinstance(one, Document)]))
        return [
            tuple(self._scored(t, one, scores) for t, one in zip(group, of, strict=True))
            for group, of in zip(groups, samples, strict=True)
        ]

    def _sample(self, t: Trajectory) -> Document | NoResult:
        if isinstance(t.outcome, NoResult):
            return t.outcome
        row = t.prompt.row
        try:
            sample = answer_sample(history_of(row), t.text, self.tokenizer, "", row.get("tools"), scored=True)
        except UserError as error:
            return NoResult(f"the reward model cannot read it: {error}")
        if len(sample) > self.longest:
            return NoResult(
                f"the reward model reads {self.longest} tokens at most, this response with its prompt has {len(sample)}"
            )
        return sample

    def _scored(self, t: Trajectory, one: Document | NoResult, scores: Iterator[float]) -> Trajectory:
        """Return the trajectory with its outcome; a sample takes the next score."""
        if isinstance(one, NoResult):
            return replace(t, outcome=one)
        before = t.outcome.value if isinstance(t.outcome, Reward) else 0.0
        value = before + self.weight * next(scores)
        return replace(
            t, outcome=Reward(value) if is_reward(value) else NoResult(f"the reward model's score is {value}")
        )
