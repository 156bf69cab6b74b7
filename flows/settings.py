"""`flow:` of the config, as Metaflow decorators. The one idea: where a step runs is configuration, so no flow's source names a resource."""

from collections.abc import Mapping
from typing import Any

from metaflow.user_decorators.mutable_flow import MutableFlow
from metaflow.user_decorators.mutable_step import MutableStep
from metaflow.user_decorators.user_flow_decorator import FlowMutator


def decorators(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """One step's settings (schema.StepConfig) as decorator → arguments."""
    resources = {key: settings.get(key) for key in ("cpu", "gpu", "memory") if settings.get(key) is not None}
    found = {
        "resources": resources,
        "retry": {"times": settings["retries"]} if settings.get("retries") else {},
        "timeout": {"minutes": settings["minutes"]} if settings.get("minutes") else {},
    }
    return {name: arguments for name, arguments in found.items() if arguments}


class FromConfig(FlowMutator):
    """Puts them on the flow's steps; without a config (`show`, `--help`) it does nothing."""

    def pre_mutate(self, mutable_flow: MutableFlow) -> None:
        config = dict(mutable_flow.configs).get("config") or {}
        flow = config.get("flow") or {}
        by_step = flow.get("steps") or {}
        for name, step in mutable_flow.steps:
            for decorator, arguments in decorators(by_step.get(name.removesuffix("_first")) or {}).items():
                step.add_decorator(decorator, deco_kwargs=arguments, duplicates=MutableStep.OVERRIDE)
        if flow.get("cron"):
            mutable_flow.add_decorator("schedule", deco_kwargs={"cron": flow["cron"]}, duplicates=MutableFlow.OVERRIDE)
        if flow.get("event"):
            mutable_flow.add_decorator("trigger", deco_kwargs={"event": flow["event"]}, duplicates=MutableFlow.OVERRIDE)
