"""The keys that a plugin recipe inherits from a recipe of ptf.

A class that inherits from one of ptf's recipes, such as GRPO, has its keys. They are checked, and get their values, by
the config class of that recipe. A key that the subclass declares anew is the subclass's own: it has the default of the
subclass, and takes any value.
"""

import inspect
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import ValidationError, create_model
from pydantic_core import ErrorDetails

from ptf.config import plugin
from ptf.config.error import ConfigError
from ptf.config.recipes import algo_config_of, recipe_of_class
from ptf.config.schema import Job
from ptf.config.section import AlgoConfig, Plugin


@cache
def inherited_config(recipe: object) -> type[AlgoConfig]:
    """Return the config class with the keys that a plugin inherits; AlgoConfig, without keys, if it is no class or
    inherits from no recipe of ptf."""
    bases = inspect.getmro(recipe) if isinstance(recipe, type) else ()
    names = [recipe_of_class(base) for base in bases]
    if not any(names):
        return AlgoConfig
    first = next(i for i, name in enumerate(names) if name)
    config = algo_config_of(names[first] or "")
    declared = {name for base in bases[:first] for name in (*vars(base), *inspect.get_annotations(base))}
    signature = inspect.signature(recipe)  # type: ignore[arg-type]
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    own: dict[str, Any] = {
        name: (Any, ... if defaults[name] is inspect.Parameter.empty else defaults[name])
        for name in config.model_fields
        if name in declared and name in defaults
    }
    return create_model(config.__name__, __base__=config, __module__=config.__module__, **own)


def algo_config(job: Job) -> AlgoConfig:
    """Return the section `algo`; of a plugin, the keys that it inherits from a recipe of ptf, with those of its `args`.

    The plugin is imported. Raises ConfigError for a value that the recipe of ptf does not take.
    """
    if isinstance(job.algo, AlgoConfig):
        return job.algo
    assert isinstance(job.recipe, Plugin)
    config, values = inherited_config(plugin.resolve(job.recipe.use)), job.recipe.args | job.algo
    try:
        return _validated(config, values)
    except ValidationError as exc:
        lines = [f"algo.{'.'.join(map(str, error['loc']))}  {error['msg']}" for error in exc.errors()]
        raise ConfigError("\n".join(lines)) from exc


def inherited_errors(recipe: object, values: dict[str, Any]) -> Iterator[ErrorDetails]:
    """Yield what is wrong with the values of inherited keys; a key that is missing is not reported."""
    try:
        _validated(inherited_config(recipe), values)
    except ValidationError as exc:
        yield from (error for error in exc.errors() if error["type"] != "missing")


def _validated(config: type[AlgoConfig], values: dict[str, Any]) -> AlgoConfig:
    inherited = {name: value for name, value in values.items() if name in config.model_fields}
    return config.model_validate_json(json.dumps(inherited), strict=True)
