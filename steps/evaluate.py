"""Evaluate: generate on held-out prompts and score."""

from pathlib import Path

from ptf.config import Job
from steps.artifact import Artifact


def evaluate(job: Job, artifact: Artifact) -> Artifact:
    """Adds the evaluation's metrics, and prints them as a table: what training started from, what it made, and what is published now."""
    from ptf import gate, published
    from ptf.compute.lease import leased
    from ptf.eval import evaluate as evaluated

    assert artifact.run is not None
    there = published.manifest(job.versions)
    with leased(job, Path(artifact.run)):
        found = evaluated(artifact.resolve(job), Path(artifact.run))
    names = [n for n in found if not n.startswith("start/")]
    if names:
        columns = {"start": {n: found.get(f"start/{n}") for n in names}, "trained": found, **({"published": there.get("metrics", {})} if there else {})}
        print(f"{'evaluation':<28}" + "".join(f" {title:>9}" for title in columns))
        for name in names:
            print(f"{name:<28}" + "".join(f" {'' if of.get(name) is None else f'{of[name]:.4f}':>9}" for of in columns.values()))
    print(f"gate: {gate.said(job, gate.comparisons(job, Path(artifact.run), found))}", flush=True)
    return artifact.but(metrics={**artifact.metrics, **found})
