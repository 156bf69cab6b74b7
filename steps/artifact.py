"""What passes from stage to stage: names of things, never the things. Small enough for any orchestrator to store."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Artifact:
    lineage: str  # names the training run; every resume keeps it
    prepared: str | None = None  # directory that data.prepare wrote
    start: str | None = None  # directory of the model that training starts from, where it was a `job:`
    tokenized: Mapping[str, str] = field(default_factory=dict)  # source → directory of tokenized parquet
    model: str | None = None  # Hugging Face directory that training exported
    metrics: Mapping[str, float] = field(default_factory=dict)  # of training and evaluation, by dotted name
    published: str | None = None  # URI of the published version

    def but(self, **changes: Any) -> "Artifact":
        return replace(self, **changes)
