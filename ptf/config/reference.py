"""docs/config.md and configs/schema.json, written from the schema.
Run `python -m ptf.config.reference` in the repository root.

The schema's annotations and attribute docstrings are the documentation; nothing is typed twice.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo
from pydantic.json_schema import models_json_schema
from pydantic_core import PydanticUndefined

from ptf.config.explain import core, section_at
from ptf.config.schema import Job, PluginJob, jobs, online_recipes
from ptf.config.section import MOST, Plugin, Section
from ptf.config.sections.rollout import SourcePlugin

INTRO = """# Config

Written from `ptf/config/sections/` and `ptf/recipes/*/config.py` by `python -m ptf.config.reference`; do not edit.

* A config is one YAML file or several, merged left to right: `ptf train what.yaml where.yaml --set train.lr=1e-5`.
  Sections merge key by key, everything else replaces; a plugin that names another `use` replaces the whole plugin.
* `extends: other.yaml` (or a list) at the top of a file puts the file over others;
  the path is relative to the file that says it.
* Numbers may be written `1e-4`. Only `true` and `false` are booleans. There is no interpolation.
* `ptf check CONFIG...` reports every problem at once with its file and line, or prints the config with all defaults.
  It opens what is on this machine: the headers of the models, the tokenizer, the first rows of each source, the reward.
  A problem there has the words with which training would stop. It says what it did not look at.
* *Fixed* keys must be the same when a run continues from a checkpoint; the others *may change*.
"""
MOST_SET = (
    "recipe",
    "output",
    "seed",
    "model.path",
    "model.init",
    "model.lora",
    "data.sources",
    "data.validation",
    "data.seq_len",
    "data.train_on",
    "data.too_long",
    "train.steps",
    "train.epochs",
    "train.lr",
    "train.schedule",
    "train.warmup_steps",
    "train.global_batch_sequences",
    "train.micro_batch_sequences",
    "train.precision",
    "train.activation_checkpointing",
    "train.validate_every",
    "rollout.reward",
    "rollout.prompts_per_step",
    "rollout.group_size",
    "rollout.max_new_tokens",
    "compute.workers",
    "checkpoint.every",
    "evaluate.sources",
    "evaluate.max_new_tokens",
    "publish.metric",
)
MOST_SET_HEAD = f"""## The {len(MOST_SET)} keys that most jobs set

