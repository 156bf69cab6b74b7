"""What a reward is called with: one response, all responses to one prompt, or a batch of responses.

A reward is a function, or a class whose instance is called; the class is constructed once in each process, with the
arguments of the config. `ptf.rl.rewards.scores_groups` and `batched` set the attributes that are read here.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ptf.errors import UserError

Scores = Literal["response", "group", "batch"]
CALLED_WITH = {"response": "(row, text, **args)", "group": "(row, texts, **args)", "batch": "(items, **args)"}
EPISODES = {"response": "episode", "group": "episodes", "batch": "episodes"}  # the parameter that asks for more


@dataclass(frozen=True, slots=True)
class RewardSignature:
    """What the calls of a reward contain."""

    scores: Scores
    sees_episodes: bool  # whether a call has the argument `episode`, or `episodes`
    max_size: int = 1  # number of responses in a batch

    @classmethod
    def of(cls, target: Any, args: Mapping[str, Any]) -> "RewardSignature":
        """Return the signature of a reward with these arguments of the config."""
        scores: Scores = getattr(target, "scored_together", "response")
        asks: Callable[..., bool] | None = getattr(target, "sees_episodes", None)
        sees = asks(**args) if asks else EPISODES[scores] in parameters(called(target))
        most: int | Callable[..., int] = getattr(target, "max_size", 1)
        return cls(scores, sees, most(**args) if callable(most) else most)


def called(target: Any) -> Any:
    """Return the function that is called with responses: of a class, its method `__call__`, or None if it has none."""
    if not isinstance(target, type):
        return target
    return next((vars(base)["__call__"] for base in target.__mro__ if "__call__" in vars(base)), None)


def parameters(target: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function, a class or a callable; of one that tells none, one that takes anything."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {"arguments": inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)}


def reward_fault(target: Any, use: str, args: Mapping[str, Any]) -> str | None:
    """Return why `target` cannot be called as a reward with these arguments of the config; None if it can.

    Arguments that it does not take are not looked at. The attribute `check_arguments`, if it has one, is called with
    the arguments and raises UserError where they are wrong.
    """
    is_class = isinstance(target, type)
    if called(target) is None:
        return f"{use} is a class whose instances cannot be called: a reward has a method `__call__`"
    try:
        own, constructor = inspect.signature(called(target)), inspect.signature(target) if is_class else None
    except (TypeError, ValueError):  # a built-in function says nothing of its parameters
        return None
    scores: Scores = getattr(target, "scored_together", "response")
    keyword = EPISODES[scores]
    if given := {"episode", "episodes"} & args.keys():
        return f"{use}: `{given.pop()}` is given by ptf, and is no argument of the config"
    for other in {"episode", "episodes"} - {keyword}:
        if other in own.parameters:
            return f"{use} has a parameter `{other}`; a reward {CALLED_WITH[scores]} is given `{keyword}`"
    positional = [None] * (1 if scores == "batch" else 2) + [None] * is_class
    episodes = {keyword: None} if keyword in own.parameters else {}
    try:
        if constructor:
            constructor.bind(**taken(constructor, args))
            own.bind(*positional, **episodes)
        else:
            own.bind(*positional, **taken(own, args), **episodes)
    except TypeError as error:
        return f"{use} cannot be called as a reward, {CALLED_WITH[scores]}: {error}"
    try:
        if check := getattr(target, "check_arguments", None):
            check(**taken(constructor or own, args))
    except UserError as error:
        return f"{use}: {error}"
    except Exception as error:  # it may import what a part of a sum names, which may raise anything
        return f"{use}: {type(error).__name__}: {error}"
    return None


def taken(signature: inspect.Signature, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that have a parameter."""
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    return {name: value for name, value in args.items() if takes_any or name in signature.parameters}
