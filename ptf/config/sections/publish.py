"""The section `publish`: what a version holds, and what may become one."""

from typing import Annotated, Literal

from pydantic import Field

from ptf.config.section import Section, changeable


class PublishConfig(Section):
    """The publish stage."""

    to: str | None = changeable(None)
    """Directory or URI of the versions and of the pointer to the current one; default `{output}/published`."""
    what: Literal["merged", "adapter", "both"] = changeable("merged")
    """What a version holds: the `merged` model; the `adapter` of `model.lora` alone, in PEFT format with the tokenizer;
    or `both`, the merged model with the adapter in `adapter/` beside it."""
    gate: Literal["starting_model", "off"] = changeable("starting_model")
    """One of two comparisons before a version is published; the other, with the published version, is `metric`.
    `starting_model`: refuse to publish a model that is worse than the one that training started from. It is worse if
    the whole 95 % interval of the difference on the same held-out rows lies below 0 (with `metric`, below
    -`max_regression`). The comparison uses `metric` if it is set and was measured on the starting model; otherwise the
    default metrics: greedy responses, rankings or held-out losses, whichever of these the job has first. A metric that
    is not stored by row (`pass@k`, `accuracy`, `auc`, your own `evaluate.metrics`) has no interval: any change for the
    worse beyond `max_regression` is refused. `off`: publish without this comparison; `metric` is still compared."""
    metric: str | None = changeable(None)
    """A metric of the evaluate stage, such as `greedy_pass_rate/test`. A version is refused if its value is worse than
    the published version's by more than `max_regression`. Where it was not measured on the starting model, `gate`
    compares the default metrics."""
    metric_direction: Literal["min", "max"] = changeable("max")
    """Whether lower (`min`) or higher (`max`) is better."""
    max_regression: Annotated[float, Field(ge=0)] = changeable(0.0)
    """By how much `metric` may be worse (lower, or with `metric_direction: min` higher) and still be published."""
    hub: str | None = changeable(None)
    """Repository of the Hugging Face Hub (`team/name`) that each version is also pushed to. It is created, as a private
    one, if it does not exist. The token is the Hub's own (`HF_TOKEN`)."""
    license: str | None = changeable(None)
    """For the model card: the model's licence, by its SPDX name (`apache-2.0`)."""
