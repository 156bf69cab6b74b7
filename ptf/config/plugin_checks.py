"""Checks of what a config names by `use: module:name`, before anything runs: it is imported,
and its arguments are compared with its signature."""

import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ptf.config import plugin
from ptf.config.explain import explain
from ptf.config.load import checked
from ptf.config.recipes import declared_config, validated
from ptf.config.reward_signature import parameters, reward_fault
from ptf.config.schema import Job
from ptf.config.tree import ConfigError, Node, Problem, merge, near

Keys = tuple[str | int, ...]  # from the top of a config
REWARDS: set[Keys] = {("rollout", "reward"), ("evaluate", "reward")}
EPISODES: dict[Keys, tuple[str, ...]] = {  # what plays an episode → what it is called with
    ("rollout", "play"): ("prompt", "policy"),
    ("rollout", "harness", "agent"): ("row", "base_url", "api_key", "seed"),
}


def load_checked(
    *files: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    more: Callable[[Node], Iterable[Problem]] | None = None,
) -> Job:
    """Load a job as `ptf.config.load` does, import every plugin and compare it with its arguments.

    Raise ConfigError with all problems at once; `more` finds further ones below the config's root.
    """
    plugin.on_path(files)
    tree = merge(*files, overrides=overrides)
    return checked(tree, [*problems(tree.root), *(more(tree.root) if more else ())])


def problems(root: Node) -> Iterator[Problem]:
    """Each plugin below a config's root that cannot be imported or does not take its arguments, at its line.
    It needs no valid config."""
    values = root.plain()
    for where, use, args in plugins(values, ()):
        try:
            target = plugin.resolve(use)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            failed = f"importing {use} failed: {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
            yield problem(root, (*where, "use"), str(error) if isinstance(error, ConfigError) else failed)
            continue
        if where == ("recipe",):
            algo = values.get("algo")
            yield from recipe(root, target, use, args, algo if isinstance(algo, dict) else {})
            continue
        yield from unknown(root, (*where, "args"), target, args, use)
        of_source = where[:-1] if where[-1] != "args" else ()  # with the name of a source at the end
        if {where, of_source} & REWARDS and (error := reward_fault(target, use, args)):
            yield problem(root, (*where, "use"), error)
        if where in EPISODES and (error := episode_fault(target, use, args, EPISODES[where])):
            yield problem(root, (*where, "use"), error)
        is_environment = ("rollout", "environment") in (where, of_source)
        if is_environment and isinstance(target, type) and (error := environment_fault(target)):
            yield problem(root, (*where, "use"), f"{use} {error}")


def warnings(job: Job) -> Iterator[str]:
    """Yield what plugins say of arguments that can be used: the lines of their `check_warnings(**args)`."""
    for where, use, args in plugins(job.model_dump(), ()):
        for line in getattr(plugin.resolve(use), "check_warnings", lambda **_: ())(**args):
            yield f"{'.'.join(map(str, where))}.args.{line}"


def plugins(value: Any, where: Keys) -> Iterator[tuple[Keys, str, dict[str, Any]]]:
    """Every plugin at and below a value: its place, what it names, and its arguments."""
    if isinstance(value, dict):
        if value.get("python"):  # a harness, whose agent is imported by that interpreter
            value = {name: inner for name, inner in value.items() if name != "agent"}
        use, args = value.get("use"), value.get("args") or {}
        # with a weight it is one of several rewards
        if isinstance(use, str) and value.keys() <= {"use", "args", "weight"} and isinstance(args, dict):
            yield where, use, args
        for name, inner in value.items():
            yield from plugins(inner, (*where, name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from plugins(inner, (*where, number))


def recipe(root: Node, target: object, use: str, args: Mapping[str, Any], algo: Mapping[str, Any]) -> Iterator[Problem]:
    """Wrong keys of a recipe of the user's own, by the class of its keys."""
    try:
        config = declared_config(target, use)
    except ConfigError as error:
        yield problem(root, ("recipe", "use"), str(error))
        return
    try:
        validated(config, {**args, **algo})
    except ValidationError as found:
        for error in found.errors():
            name, *below = error["loc"]
            where = ("recipe", "args") if name in args and name not in algo else ("algo",)
            if error["type"] == "extra_forbidden" and not below:
                yield problem(root, (*where, name), f"{use} has no key {name!r}{near(str(name), config.model_fields)}")
            elif error["type"] == "missing" and not below:
                yield problem(root, (*where, name), f"is missing: {use} needs it")
            else:
                yield from explain({**error, "loc": (*where, *error["loc"])}, Job, root)


def environment_fault(environment: Any) -> str | None:
    """Return which methods an environment, or its class, lacks; None if it has all."""
    missing = [name for name in ("reset", "step") if not callable(getattr(environment, name, None))]
    return f"has no method {' and no method '.join(f'`{name}`' for name in missing)}" if missing else None


def episode_fault(
    target: Callable[..., Any], use: str, args: Mapping[str, Any], positional: Sequence[str]
) -> str | None:
    """Return why a rollout function or an agent cannot be called; None if it can."""
    try:
        signature = inspect.signature(target)
        signature.bind(*positional, **{name: value for name, value in args.items() if name in signature.parameters})
    except ValueError:  # it has no signature
        pass
    except TypeError as error:
        return f"{use} does not take ({', '.join(positional)}): {error}"
    inner = inspect.unwrap(target)
    if positional[0] == "prompt" and inspect.isfunction(inner) and not inspect.iscoroutinefunction(inner):
        return f"{use} is no coroutine function: write `async def`"
    return None


def unknown(
    root: Node, where: Keys, target: Callable[..., Any], given: Mapping[str, Any], use: str
) -> Iterator[Problem]:
    """Arguments that a plugin does not take."""
    taken = parameters(target)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return
    names = [name for name, p in taken.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name in given:
        if name not in names:
            yield problem(root, (*where, name), f"{use} has no argument {name!r}{near(name, names)}")


def problem(root: Node, where: Keys, what: str) -> Problem:
    """Return a problem at the place where `where`, or the deepest section on the way to it, was written."""
    return Problem(root.nearest(where), ".".join(map(str, where)), what)
