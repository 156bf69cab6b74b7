"""A log of the policy's responses for people to read: every n steps the responses to the step's first prompts, token by
token, with their advantages.

The log has the tokens that were trained, not a rendering of the text. `samples.jsonl` has one response per line; each
token is [text, log-prob in the engine, advantage]. The advantage is null if the response was not trained.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ptf.compute.lease import UNSHARED, Lease
from ptf.compute.tracking import StepLines
from ptf.config.sections.track import TrackConfig
from ptf.data.document import PackUnit
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Group, Reward, Trajectory, documents_of, response_record, samples_of


class ResponseLog:
    """Writes `samples.jsonl` in the run's directory."""

    def __init__(
        self,
        run: Path,
        track_config: TrackConfig,
        tokenizer: Tokenizer,
        resumed: int,
        lease: Lease = UNSHARED,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.every, self.prompts, self.tokenizer = track_config.samples_every, track_config.sample_prompts, tokenizer
        self.lines = StepLines(run / "samples.jsonl", resumed, lease, state) if self.every else None

    def log(self, step: int, groups: Sequence[Group], units: Sequence[PackUnit]) -> None:
        """Write the responses of a step if it is the first step or a multiple of `every`; `step` counts from 1."""
        if self.lines is None or not (step == 1 or step % self.every == 0):
            return
        credited: Mapping[bytes, list[np.ndarray]] = defaultdict(list)
        for unit in units:
            for sample in unit:
                if "advantages" in sample.token_columns:
                    credited[sample.tokens.tobytes()].append(
                        sample.token_columns["advantages"][sample.loss_weights != 0]
                    )
        for group in groups[: self.prompts]:
            # responses with a reward take advantages first: of equal responses, only those with a reward were trained
            scored_first = sorted(range(len(group)), key=lambda i: not isinstance(group[i].outcome, Reward))
            lines = {i: {"step": step, **self.line(group[i], credited)} for i in scored_first}
            self.lines.add(*(lines[i] for i in range(len(group))))

    def line(self, t: Trajectory, credited: Mapping[bytes, list[np.ndarray]]) -> dict[str, Any]:
        """Return the line of one response; its advantages are removed from `credited`, by the tokens of its samples."""
        ids = [int(token) for generation in t.generations for token in generation.sampled_ids]
        parts = [credited[sample.tokens.tobytes()] for sample in samples_of(t)]
        advantages: list[float | None] = [None] * len(ids)
        if all(parts):
            for document, part in zip(documents_of(t.generations), parts, strict=True):
                values = part.pop(0)
                # a plugin recipe may train other tokens than the sampled ones
                if len(values) == len(document.indices):
                    for i, value in zip(document.indices, values, strict=True):
                        advantages[i] = float(value)
        return {
            **response_record(t),
            "complete": t.complete,
            "turns": len(t.generations),
            "tokens": [
                [self.tokenizer.decode([i]), float(p), a] for i, p, a in zip(ids, t.logprobs, advantages, strict=True)
            ],
        }

    def close(self) -> None:
        """Close the file."""
        if self.lines:
            self.lines.file.close()