Start with these: every job has `recipe`, `model.path`, `data.sources`, `train.lr` and one of `train.steps` and
`train.epochs`; the others have defaults. `rollout` belongs to the recipes that generate responses while they train
({", ".join(f"`{recipe}`" for recipe in online_recipes())}). The sections below list every key.
"""
WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "anything", NoneType: "null"}
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def markdown() -> str:
    """Return the reference: the keys that most jobs set, then a table for each section, in the order of the schema."""
    titles: dict[tuple[type[Section], bool], list[str]] = {}
    for title, section, may_change in _sections(Job, "", False):
        titles.setdefault((section, may_change), []).append(title)
    tables, told = [], dict[str, str]()
    for (section, may_change), names in titles.items():
        rows = _rows(section, may_change)
        tables.append(_table(f"## {', '.join(names)}\n\n{_line(section.__doc__)}\n", rows.values()))
        told |= {f"{title}.{name}".removeprefix("Job."): row for title in names for name, row in rows.items()}
    most_set = [told[key].replace(f"`{key.rpartition('.')[2]}`", f"`{key}`", 1) for key in MOST_SET]
    return "\n".join([INTRO, _table(MOST_SET_HEAD, most_set), *tables])


def json_schema() -> dict[str, Any]:
    """JSON Schema of one config file. No key is required in it, since the file may be merged with others."""
    kinds = (*jobs().values(), PluginJob)
    references, schema = models_json_schema([(job, "validation") for job in kinds], ref_template="#/$defs/{model}")
    for definition in schema["$defs"].values():
        definition.pop("required", None)
        for described in (definition, *definition.get("properties", {}).values()):
            if "description" in described:
                described["description"] = _line(described["description"])
        for name, property in definition.get("properties", {}).items():
            if property.get("additionalProperties") == (plugin := {"$ref": "#/$defs/SourcePlugin"}):
                forms = [plugin, {"type": "object", "additionalProperties": plugin}, {"type": "null"}]
                definition["properties"][name] = {"anyOf": forms, "description": property["description"]}
    extends = TypeAdapter(str | list[str]).json_schema() | {"description": "Files that this one is put over."}
    for job in kinds:
        schema["$defs"][job.__name__]["properties"]["extends"] = extends
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ptf config",
        "anyOf": [references[job, "validation"] for job in kinds],
        "$defs": schema["$defs"],
    }


def _sections(section: type[Section], above: str, may_change: bool) -> Iterator[tuple[str, type[Section], bool]]:
    """Title, section, and whether it lies below a key that may change."""
    yield above.rstrip(".") or "Job", section, may_change
    for name, field in section.model_fields.items():
        named = get_origin(core(field.annotation)) is dict
        inner = section_at(field.annotation, ["NAME"] if named else [])
        if section is Job and name == "algo":
            for recipe, job in jobs().items():
                yield f"algo, recipe {recipe}", section_at(job, ["algo"]) or Section, False
        elif inner and inner is not Plugin:
            yield from _sections(
                inner, f"{above}{name}." + ("NAME." if named else ""), may_change or _changeable(field)
            )
    if section is Job:
        yield "a plugin", Plugin, False


def _table(head: str, rows: Iterable[str]) -> str:
    lines = [head, "| key | type | default | on resume | |", "|---|---|---|---|---|", *rows, ""]
    return "\n".join(lines) if len(lines) > 4 else head


def _rows(section: type[Section], may_change: bool) -> dict[str, str]:
    """Return the row of each key of a section, by its name; `may_change`: whether a key above it may change."""
    rows = {}
    for name, field in section.model_fields.items():
        inner = section_at(field.annotation, [])
        inner = None if inner is Plugin else inner
        resume = "may change" if may_change or _changeable(field) else "fixed"
        resume = "" if inner or section is Plugin else resume
        about = _line(field.description or (inner and inner.__doc__)).replace("|", "\\|")
        rows[name] = (
            f"| `{name}` | {_word(field.annotation, field.metadata)} | {_default(field)} | {resume} | {about} |"
        )
    return rows


def _line(text: str | None) -> str:
    """Return a docstring without the line breaks that it has in the source."""
    return " ".join((text or "").split())


def _word(annotation: Any, limits: Any = ()) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _word(inner[0], [limit for field in inner[1:] for limit in getattr(field, "metadata", [field])])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    if origin is dict and inner[1] is SourcePlugin:
        return "plugin, or map: name → plugin"
    if origin is dict:
        return f"map: name → {_word(inner[1])}" if inner[1] is not Any else "keys and values"
    if origin is list:
        return f"list of {_word(inner[0])}"
    if origin is tuple:
        return f"list of {len(inner)}: {_word(inner[0])}"
    if origin is Union or (not isinstance(annotation, type) and inner):
        return " or ".join(dict.fromkeys(_word(choice) for choice in inner))
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "plugin" if annotation is Plugin else "section"
    bounds = [
        f"{sign} {getattr(limit, name)}"
        for limit in limits
        for name, sign in SIGNS.items()
        if getattr(limit, name, MOST) != MOST
    ]
    return " ".join([WORDS[annotation], " and ".join(bounds)]).strip()


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return "–" if isinstance(field.default, Section) or field.default == {} else f"`{json.dumps(field.default)}`"


def _changeable(field: FieldInfo) -> bool:
    return field.json_schema_extra == {"resume": "changeable"}


if __name__ == "__main__":
    Path("docs/config.md").write_text(markdown())
    Path("configs/schema.json").write_text(json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n")
