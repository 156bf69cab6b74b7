"""The section `flow`: what the orchestrator is told, step by step."""

from typing import Any, Literal

from ptf.config.section import Count, Positive, Section, changeable


class StageConfig(Section):
    """Resources and limits of one stage: prepare, tokenize, train, evaluate or publish."""

    cpu: Positive | None = None
    """CPUs."""
    gpu: Count | None = None
    """GPUs."""
    memory_mib: Positive | None = None
    """Memory of the machine, in MiB."""
    retries: Count = 0
    """Automatic retries of the stage after a failure; `train` continues from its last checkpoint."""
    timeout_minutes: Positive | None = None
    """Time limit of the whole stage (for `train`, of the whole training); it is stopped then."""
    env_vars: dict[str, str] = {}
    """Environment variables. A secret is written as `env:NAME`: its value is read from that variable where the stage
    runs, and is not stored."""


class FlowConfig(Section):
    """Settings of the orchestrator, which training does not read."""

    stages: dict[Literal["prepare", "tokenize", "train", "evaluate", "publish"], StageConfig] = changeable({})
    """Resources, retries and limits by stage."""
    cron: str | None = changeable(None)
    """Schedule of a deployed flow: minute, hour, day of the month, month, day of the week (`0 3 * * 1`: Mondays at
    three)."""
    event: str | None = changeable(None)
    """Name of the event that starts a deployed flow."""
    sweep: list[dict[str, Any]] = changeable([])
    """Trials of the sweep flow: for each, the keys that differ from this job (`{train.lr: 1e-4,
    train.global_batch_sequences: 8}`)."""
