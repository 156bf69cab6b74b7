"""Translation of a flow's command line, `run --config a.yaml b.yaml --set train.lr=1e-5`, into Metaflow's options.

Files and overrides are merged and checked once, at launch, before the run is created. Metaflow stores the checked job,
and every task, retry and resume reads the stored one; the YAML files are not read again.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ptf.config import Job, dump, load
from ptf.errors import UserError

LAUNCHES = ("run", "argo-workflows", "step-functions", "airflow")  # commands that use the flow's default config
COMMANDS = (*LAUNCHES, "resume", "spin", "step", "spin-step")
TAGS = 40  # most tags for sources; Metaflow allows 50 tags
TAG = 500  # most characters of a tag in Metaflow
# options without a value that Metaflow allows before a command
FLAGS = ("--quiet", "--not-quiet", "--pylint", "--no-pylint")


@dataclass(frozen=True)
class Words:
    """A command line, divided into config files, overrides and the words for Metaflow (`rest`)."""

    rest: tuple[str, ...]
    files: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


def command(argv: Sequence[str]) -> str | None:
    """Return the first of `COMMANDS` in a command line, or None. A word after an option is the option's value, not a
    command (`--datastore spin`)."""
    return next(
        (
            word
            for last, word in zip(("", *argv), argv, strict=False)
            if word in COMMANDS and (last in FLAGS or not last.startswith("--"))
        ),
        None,
    )


def sort(argv: Sequence[str]) -> Words:
    """Separate `--config FILE...` and `--set KEY=VALUE` from the other words.

    Both options may be anywhere in the line, any number of times, with `=` or a space before the value.
    """
    rest, files, overrides, words = [], [], [], list(argv)
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if option == "--config":
            if not equals and words[:1] == ["config"]:  # Metaflow's own form: --config config FILE
                words.pop(0)
            files.append(value if equals else _value(option, words))
            while words and words[0].endswith((".yaml", ".yml")) and not words[0].startswith("-"):
                files.append(words.pop(0))
        elif option == "--set":
            overrides.append(value if equals else _value(option, words))
        else:
            rest.append(word)
    return Words(tuple(rest), tuple(files), tuple(overrides))


def _value(option: str, words: list[str]) -> str:
    if not words or words[0].startswith("-"):
        raise UserError(f"{option} needs a value: --config FILE.yaml, --set KEY=VALUE")
    return words.pop(0)


def rewrite(words: Words, recipes: tuple[str, ...], default: Path) -> tuple[list[str], str | None]:
    """Return the command line for Metaflow, and a note for the user that names the config in use, or None.

    `default` is read only if the command needs a config and the line has none. Raises UserError (ConfigError) for an
    invalid config, before anything is written.
    """
    verb = command(words.rest)
    if verb == "resume" and (words.files or words.overrides):
        raise UserError(
            "resume uses the config of the run that it resumes: omit --config and --set, or start a new run"
        )
    given = "--config-value" in words.rest or any(
        name in os.environ for name in ("METAFLOW_FLOW_CONFIG", "METAFLOW_FLOW_CONFIG_VALUE")
    )
    if not (words.files or words.overrides) and (given or verb not in LAUNCHES):
        return list(words.rest), None
    files = words.files or (str(default),)
    job = load(*files, overrides=words.overrides)
    if recipes and isinstance(job.recipe, str) and job.recipe not in recipes:
        raise UserError(f"{' + '.join(files)} has recipe: {job.recipe}; this flow runs recipe: {' or '.join(recipes)}")
    note = "config: " + " + ".join(files + words.overrides) + ("" if words.files else "  (the flow's default)")
    labels = [word for tag in tags(job) for word in ("--tag", tag)] if verb in ("run", "argo-workflows") else []
    return ["--config-value", "config", dump(job), *words.rest, *labels], note


def tags(job: Job) -> list[str]:
    """Return the tags to find a run in Metaflow's client: `recipe:sft`, `model:…`, and `data:…` for each source."""
    return [
        tag[:TAG]
        for tag in (
            f"recipe:{job.recipe if isinstance(job.recipe, str) else job.recipe.use}",
            f"model:{job.model.path}",
            *(f"data:{name}" for name in list(job.data.sources)[:TAGS]),
        )
    ]
