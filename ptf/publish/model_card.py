"""The README of a published model: what it is, its metrics beside those of its starting model and of the version
published before, what it was made from, and how to serve it.

The card is read on other machines, so it names models and data sets by Hub ids and URIs, and shortens every local path
to its last part; the manifest beside it keeps the paths.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ptf.artifact import Artifact, evaluated, figure
from ptf.config import Job, dump, shown
from ptf.config.sections.data import Source
from ptf.data.sources import hub
from ptf.recipes import registry
from ptf.storage.hub import at_revision

SERVE = {
    "lm": "vllm serve {place}",
    "scalar": "vllm serve {place} --runner pooling    # its score: classify, with use_activation: false",
    "adapter": "vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules {name}={place}",
}
ABSOLUTE = re.compile(r"(?:file://|(?<![\w/.~-]))(?:~|/[\w.@+=%-]+)(?:/[\w.@+=%*-]+)+/?")  # of two parts at least
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def card(
    job: Job, artifact: Artifact, made_with: Mapping[str, Any], before: Mapping[str, Any] | None, gate: str
) -> str:
    """Return Markdown, with the header that model hubs read. `made_with` is the run's provenance, `before` the manifest
    of the version that counts now, and `gate` says how the model compares with what training started from."""
    recipe, head = job.recipe if isinstance(job.recipe, str) else job.recipe.use, registry.build(job).head
    packages = ", ".join(f"{name} {version}" for name, version in made_with["packages"].items())
    sources = [_source(name, source, artifact) for name, source in job.data.sources.items()]
    random = ", with random weights" if job.model.init == "random" else ""
    parts = {
        "": [
            f"Trained by ptf, recipe {recipe}, from `{_name(_start(job, artifact))}`{random}. "
            f"Licence: {job.publish.license or 'not stated'}.",
            "",
            *_serving(job, artifact, head),
        ],
        "Evaluation": [*_evaluation(artifact.metrics, before), "", f"Gate: {gate}."],
        "Data": ["| source | where | kind | weight | its files |", "|---|---|---|---|---|", *sources],
        "Made with": [
            f"ptf {made_with['ptf']}, Python {made_with['python']}, {packages}; {made_with['hardware']['device']}.",
            "",
            "```yaml",
            _shortened_config(job),
            "```",
        ],
    }
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in _header(job, artifact, recipe, head).items()),
        "---",
        "",
        f"# {artifact.run_name}",
    ]
    for title, text in parts.items():
        lines += ["", *([f"## {title}", ""] if title else []), *text]
    return "\n".join(lines) + "\n"


def _header(job: Job, artifact: Artifact, recipe: str, head: str) -> dict[str, Any]:
    """Return the metadata of the card, by the keys of the Hub's model cards. Only what the Hub can find is named: a
    base model and data sets that are files of this machine have no id."""
    task = "text-generation" if head == "lm" else "text-classification"
    is_adapter = job.publish.what == "adapter"
    base, results = base_model(_start(job, artifact)), _results(job, artifact.metrics, task)
    header = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": task,
        "tags": ["ptf", recipe, *(["lora"] if job.model.lora else [])],
        "license": job.publish.license,
        "base_model": base,
        "base_model_relation": base and ("adapter" if is_adapter else "finetune"),
        "datasets": sorted({repo for source in job.data.sources.values() if (repo := _repository(source))}),
        "model-index": results and [{"name": artifact.run_name, "results": results}],
    }
    return {key: value for key, value in header.items() if value}


def base_model(path: str) -> str | None:
    """Return the Hub's id of the model that a path names: the id itself, or of a directory the base model that its own
    card names; None where neither is known."""
    if not os.path.isdir(path):
        id, _ = at_revision(path)
        return id if HUB_ID.fullmatch(id) else None
    try:
        named = yaml.safe_load((Path(path) / "README.md").read_text().split("---\n", 2)[1])["base_model"]
    except (OSError, UnicodeDecodeError, IndexError, KeyError, TypeError, yaml.YAMLError):
        return None
    return named if isinstance(named, str) and HUB_ID.fullmatch(named) else None


def _results(job: Job, metrics: Mapping[str, float], task: str) -> list[dict[str, Any]]:
    """Return the evaluation as the entries of a card's `model-index`: one for each held-out source."""
    ranking = job.evaluate.ranking.sources if job.evaluate.ranking else {}
    results = []
    for name, source in {**job.data.validation, **job.evaluate.sources, **ranking}.items():
        values = {
            key.removesuffix(f"/{name}"): value
            for key, (_, value) in evaluated(metrics).items()
            if key.endswith(f"/{name}") and not key.startswith("baseline/")
        }
        if values:
            results.append(
                {
                    "task": {"type": task},
                    "dataset": {"name": name, "type": _repository(source) or name},
                    "metrics": [{"type": key, "name": key, "value": value} for key, value in values.items()],
                }
            )
    return results


