"""Evaluate: generate on held-out prompts and score."""

from pathlib import Path

from ptf.config import Job
from steps.artifact import Artifact


def evaluate(job: Job, artifact: Artifact) -> Artifact:
    """Adds the evaluation's metrics, and prints them as a table: what training started from beside what it made."""
    from ptf.eval import evaluate as evaluated

    assert artifact.run is not None
    found = evaluated(artifact.resolve(job), Path(artifact.run))
    names = [n for n in found if not n.startswith("start/")]
    if names:
        print(f"{'evaluation':<28} {'start':>8} {'trained':>8}")
        for name in names:
            before = found.get(f"start/{name}")
            print(f"{name:<28} {'' if before is None else f'{before:8.4f}':>8} {found[name]:8.4f}")
    return artifact.but(metrics={**artifact.metrics, **found})
