"""A reward model as a role: what it thinks of each answer is the answer's reward, or part of it.

The one idea: it reads the conversation as its own tokenizer and template write it, which is how it was trained, and not the policy's ids.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

from ptf.data.answers import history_of
from ptf.data.encode import answered
from ptf.data.sample import Sample
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Group, NoResult, Reward, Trajectory, is_reward
from ptf.errors import UserError
from ptf.model import bridge
from ptf.model.scalar import is_scalar
from ptf.recipes.rm.recipe import RM
from ptf.rl.cluster import RoleGroup, sharded
from ptf.rl.looking import per_document
from ptf.rl.roles import Frozen
from ptf.train.trainer import forget_forwards


def refuse_without_score(place: Path) -> None:
    """Raises UserError unless the directory's model has a scalar head: one would be made up."""
    if not is_scalar(bridge.read_config(place)):
        raise UserError(f"rollout.reward_model.path: {place} is no reward model: its config.json names no …ForSequenceClassification (recipe rm makes one)")


class RewardModel(Frozen):
    """Role. It gives a score."""

    head: ClassVar[Literal["lm", "scalar"]] = "scalar"

    @sharded
    def scores(self, samples: list[Sample]) -> list[float]:
        """Of each sample, at its last token."""
        found = per_document(self.model, samples, self.world, RM().scores, width=self.width, micro_rows=self.micro_rows)
        forget_forwards(self.model)
        return found


class Taste:
    """The controller's side: texts to samples, scores to outcomes. `longest`: tokens that the model may read."""

    def __init__(self, group: RoleGroup, tokenizer: Tokenizer, longest: int, weight: float) -> None:
        self.group, self.tokenizer, self.longest, self.weight = group, tokenizer, longest, weight

    def score(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with `weight` times the score as reward, added to what an answer has already. What has no result keeps having none."""
        read = [[self._read(t) for t in group] for group in groups]
        scores = iter(self.group.call("scores", [one for of in read for one in of if isinstance(one, Sample)]))
        return [tuple(self._outcome(t, one, scores) for t, one in zip(group, of, strict=True)) for group, of in zip(groups, read, strict=True)]

    def _read(self, t: Trajectory) -> Sample | NoResult:
        if isinstance(t.outcome, NoResult):
            return t.outcome
        row = t.prompt.row
        try:
            sample = answered(history_of(row), t.text, self.tokenizer, "", row.get("tools"))
        except UserError as error:
            return NoResult(f"the reward model cannot read it: {error}")
        if len(sample) > self.longest:
            return NoResult(f"the reward model reads {self.longest} tokens at most, this answer with its prompt has {len(sample)}")
        return sample

    def _outcome(self, t: Trajectory, one: Sample | NoResult, scores) -> Trajectory:
        if isinstance(one, NoResult):
            return replace(t, outcome=one)
        before = t.outcome.value if isinstance(t.outcome, Reward) else 0.0
        value = before + self.weight * next(scores)
        return replace(t, outcome=Reward(value) if is_reward(value) else NoResult(f"the reward model's score is {value}"))
