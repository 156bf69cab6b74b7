"""The schema of a config: every key of ptf. A `Job` is one YAML file: what to train, from what data, how, and where.

Keys are declared in the sections (ptf.config.sections), those of a recipe in its `config.py`, and nowhere else. Each is
*fixed* on resume (changing it would change what is trained) unless it is declared with `changeable(...)`. Paths are
relative to the working directory and may be local or any fsspec URI; two prefixes point at what other stages make:
`prepare:NAME` (a file or directory that `data.prepare` wrote) and `job:CONFIG` (the model which that config last
published).
"""

from functools import cache
from typing import Any, Literal

from pydantic import create_model, model_validator

from ptf.config.recipes import RECIPES, algo_config_of
from ptf.config.rules import broken
from ptf.config.section import AlgoConfig, Count, Plugin, Section, changeable
from ptf.config.sections.checkpoint import CheckpointConfig
from ptf.config.sections.compute import ComputeConfig
from ptf.config.sections.data import DataConfig, Source
from ptf.config.sections.evaluate import EvaluateConfig
from ptf.config.sections.flow import FlowConfig
from ptf.config.sections.model import ModelConfig
from ptf.config.sections.publish import PublishConfig
from ptf.config.sections.rollout import RolloutConfig
from ptf.config.sections.track import TrackConfig
from ptf.config.sections.train import TrainConfig


class Job(Section):
    """The validated config of a training job; one job can have many runs.

    The keys that `algo` may have depend on `recipe`.
    """

    recipe: str | Plugin
    """Name of a recipe of ptf, or `use: pkg.mod:MyRecipe`."""
    output: str = changeable("runs")
    """Directory of the runs, each in a directory of its name. A run is found by `output` and its name: to continue it
    with another `output`, move its directory there first."""
    seed: Count = 0
    """Seed of everything random."""
    model: ModelConfig
    data: DataConfig
    algo: AlgoConfig | dict[str, Any] = {}
    """Settings of the recipe, which the class of its `config` declares."""
    rollout: RolloutConfig | None = None
    train: TrainConfig
    compute: ComputeConfig = ComputeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    publish: PublishConfig = PublishConfig()
    flow: FlowConfig = FlowConfig()

    @property
    def versions(self) -> str:
        """Directory or URI below which its models are published."""
        return (self.publish.to or f"{self.output}/published").rstrip("/")

    @property
    def sources_by_section(self) -> dict[str, dict[str, Source]]:
        """Return the sources for training, for validation and for held-out prompts, by section and name."""
        return {
            "data.sources": self.data.sources,
            "data.validation": self.data.validation,
            "evaluate.sources": self.evaluate.sources,
        }

    @property
    def online_rollout(self) -> RolloutConfig:
        """The section `rollout`, which every job of an online recipe has."""
        assert self.rollout is not None
        return self.rollout

    @property
    def verify_bytes(self) -> float:
        """Most bytes of one directory that are hashed before it is used; if it has more, only sizes are compared."""
        return self.checkpoint.sha256_max_gib * 2**30

    @model_validator(mode="after")
    def _agrees(self) -> "Job":
        if errors := broken(self):
            raise ValueError("\n".join(errors))
        return self


class PluginJob(Job):
    """A job whose recipe is a plugin."""

    recipe: Plugin  # type: ignore[assignment]
    algo: dict[str, Any] = {}  # type: ignore[assignment]


@cache
def job_of(recipe: str) -> type[Job]:
    """Return the `Job` whose `algo` and `rollout` are typed as the algorithm's `config.py` says."""
    algo_config = algo_config_of(recipe)
    required = any(field.is_required() for field in algo_config.model_fields.values())
    fields: dict[str, Any] = {
        "recipe": (Literal[recipe], ...),
        "algo": (algo_config, ... if required else algo_config()),
        "rollout": (RolloutConfig, ...) if algo_config.online else (None, None),
    }
    return create_model(f"{recipe.upper()}Job", __base__=Job, __module__=__name__, **fields)


def jobs() -> dict[str, type[Job]]:
    """Name of each algorithm of ptf → its Job."""
    return {recipe: job_of(recipe) for recipe in RECIPES}


def online_recipes() -> tuple[str, ...]:
    """Return the names of the recipes of ptf that train on what they generate."""
    return tuple(recipe for recipe in RECIPES if algo_config_of(recipe).online)
