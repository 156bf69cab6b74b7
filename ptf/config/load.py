"""Conversion of YAML files to a `Job`, and of a `Job` to YAML, to a fingerprint, and to the keys that are fixed on
resume.

A config is accepted or refused as a whole. Every problem in every file is found and reported in one error, each with
the line that must change.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import yaml
from pydantic import ValidationError

from ptf.config.explain import explain, given
from ptf.config.plugin import on_path
from ptf.config.plugin_code import code_of
from ptf.config.recipes import RECIPES, algo_config
from ptf.config.schema import Job, PluginJob, job_of
from ptf.config.section import AlgoConfig, Section
from ptf.config.sections.data import Source
from ptf.config.tree import Dumper, Problem, Problems, Tree, merge, near, parse
from ptf.errors import UserError
from ptf.workspace.credentials import HIDDEN, REFERENCE


def load(*files: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Job:
    """Merge files from left to right, apply the overrides `a.b=value`, and return the job.

    Raises ConfigError, which lists all problems.
    """
    on_path(files)
    return checked(merge(*files, overrides=overrides))


def loads(text: str, overrides: Sequence[str] = ()) -> Job:
    """Return the job of one YAML or JSON text that ptf wrote, with overrides `a.b=value`.

    `loads(dump(job)) == job`.
    """
    return checked(parse(text, overrides=overrides))


def dump(job: Job) -> str:
    """Return the job as YAML, with every key, including those that have their default value."""
    return yaml.dump(job.model_dump(), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=160)


def shown(job: Job) -> Job:
    """Return the job as it is stored and published: values of environment variables of the flow's steps are hidden.

    References to environment variables stay.
    """
    stages = {}
    for name, stage in job.flow.stages.items():
        hidden = {key: value if REFERENCE.fullmatch(value) else HIDDEN for key, value in stage.env_vars.items()}
        stages[name] = stage.model_copy(update={"env_vars": hidden})
    return job.model_copy(update={"flow": job.flow.model_copy(update={"stages": stages})})


def fingerprint(job: Job, *sections: str) -> str:
    """Return 16 hex digits of the SHA-256 of the named sections (dotted), or of the whole job if none are named.

    It identifies the config that a stage's output depends on, and the code of the plugins that it names
    (ptf.config.plugin_code).
    """
    whole = job.model_dump()
    chosen = {section: _at(whole, section) for section in sections} if sections else whole
    if digests := code_of(chosen).digests:
        chosen["code"] = digests
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]


def model_paths(job: Job) -> dict[str, str]:
    """Return every config key that names a model to load, with its value."""
    paths = {"model.path": job.model.path}
    if job.rollout and job.rollout.reward_model:
        paths["rollout.reward_model.path"] = job.rollout.reward_model.path
    if job.algo:  # a plugin is imported to know which of its keys name models
        paths |= {f"algo.{key}": path for key, path in algo_config(job).model_paths().items()}
    return paths


def sources_of(job: Job) -> dict[str, Source]:
    """Return all sources of the job by config key."""
    return {
        f"{section}.{name}": source
        for section, sources in job.sources_by_section.items()
        for name, source in sources.items()
    }


def resolve(
    job: Job,
    *,
    prepared: str | None = None,
    models: Mapping[str, str] = {},
    tokenized: Mapping[str, str] = {},
    datasets: Mapping[str, str] = {},
) -> Job:
    """Return the job with the outputs of earlier stages filled in.

    `prepared` is the directory that replaces `prepare:`; `models` maps model paths to their replacements; `tokenized`
    maps names of sources to their tokenized data; `datasets` maps keys of sources to their paths at a commit of
    the Hub.
    """

    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: placed(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [placed(inner) for inner in value]
        return (
            f"{prepared}/{value.removeprefix('prepare:')}"
            if isinstance(value, str) and value.startswith("prepare:")
            else value
        )

    values = job.model_dump()
    if prepared is not None:
        values |= {section: placed(values[section]) for section in ("model", "data", "algo", "rollout", "evaluate")}
    for key, path in model_paths(job).items():
        if path in models:
            *sections, last = key.split(".")
            reduce(dict.__getitem__, sections, values)[last] = models[path]
    for key, path in datasets.items():
        section, part, name = key.split(".", 2)
        values[section][part][name]["path"] = path
    for sources in (values["data"]["sources"], values["data"]["validation"]):
        for name in sources.keys() & tokenized.keys():
            sources[name] |= {
                "path": tokenized[name],
                "kind": "tokenized",
                "columns": {},
                # the tokenized files contain exactly the rows that these keys select
                **dict.fromkeys(("limit", "row_count")),
            }
    return type(job).model_validate_json(json.dumps(values), strict=True)


def frozen_differences(old: Job, new: Job) -> list[str]:
    """Return the changes that a resume does not allow, each as `key: old → new`."""
    return list(_differences(_in_force(old), _in_force(new), ""))


def raise_if_fixed_keys_changed(begun: Job, job: Job) -> None:
    """Raise UserError naming every fixed key in which a job differs from the one that its run began with."""
    if changed := frozen_differences(begun, job):
        raise UserError(
            "this run was begun with other values of keys that are fixed:\n  "
            + "\n  ".join(changed)
            + "\nrestore these keys, or begin a run with another name"
        )


def _in_force(job: Job) -> Job:
    """Return the job with the values of its algorithm's keys that depend on other keys, and with the optimizer that
    makes the same bits without host memory."""
    same: dict[str, Any] = {"algo": job.algo.in_force(job)} if isinstance(job.algo, AlgoConfig) else {}
    if job.train.optimizer == "adamw_offload":
        same["train"] = job.train.model_copy(update={"optimizer": "adamw"})
    return job.model_copy(update=same)


ABSENT = object()


def _differences(old: Any, new: Any, key: str) -> Iterator[str]:
    below = f"{key}." if key else ""
    if isinstance(old, Section) and (type(old) is type(new) or isinstance(old, Job)):
        for name, field in type(old).model_fields.items():
            if (field.json_schema_extra or {}) != {"resume": "changeable"}:
                yield from _differences(getattr(old, name), getattr(new, name), f"{below}{name}")
    elif isinstance(old, dict) and isinstance(new, dict):
        for name in old | new:
            yield from _differences(old.get(name, ABSENT), new.get(name, ABSENT), f"{below}{name}" if name else key)
    elif old != new:
        both = (
            "absent" if value is ABSENT else json.dumps(value, default=Section.model_dump, ensure_ascii=False)
            for value in (old, new)
        )
        yield f"{key}: {' → '.join(both)}"


def _at(values: Any, section: str) -> Any:
    for step in section.split("."):
        if values is not None:
            values = values[step]
    return values


def checked(tree: Tree, more: Iterable[Problem] = ()) -> Job:
    """Return the job of a tree. Raise Problems with all that is wrong with it, and with `more`."""
    values = tree.root.plain()
    problems = [*tree.problems, *more]
    recipe = values.get("recipe")
    known = PluginJob if isinstance(recipe, dict) else job_of(recipe) if recipe in RECIPES else None
    job = None
    try:
        job = (known or Job).model_validate_json(json.dumps(values), strict=True)
    except ValidationError as exc:
        for error in exc.errors():
            is_missing = error["type"] == "missing"  # it may be in what could not be read
            of_known = known or is_missing or error["loc"][0] != "recipe"  # an unknown recipe is reported below
            if of_known and not (is_missing and tree.unread):
                problems += explain(error, known or Job, tree.root)
    if known is None and "recipe" in values:
        what = (
            f"no such recipe: {given(recipe)}; there are {', '.join(RECIPES)}, or `use: "
            f"module:name` for your own{near(str(recipe), RECIPES)}"
        )
        problems.append(Problem(tree.root.nearest(["recipe"]), "recipe", what))
    if job is None or problems:
        raise Problems(problems)
    return job
