"""The README of a published model: what it is, how it did beside what it began with and what was published before, what it was made of, how to serve it."""

import json
from collections.abc import Mapping
from typing import Any

from ptf.config import Job, dump, shown
from ptf.config.schema import Source
from steps.artifact import Artifact

SERVE = {"lm": "vllm serve {place}", "scalar": "vllm serve {place} --runner pooling    # its score: classify, with use_activation: false"}


def card(job: Job, artifact: Artifact, made: Mapping[str, Any], before: Mapping[str, Any] | None, gate: str) -> str:
    """Markdown, with the header that model hubs read. `made`: what the run was made with; `before`: the manifest of the version that counts now;
    `gate`: how it compares with what training started from."""
    from ptf.recipes import registry

    recipe, head = job.recipe if isinstance(job.recipe, str) else job.recipe.use, registry.build(job).head
    began = artifact.models.get(job.model.path, job.model.path)
    random = ", with random weights" if job.model.init == "random" else ""
    header = {"library_name": "transformers", "pipeline_tag": "text-generation" if head == "lm" else "text-classification", "tags": ["ptf", recipe]}
    if job.publish.license:
        header["license"] = job.publish.license
    packages = ", ".join(f"{name} {version}" for name, version in made["packages"].items())
    sources = [_source(name, source, artifact) for name, source in job.data.sources.items()]
    kept = dump(shown(job)).rstrip()
    parts = {
        "": [f"Trained by ptf, recipe {recipe}, from `{began}`{random}. Licence: {job.publish.license or 'not stated'}.", "",
             "```", SERVE[head].format(place=f"{job.versions}/{artifact.lineage}"), "```"],
        "Evaluation": [*_evaluation(artifact.metrics, before), "", f"Gate: {gate}."],
        "Data": ["| source | where | kind | weight | its files |", "|---|---|---|---|---|", *sources],
        "Made with": [f"ptf {made['ptf']}, Python {made['python']}, {packages}; {made['hardware']['device']}.", "", "```yaml", kept, "```"],
    }  # fmt: skip
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in header.items()), "---", "", f"# {artifact.lineage}"]
    for title, said in parts.items():
        lines += ["", *([f"## {title}", ""] if title else []), *said]
    return "\n".join(lines) + "\n"


def _source(name: str, source: Source, artifact: Artifact) -> str:
    """A row of the table of sources."""
    weight = "by rows" if source.weight is None else f"{source.weight:g}"
    where = _where(source, artifact.commits.get(f"data.sources.{name}"))
    return f"| {name} | {where} | {source.kind} | {weight} | {artifact.data.get(name, '')} |"


def _where(source: Source, commit: str | None) -> str:
    """The path of a source and what was chosen of it."""
    chosen = {"config": source.config, "split": source.split, "commit" if commit else "revision": commit or source.revision}
    return f"`{source.path}`" + "".join(f", {key} {value}" for key, value in chosen.items() if value)


def _evaluation(metrics: Mapping[str, float], before: Mapping[str, Any] | None) -> list[str]:
    """A table: a metric by line, of the start, of this version and of the one before."""
    names = sorted(name for name in metrics if not name.startswith(("start/", "train/")))
    if not names:
        return ["Not evaluated."]
    then = before["metrics"] if before else {}
    columns = ["at the start", "now", *([f"published before ({before['version']})"] if before else [])]
    cell = lambda value: "" if value is None else f"{value:.4g}"  # noqa: E731
    lines = ["| metric | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in names:
        values = [metrics.get(f"start/{name}"), metrics[name], *([then.get(name)] if before else [])]
        lines.append(f"| {name} | " + " | ".join(map(cell, values)) + " |")
    return lines
