"""The config's section `flow` as Metaflow decorators, and the files that a task on another machine needs.

The resources of steps are configuration, so the source of a flow names none. ptf's packages and configs are packaged
from the directory where they are installed.
"""

from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from metaflow.packaging_sys import ContentType
from metaflow.user_decorators.mutable_flow import MutableFlow
from metaflow.user_decorators.mutable_step import MutableStep
from metaflow.user_decorators.user_flow_decorator import FlowMutator

from ptf.workspace.credentials import REFERENCE

SUFFIXES = (".py", ".yaml", ".json")  # files to package; directories named `runs` are excluded


def decorators(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the Metaflow decorators of one step and their arguments, from its settings (schema.StageConfig)."""
    names = {"cpu": "cpu", "gpu": "gpu", "memory": "memory_mib"}  # Metaflow's → ptf's
    resources = {name: settings[key] for name, key in names.items() if settings.get(key) is not None}
    # flows/base.py sets the variables that are references
    literal = {key: value for key, value in (settings.get("env_vars") or {}).items() if not REFERENCE.fullmatch(value)}
    settings = {
        "resources": resources,
        "retry": {"times": settings["retries"]} if settings.get("retries") else {},
        "timeout": {"minutes": settings["timeout_minutes"]} if settings.get("timeout_minutes") else {},
        "environment": {"vars": literal} if literal else {},
    }
    return {name: arguments for name, arguments in settings.items() if arguments}


class FromConfig(FlowMutator):
    """Decorates the flow's steps with the config's settings; does nothing without a config (`show`, `--help`)."""

    def pre_mutate(self, mutable_flow: MutableFlow) -> None:
        """Add the decorators of the config's section `flow`."""
        flow = (dict(mutable_flow.configs).get("config") or {}).get("flow") or {}
        by_stage = flow.get("stages") or {}
        for name, step in mutable_flow.steps:
            for decorator, arguments in decorators(by_stage.get(name.removesuffix("_first")) or {}).items():
                step.add_decorator(decorator, deco_kwargs=arguments, duplicates=MutableStep.OVERRIDE)
        for decorator, key in (("schedule", "cron"), ("trigger", "event")):
            if flow.get(key):
                mutable_flow.add_decorator(decorator, deco_kwargs={key: flow[key]}, duplicates=MutableFlow.OVERRIDE)

    def add_to_package(self) -> list[tuple[str, str, ContentType]]:
        """Return the files that a task on another machine imports and reads, with their names in the code package, its
        working directory."""
        files: list[tuple[str, str, ContentType]] = []
        for name in ("ptf", "steps", "flows"):
            files += _below(Path(str(resources.files(name))))
        checkout = Path(__file__).parents[1]
        if (checkout / "pyproject.toml").is_file():  # the config of a `job:` path is read on the step's machine
            files += _below(checkout / "configs")
        return files


def _below(directory: Path) -> Iterator[tuple[str, str, ContentType]]:
    for file in sorted(directory.rglob("*")):
        within = Path(directory.name, file.relative_to(directory))
        if (
            file.suffix in SUFFIXES
            and not any(part.startswith(".") for part in within.parts)
            and "runs" not in within.parts
            and file.is_file()
        ):
            yield str(file), str(within), ContentType.USER_CONTENT
