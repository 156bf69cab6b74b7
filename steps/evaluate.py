"""Evaluate: generate on held-out prompts and score."""

from collections.abc import Callable
from pathlib import Path

from ptf.config import Job
from ptf.errors import Retryable, passing, told
from steps.artifact import Artifact

TRIES = 3


def evaluate(job: Job, artifact: Artifact) -> Artifact:
    """Adds the evaluation's metrics, and prints them as a table: what training started from, what it made, and what is published now.
    It is tried again where a process was lost, Ray did not start or a port was taken: what it writes, it writes anew."""
    from ptf import gate, published
    from ptf.compute.lease import leased
    from ptf.eval import evaluate as evaluated

    assert artifact.run is not None
    run = Path(artifact.run)
    there = published.manifest(job.versions)
    with leased(job, run):
        found = tried(lambda: evaluated(artifact.resolve(job), run))
    names = [n for n in found if not n.startswith("start/")]
    if names:
        columns = {"start": {n: found.get(f"start/{n}") for n in names}, "trained": found, **({"published": there.get("metrics", {})} if there else {})}
        print(f"{'evaluation':<28}" + "".join(f" {title:>9}" for title in columns))
        for name in names:
            print(f"{name:<28}" + "".join(f" {'' if of.get(name) is None else f'{of[name]:.4f}':>9}" for of in columns.values()))
    print(f"gate: {gate.said(job, gate.comparisons(job, run, found))}", flush=True)
    return artifact.but(metrics={**artifact.metrics, **found})


def tried(act: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Raises what the last try raised; as Retryable, if it is of a kind that passes."""
    from ptf.credentials import redacted

    attempt = 0
    while True:
        attempt += 1
        try:
            return act()
        except Exception as error:
            if not passing(error):
                raise
            if attempt == TRIES:
                raise Retryable(f"the evaluation failed {TRIES} times, at last so: {redacted(str(error))}") from error
            said = str(error) if isinstance(error, Retryable) else told(error)
            print(f"{redacted(said)}\nthe evaluation is tried again ({attempt} of {TRIES - 1})", flush=True)
