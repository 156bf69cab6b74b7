"""A call of a reward: the responses that it is about, what it sees of their episodes if it asks for it, its arguments,
and its result as numbers."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ptf.config.plugin import own_copy
from ptf.config.reward_signature import EPISODES, RewardSignature
from ptf.data.trajectory import MAX_REWARD, Trajectory, is_reward
from ptf.rl.worker_messages import Fault


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


@dataclass(frozen=True, slots=True)
class Response:
    """A response that is to be scored."""

    row: Mapping[str, Any]  # the data row of its prompt
    text: str
    episode: EpisodeView | None = None  # only for a reward that asks for it
    where: str = ""  # the row's file and line


def call_arguments(signature: RewardSignature, responses: Sequence[Response]) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the keyword arguments of a call about these responses.

    The responses to one prompt are sent with one row; each gets a copy of its own here.
    """
    if len(responses) > 1:
        responses = [own_copy(response) for response in responses]
    episodes = [response.episode for response in responses]
    if signature.scores == "response":
        (response,) = responses
        positional, value = [response.row, response.text], episodes[0]
    elif signature.scores == "group":
        positional, value = [responses[0].row, [response.text for response in responses]], episodes
    else:
        positional, value = [[(response.row, response.text) for response in responses]], episodes
    return positional, {EPISODES[signature.scores]: value} if signature.sees_episodes else {}


def checked_rewards(signature: RewardSignature, value: Any, count: int) -> list[float | Fault] | Fault:
    """Return the result of a call about `count` responses: a number or a Fault for each, or a Fault for all of them.

    Each response of a batch has its own Fault. A group has one: no response has a result if one of them has none.
    """
    if signature.scores == "response":
        return [checked_reward(value)]
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        if inspect.iscoroutine(value):
            value.close()  # otherwise Python warns that nobody awaited it
        return Fault(f"the reward returned a {type(value).__name__} {str(value)[:60]!r}, not a list of {count} numbers")
    values = list(value)
    if len(values) != count:
        return Fault(f"the reward returned {len(values)} numbers for {count} responses")
    rewards = [checked_reward(one) for one in values]
    faults = [reward for reward in rewards if isinstance(reward, Fault)]
    return faults[0] if faults and signature.scores == "group" else rewards


def checked_reward(value: Any) -> float | Fault:
    """Return the value as a number, or a Fault that says why it is no reward."""
    if isinstance(value, str | bytes | bytearray):  # float() would accept some of them
        return Fault(f"the reward is {str(value)[:60]!r}, a text and not a number")
    if not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        if inspect.iscoroutine(value):
            value.close()  # otherwise Python warns that nobody awaited it
        return Fault(
            f"the reward returned a {type(value).__name__}, not a number: a reward is an int, a float or a scalar of "
            "numpy or torch, of an `async def` its awaited result, and of a function declared with `scores_groups` or "
            "`batched` a list of them"
        )
    try:
        value = float(value)
    except Exception as error:  # float() of any object may raise anything
        return Fault(f"{type(error).__name__}: {error}")
    if not is_reward(value):
        return Fault(f"the reward is {value}, not a number from -{MAX_REWARD:g} to {MAX_REWARD:g}")
    return value
