"""What the policy said, to be looked at: every n steps the answers to a step's first prompts, token by token, with what each was credited.

The one idea: it is what was trained, not a rendering of it. `samples.jsonl` has one answer a line; each of its tokens is [text, log-prob in the engine,
advantage], the advantage null where an answer was not trained.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ptf.compute.lease import UNSHARED, Lease
from ptf.compute.tracking import Rows
from ptf.config.schema import TrackConfig
from ptf.data.sample import Atom
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Group, Reward, Trajectory
from ptf.recipes.grpo import samples_of


class Samples:
    def __init__(
        self, run: Path, knobs: TrackConfig, tokenizer: Tokenizer, resumed: int, lease: Lease = UNSHARED, said: Mapping[str, Any] | None = None
    ) -> None:
        self.every, self.prompts, self.tokenizer = knobs.samples_every, knobs.samples, tokenizer
        self.rows = Rows(run / "samples.jsonl", resumed, lease, said) if self.every else None

    def log(self, step: int, groups: Sequence[Group], atoms: Sequence[Atom]) -> None:
        """Of the step that is numbered so when it is done; the first is always there."""
        if self.rows is None or not (step == 1 or step % self.every == 0):
            return
        credited: Mapping[bytes, list[np.ndarray]] = defaultdict(list)
        for atom in atoms:
            for sample in atom:
                if "advantages" in sample.streams:
                    credited[sample.tokens.tobytes()].append(sample.streams["advantages"][sample.weights != 0])
        for group in groups[: self.prompts]:
            scored_first = sorted(range(len(group)), key=lambda i: not isinstance(group[i].outcome, Reward))  # of equal answers, those were trained
            rows = {i: {"step": step, **self.shown(group[i], credited)} for i in scored_first}
            self.rows.add(*(rows[i] for i in range(len(group))))

    def shown(self, t: Trajectory, credited: Mapping[bytes, list[np.ndarray]]) -> dict[str, Any]:
        said = [int(token) for call in t.calls for token in call.sampled]
        parts = [credited[sample.tokens.tobytes()] for sample in samples_of(t)]
        advantages = np.concatenate([part.pop(0) for part in parts]).tolist() if parts and all(parts) else []
        advantages = advantages if len(advantages) == len(said) else [None] * len(said)  # a recipe of one's own may train other tokens
        outcome = {"reward": t.outcome.value} if isinstance(t.outcome, Reward) else {"no_result": t.outcome.reason if t.outcome else None}
        return {
            "prompt": t.prompt.row, "answer": t.text, **outcome, "complete": t.complete, "turns": len(t.calls),
            "tokens": [[self.tokenizer.decode([i]), float(p), a] for i, p, a in zip(said, t.logprobs, advantages, strict=True)],
        }  # fmt: skip

    def close(self) -> None:
        if self.rows:
            self.rows.close()
