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
    or `both`, the merged model with the adapter in `adapter/` beside it. With `model.tokens`, `merged` alone."""
    gate: Literal["starting_model", "off"] = changeable("starting_model")
    """The second of three checks before a version is published: the comparison with the model that training started
    from. (The first is of the exported files; the third, with `metric`, is against the published version.)
    `starting_model`: the improvement of each held-out row (negative if the trained model is worse), and the 95 %
    interval of its mean. The model is refused if the upper end of the interval is below the limit: 0, or
    −`max_regression` where `metric` is compared. `metric` is compared if it is set and was measured on the starting
    model; otherwise the default metrics, which are the first of these groups that was measured on the starting model:
    mean reward and pass rate of greedy responses; NDCG of rankings; held-out losses. A metric that is not stored by
    row (`pass@k`, `accuracy`, `auc`, your own `evaluate.metrics`) has no interval: the difference of the two numbers
    itself is compared with the limit. A run that was not evaluated is refused. `off`: publish without this
    comparison; the other two checks are still made."""
    metric: str | None = changeable(None)
    """The metric of the evaluate stage that decides publication, such as `greedy_pass_rate/test`. The new model may not
    be worse on it than its starting model (the gate: by a 95 % interval; if the metric was not measured on the starting
    model, on the default metrics), nor than the published version (by plain difference). Without `metric`, the gate
    compares the default metrics, and the new model is not compared with the published version."""
    metric_direction: Literal["min", "max"] = changeable("max")
    """Whether lower (`min`) or higher (`max`) is better."""
    max_regression: Annotated[float, Field(ge=0)] = changeable(0.0)
    """How much worse the new model may be on `metric`, in its unit; it does not apply to default metrics. Against the
    starting model: refused if the 95 % interval of the improvement lies wholly below −`max_regression`. Against the
    published version: refused if new < published − `max_regression` (with `metric_direction: min`, if new >
    published + `max_regression`). In the retrain flow, 0 also refuses an equal value."""
    hub: str | None = changeable(None)
    """Repository of the Hugging Face Hub (`team/name`) that each version is also pushed to. It is created, as a private
    one, if it does not exist. The token is the Hub's own (`HF_TOKEN`)."""
    license: str | None = changeable(None)
    """For the model card: the model's licence, by its SPDX name (`apache-2.0`)."""
