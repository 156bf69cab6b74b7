"""pydantic's errors in plain words, each at the line of the config that must change.

The path of an error leads to a file and line through the tree of nodes, and to the names that would have been right
through the schema's annotations.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ptf.config import foreign_names
from ptf.config.schema import Job
from ptf.config.section import FORMS, Section
from ptf.config.tree import Node, Problem, near

EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a section",
    "model_type": "a section",
}
LIMITS = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "needs at least {min_length}",
    "too_long": "takes at most {max_length}",
}


LONG = 200  # characters of a value that a message shows
PARALLELISM = {
    "pipeline": "pipeline parallelism",
    "pp": "pipeline parallelism",
    "expert": "expert parallelism",
    "ep": "expert parallelism",
}
# what one may well look for, by the first word of the key or value that would ask for it;
# parallelism only below `compute`
NOT_HERE = {
    **PARALLELISM,
    **dict.fromkeys(("fp8", "float8", "mxfp8", "fp4", "nvfp4"), "training in fewer bits than bf16 (FP8, FP4)"),
    **dict.fromkeys(
        ("image", "images", "vision", "audio", "video", "multimodal"), "multimodal training; only text is trained"
    ),
}


def core(annotation: Any) -> Any:
    """Return an annotation without `| None` and without its limits."""
    if get_origin(annotation) is Annotated:
        return core(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        rest = [inner for inner in get_args(annotation) if inner is not NoneType]
        return core(rest[0]) if len(rest) == 1 else annotation
    return annotation


def section_at(annotation: Any, path: Sequence[str | int]) -> type[Section] | None:
    """Return the section class that `path` leads to, or None where that is no section."""
    kind = core(annotation)
    if isinstance(kind, type) and issubclass(kind, Section):
        if not path:
            return kind
        inner = kind.model_fields.get(str(path[0]))
        return section_at(inner.annotation, path[1:]) if inner else None
    return section_at(get_args(kind)[1], path[1:]) if get_origin(kind) is dict and path and get_args(kind) else None


def keys(section: type[Section], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key at and below a section, in order: dotted, NAME for a name of the user's own."""
    for name, field in section.model_fields.items():
        yield f"{above}{name}", field
        kind, below = core(field.annotation), f"{above}{name}."
        if get_origin(kind) is dict and (inner := section_at(kind, ["NAME"])):
            yield from keys(inner, f"{below}NAME.")
        elif inner := section_at(kind, []):
            yield from keys(inner, below)


def given(value: Any) -> str:
    """Return a value as a message names it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= LONG else f"the text {value[:LONG]!r}…"
    return {NoneType: "nothing", dict: "a section", list: "a list"}.get(type(value), repr(value))


def explain(error: ErrorDetails, job: type[Job], root: Node) -> Iterator[Problem]:
    """Return the problems behind one pydantic error."""
    loc = error["loc"]
    # an engine is a word or a plugin, and pydantic names the member of a union that it tried
    members = [step for before, step in pairwise(("", *loc)) if before == "engine"]
    inner = tuple(step for step in loc if step != "[key]" and step not in members)
    path = tuple(step for step in inner if step != "")  # the source of a plugin for all
    if (
        members
        and (members[0] == "Plugin") == isinstance(error["input"], str)
        and error["type"] in ("model_type", "literal_error")
    ):
        return  # an error of the union member that the user did not mean
    name, kind, value, context = str(path[-1]) if path else "", error["type"], error["input"], error.get("ctx", {})
    if kind == "value_error":  # a validator of ours: one problem a line, each begins with its key
        for line in str(context["error"]).splitlines():
            key = line.split(" ")[0].rstrip(":")
            yield Problem(root.nearest(key.split(".")), key, line[len(key) :].lstrip(": "))
        return
    match kind:
        case "missing":
            what = "is missing"
        case "extra_forbidden":
            what = _unknown(name, inner[:-1], job)
        case "literal_error":
            choices = re.findall(r"'([^']*)'", context["expected"])
            own = ", or `use: module:name` for your own" if members else ""
            hint = _not_here(str(value), path) or near(str(value), choices)
            what = f"expected one of {', '.join(choices)}{own}, got {given(value)}{hint}"
        case "none_required":
            what = f"recipe {root.value['recipe'].value} does not take this section"
        case "string_pattern_mismatch":
            what = f"expected {FORMS.get(context['pattern'], 'importable.module:name')}, got {given(value)}"
        case _ if kind in EXPECTED:
            whole = isinstance(value, float) and value.is_integer() and kind.startswith("int")
            hint = f"  (did you mean {int(value)}?)" if whole else ""
            what = f"expected {EXPECTED[kind]}, got {given(value)}{hint}"
        case _ if kind in LIMITS:
            what = f"{LIMITS[kind].format(**context)}, got {context.get('actual_length', value)}"
        case _:
            what = f"{error['msg'][0].lower()}{error['msg'][1:]}, got {given(value)}"
    yield Problem(root.nearest(path), ".".join(map(str, path)), what)


def _not_here(name: str, path: Sequence[str | int]) -> str:
    """Return a sentence that ptf lacks what a key or a value of this name would ask for, or an empty text."""
    word = name.lower().split("_")[0]
    of = NOT_HERE.get(word, "") if path[:1] == ("compute",) or word not in PARALLELISM else ""
    return f"; ptf has no {of}" if of else ""


def _unknown(name: str, path: Sequence[str | int], job: type[Job]) -> str:
    """Return the message for an unknown key: where else the job has a key of this name, or the nearest key here."""
    section = section_at(job, path)
    names = list(section.model_fields) if section else []
    elsewhere = [key for key, _ in keys(job) if key.rpartition(".")[2] == name]
    where = f"in {'.'.join(map(str, filter(None, path)))}" if path else "at the top"
    algo = section_at(job, ["algo"])
    # of no use in online recipes
    unfit = (
        ("data.validation", "train.epochs", "train.global_batch_sequences") if getattr(algo, "online", False) else ()
    )
    known = f"  (did you mean {elsewhere[0]}?)" if elsewhere else ""
    known = known or foreign_names.hint(name, {key for key, _ in keys(job) if key not in unfit})
    hint = _not_here(name, path) or known or near(name, names)
    return f"unknown key {where}" + (hint or (f"; known: {', '.join(names)}" if names else "; it has no keys"))
