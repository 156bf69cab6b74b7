"""The prompts of an online job: those to train on, as a stream, and the held-out ones."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from ptf.config import Job
from ptf.config.sections.data import Source
from ptf.data.prompts import prompts_once
from ptf.data.sources.rows import specs
from ptf.data.stream import Stream
from ptf.data.tokenizer import Tokenizer
from ptf.data.training_length import plan_prompts
from ptf.data.trajectory import Prompt
from ptf.errors import UserError
from ptf.train.dataloading import make_prompts

CHECKED = 10_000  # prompts of each source whose length is checked before training starts


def training_prompts(job: Job, tokenizer: Tokenizer) -> "FittingPrompts":
    """Return the stream of the job's prompts, and print how often each source is read.

    Raises UserError if one of the first prompts is too long and `data.too_long` does not drop it.
    """
    assert job.train.steps is not None, "online jobs have no train.epochs"
    stream = make_prompts(job, tokenizer)
    mixing = "in proportion to weights" if stream.mixture.weighted else "every prompt once before any is repeated"
    print(
        f"prompts: {mixing}; {plan_prompts(stream, job.online_rollout.prompts_per_step, job.train.steps).describe()}",
        flush=True,
    )
    room, drop = job.data.seq_len - job.online_rollout.max_new_tokens, job.data.too_long == "drop"
    if not drop:  # before training starts, rather than hours later
        for name, spec in stream.mixture.sources.items():
            for prompt in itertools.islice(prompts_once(spec, name, tokenizer), CHECKED):
                raise_if_too_long(prompt, room)
    return FittingPrompts(stream, room, drop)


def raise_if_too_long(prompt: Prompt, room: int) -> None:
    """Raise UserError if a prompt has more than `room` tokens."""
    if len(prompt.tokens) > room:
        raise UserError(
            f"a prompt of source {prompt.source} has {len(prompt.tokens)} tokens; "
            f"data.seq_len less rollout.max_new_tokens leaves {room} "
            "(data.too_long: drop leaves such prompts out)"
        )


@dataclass(eq=False)
class FittingPrompts:
    """Stream[Prompt] of the prompts with at most `room` tokens; longer ones are dropped and counted, or refused."""

    prompts: Stream[Prompt]
    room: int
    drop: bool
    dropped: int = 0

    def __next__(self) -> Prompt:
        for _ in range(100_000):
            prompt = next(self.prompts)
            if len(prompt.tokens) <= self.room:
                return prompt
            if not self.drop:
                raise_if_too_long(prompt, self.room)
            self.dropped += 1
        raise UserError(
            f"100,000 consecutive prompts are longer than the {self.room} tokens that data.seq_len less "
            "rollout.max_new_tokens leaves; raise data.seq_len"
        )

    def state_dict(self) -> dict:
        """Return the position in the stream."""
        return {"prompts": self.prompts.state_dict(), "dropped": self.dropped}

    def load_state_dict(self, state: Mapping) -> None:
        """Continue from a position that `state_dict` returned."""
        self.prompts.load_state_dict(state["prompts"])
        self.dropped = int(state["dropped"])


def held_out_prompts(sources: Mapping[str, Source], tokenizer: Tokenizer, limit: int) -> dict[str, list[Prompt]]:
    """Return the first `limit` prompts of each source; a line is printed for a source that has more."""
    found = dict[str, list[Prompt]]()
    for name, spec in specs(sources).items():
        prompts = prompts_once(spec, name, tokenizer)
        found[name] = list(itertools.islice(prompts, limit))
        try:
            has_more = next(prompts, None) is not None
        except UserError:  # there is a further row, which cannot be used
            has_more = True
        if has_more:
            print(
                f"evaluate: the first {limit} prompts of {name} are measured; it has more (evaluate.limit)", flush=True
            )
    return found
