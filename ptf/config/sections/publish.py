"""The section `publish`: what a version holds, and what may become one."""

from typing import Annotated, Literal

from pydantic import Field

from ptf.config.section import Section, changeable

# metrics of which less is better
ERRORS = {"loss", "kl", "ce", "divergence", "calibration_error", "no_result_share"}


class PublishConfig(Section):
    """The publish stage."""

    to: str | None = changeable(None)
    """Directory or URI of the versions and of the pointer to the current one; default `{output}/published`."""
    what: Literal["merged", "adapter", "both"] = changeable("merged")
    """What a version holds: the `merged` model; the `adapter` of `model.lora` alone, in PEFT format with the tokenizer;
    or `both`, the merged model with the adapter in `adapter/` beside it. With `model.tokens`, `merged` alone."""
    gate: Literal["starting_model", "off", "unmeasured"] = changeable("starting_model")
    """The second of three checks before a version is published: the comparison with the model that training started
    from, on the same held-out items (docs/publish.md). `starting_model`: a model that is worse beyond chance is
    refused, and so is a run that was not evaluated. `off`: neither is; the other two checks are still made.
    `unmeasured`: a run that was not evaluated is refused, but nothing is compared, since the evaluate stage does not
    measure the starting model, whose metrics begin with `starting_model/`."""
    metric: str | None = changeable(None)
    """The metric of the evaluate stage that decides publication, such as `greedy_pass_rate/test`. Of a loss or another
    measure of errors less is better; of all others, also of your own `evaluate.metrics`, more is. The new model may not
    be worse on it than its starting model (the gate: by a 95 % interval; if the metric was not measured on the starting
    model, on the default metrics), nor than the published version (by plain difference). Without `metric`, the gate
    compares the default metrics, and the new model is not compared with the published version."""
    max_regression: Annotated[float, Field(ge=0)] = changeable(0.0)
    """How much worse the new model may be on `metric`, in its unit; it does not apply to default metrics. Against the
    starting model: refused if the 95 % interval of the improvement lies wholly below −`max_regression`. Against the
    published version: refused if new < published − `max_regression` (of a loss, if new > published +
    `max_regression`). In the retrain flow, 0 also refuses an equal value."""
    guards: dict[str, Annotated[float, Field(ge=0)]] = changeable({})
    """More metrics on which the new model may not be worse beyond chance, and how much worse each may be, in its unit:
    `{all/ndcg@10/next: 0.003}`. They are compared with the starting model, as `metric` is, by a 95 % interval. A name
    like `baseline/tifu_knn/all/ndcg@10/next` compares with that one of `evaluate.ranking.baselines`, user by user."""
    hub: str | None = changeable(None)
    """Repository of the Hugging Face Hub (`team/name`) that each version is also pushed to. It is created, as a private
    one, if it does not exist. The token is the Hub's own (`HF_TOKEN`)."""
    license: str | None = changeable(None)
    """For the model card: the model's licence, by its SPDX name (`apache-2.0`)."""

    @property
    def less_is_better(self) -> bool:
        """Whether a lower value of `metric` is the better one."""
        return is_error(self.metric or "")

    @property
    def measures_start(self) -> bool:
        """Whether the evaluate stage also measures the model that training started from."""
        return self.gate != "unmeasured"


def is_error(metric: str) -> bool:
    """Return whether a lower value of the metric is the better one."""
    return metric.removeprefix("train/").split("/")[0] in ERRORS