def _serving(job: Job, artifact: Artifact, head: str) -> list[str]:
    kind, lora = "adapter" if job.publish.what == "adapter" else head, job.model.lora
    command = SERVE[kind].format(
        place=job.publish.hub or "DIRECTORY",
        base=base_model(_start(job, artifact)) or "BASE_MODEL",
        name=artifact.run_name,
        rank=lora.rank if lora else "",
    )
    lines = ["```", command, "```"]
    if not job.publish.hub:
        lines += ["", "`DIRECTORY` is where these files lie."]
    if job.publish.what == "both":
        lines += ["", "`adapter/` holds the LoRA adapter alone, in PEFT format."]
    return lines


def _start(job: Job, artifact: Artifact) -> str:
    return artifact.models.get(job.model.path, job.model.path)


def _repository(source: Source) -> str | None:
    """Return the Hub's id of a data set; None for files."""
    if source.kind == "tokenized" or source.path.startswith("prepare:"):
        return None
    repo = hub.parse_location(source.path)
    return repo.id if repo else None


def _name(path: str) -> str:
    """Return a path as others may read it: of a directory of this machine, the last part."""
    is_here = "://" not in path and (os.path.isabs(path) or os.path.lexists(path) or path.startswith(("~", ".")))
    return path.rstrip("/").rpartition("/")[2] if is_here or path.startswith("file://") else path


def _shortened_config(job: Job) -> str:
    """Return the job as YAML, without the paths of this machine: absolute ones, and relative ones that exist. Of each
    the last part is left, after `…/`."""
    text = ABSOLUTE.sub(lambda match: f"…/{match[0].rstrip('/').rpartition('/')[2]}", dump(shown(job)).rstrip())
    values = {token.value for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken)}
    relative = [value for value in values if "/" in value and os.path.lexists(value) and not os.path.isabs(value)]
    for path in sorted(relative, key=len, reverse=True):
        last = path.rstrip("/").rpartition("/")[2]
        text = re.sub(rf"(?<![\w/.-]){re.escape(path)}(?![\w.-])", f"…/{last}".replace("\\", r"\\"), text)
    return text


def _source(name: str, source: Source, artifact: Artifact) -> str:
    weight = "by rows" if source.sampling_weight is None else f"{source.sampling_weight:g}"
    where = _name(artifact.datasets.get(f"data.sources.{name}", source.path))
    return f"| {name} | `{where}` | {source.kind} | {weight} | {artifact.data.get(name, '')} |"


def _evaluation(metrics: Mapping[str, float], before: Mapping[str, Any] | None) -> list[str]:
    if not (rows := evaluated(metrics)):
        return ["Not evaluated."]
    columns = ["starting model", "this version", *([f"published before ({before['version']})"] if before else [])]
    lines = ["| metric | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, values in rows.items():
        cells = map(figure, (*values, *([before["metrics"].get(name)] if before else [])))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines
