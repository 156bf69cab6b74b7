"""What a reward sees of an episode besides the row and the text, if it asks for it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ptf.data.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """One episode, for the parameter `episode` of a reward."""

    # those of the row's prompt, and the response as the assistant's message; of several turns, only those of the prompt
    messages: tuple[Mapping[str, Any], ...]
    prompt_tokens: np.ndarray  # [c] int32, token ids of the prompt
    sampled_ids: np.ndarray  # [n] int32, token ids of the response as the engine returned them, end-of-turn included
    logprobs: np.ndarray  # [n] float32, under the distribution that they were sampled from
    versions: np.ndarray  # [n] int32, the policy step that produced each token
    complete: bool  # the response ended by itself, and was not truncated at a limit
    source: str  # name of the data source

    @classmethod
    def of(cls, trajectory: Trajectory) -> "EpisodeView":
        """Return the view of an episode. Raises UserError if its row has two different prompts."""
        from ptf.data.response_conversation import as_history, history_of

        generations, nothing = trajectory.generations, np.zeros(0, np.int32)
        answer = [{"role": "assistant", "content": trajectory.text}] if len(generations) == 1 else []
        return cls(
            messages=(*as_history(history_of(trajectory.prompt.row)), *answer),
            prompt_tokens=trajectory.prompt.tokens,
            sampled_ids=np.concatenate([nothing, *(generation.sampled_ids for generation in generations)]),
            logprobs=trajectory.logprobs,
            versions=np.concatenate([nothing, *(generation.versions for generation in generations)]),
            complete=trajectory.complete,
            source=trajectory.prompt.source,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the fields as values that JSON has."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        lists = {name: value.tolist() for name, value in values.items() if isinstance(value, np.ndarray)}
        return {**values, **lists, "messages": [dict(message) for message in self.messages]}
