"""Declarations of what a reward is called with: all responses to one prompt, or a batch of responses to any prompts.

A reward without a declaration is called with one response. The attributes are read by ptf.config.reward_signature.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ptf.config.reward_signature import called
from ptf.rl.rewards.concurrent import one_by_one

Target = TypeVar("Target", bound=Callable[..., Any])


def scores_groups(reward: Target) -> Target:
    """Declare that the reward is `(row, texts, **args) -> list[float]`: it is called once for each prompt, with all
    responses to it, and returns one number for each, in their order.

    A call that fails is repeated, with the whole group, up to `rollout.reward_retries` times; if it still fails, no
    response to the prompt has a result.
    """
    return _declared(reward, "group", 1)


def batched(max_size: int | Callable[..., int]) -> Callable[[Target], Target]:
    """Declare that the reward is `(items, **args) -> list[float]`: it is called with up to `max_size` responses to any
    prompts, each `(row, text)`, and returns one number for each, in their order.

    `max_size` may be a function of the reward's arguments. If a call fails, its responses are scored again one by one.
    Calls of a plain function, or of an object with a plain `__call__`, are made one after the other, unless its
    attribute `max_concurrent_calls` says how many may overlap: it computes, with a model that is used by one thread at
    a time.
    """
    if isinstance(max_size, int) and max_size < 1:
        raise ValueError(f"a batch has at least one response, so max_size cannot be {max_size}")

    def declare(reward: Target) -> Target:
        if not (hasattr(reward, "max_concurrent_calls") or inspect.iscoroutinefunction(called(reward))):
            one_by_one(reward)
        return _declared(reward, "batch", max_size)

    return declare


def _declared(reward: Target, scores: str, max_size: int | Callable[..., int]) -> Target:
    """Set the attributes of a function or a class."""
    if "scored_together" in vars(reward):
        raise TypeError(f"{reward.__name__} is declared twice: a reward scores groups or batches")
    for name, value in (("scored_together", scores), ("max_size", max_size)):
        setattr(reward, name, value)
    return reward
