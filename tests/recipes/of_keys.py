"""A recipe from keys of `algo` and what it reads of a job."""

from dataclasses import fields
from typing import Any, TypeVar

from ptf.config.recipes import declared_config
from ptf.recipes.protocol import Context, Recipe

R = TypeVar("R", bound=Recipe)
OF_CONTEXT = {field.name for field in fields(Context)}


def of_keys(recipe: type[R], **given: Any) -> R:
    """Build a recipe; each value is of a key, or of a field of the context. `tis_cap` is null if it is not given."""
    config = declared_config(recipe, recipe.__name__)
    keys = {name: value for name, value in given.items() if name not in OF_CONTEXT}
    if "tis_cap" in config.model_fields:
        keys = {"tis_cap": None, **keys}
    context = Context(**{name: value for name, value in given.items() if name in OF_CONTEXT})
    return recipe(config(**keys), context)
