"""The section `evaluate`: what the evaluate stage generates, scores and ranks."""

from typing import Annotated, Any, Literal

from pydantic import Field

from ptf.config.section import Plugin, Positive, Section, Temperature, changeable
from ptf.config.sections.data import Source


class RankingConfig(Section):
    """Rank a catalogue (ptf.events.prepare) after each held-out history, and compare the list with what followed:
    `all/ndcg@10/NAME`, `new/ndcg@10/NAME`, …. The metrics of each user are written to `RUN/ranked`."""

    sources: dict[str, Source] = Field(min_length=1)
    """Histories by name: prompts with `history` and `future`."""
    catalogue: str = "prepare:catalogue.json"
    """The catalogue of items; `vectors.npy` is read from the same directory."""
    k: Positive = 10
    """Length of the list."""
    value_weight: Annotated[float, Field(ge=0)] = 0.0
    """Items are ranked by log-probability + this weight · log(value), without those of value 0. Baselines are ranked by
    log(score) + the same, so `ease` and `mix`, whose scores may be below 0, are refused."""
    baselines: dict[str, dict[str, Any]] = {}
    """Rivals that are ranked for the same users, by name, with their settings (`{}`: the defaults of
    ptf.events.baselines): `{tifu_knn: {neighbours: 100}, ease: {}}`. The metrics are `baseline/NAME/all/ndcg@10/SOURCE`
    and so on. They are fitted on `histories.jsonl`, which is read from the catalogue's directory."""


class EvaluateConfig(Section):
    """The evaluate stage: generate on held-out prompts and score with the reward."""

    sources: dict[str, Source] = changeable({})
    """Held-out prompts by name; the metrics are `greedy_pass_rate/NAME`, `greedy_reward/NAME` and so on. Offline
    recipes also measure the loss of `data.validation`, whether or not there are sources here."""
    reward: Plugin | None = changeable(None)
    """Score of a response; 1 or more counts as a pass. Give a function with scores 0 and 1 here if `rollout.reward` has
    another scale; default: `rollout.reward`."""
    metrics: dict[str, Plugin] = changeable({})
    """More metrics by name: a function of all greedy responses to a source that returns a number. Each is a record with
    `row`, `response`, `reward` and `no_result` (the reason where there is no reward, otherwise null)."""
    ranking: RankingConfig | None = changeable(None)
    """Rank a catalogue and compare it with what users did next."""
    engine: Literal["auto", "vllm", "native"] | Plugin = changeable("auto")
    """What generates the responses; it takes the values of `rollout.engine`, and `auto`. `auto`: vllm if there is a
    GPU, vllm is installed, `compute.launcher` is ray and the job has no `model.replace`; otherwise native."""
    limit: Positive | None = changeable(None)
    """Largest number of prompts of each source; the first prompts are used. Default: 512; on a CPU, fewer (16 at least)
    where that many would take it longer than ten minutes."""
    samples_per_prompt: Positive | None = changeable(None)
    """k of pass@k, the share of prompts for which any of k sampled responses passes; `greedy_pass_rate` is the share
    for which the one greedy response passes. Default: 8; on a CPU that would sample for longer than ten minutes, 1: no
    pass@k, unless `publish.metric` is one."""
    temperature: Temperature = changeable(1.0)
    """Sampling temperature of pass@k."""
    max_new_tokens: Positive = changeable(256)
    """Largest number of tokens of a held-out response, in the evaluate stage and in validation. It is not taken from
    `rollout.max_new_tokens`: set both, or longer responses are cut here."""

    @property
    def prompts(self) -> int:
        """The largest number of prompts of each source."""
        return self.limit or 512

    @property
    def samples(self) -> int:
        """The number of samples of each prompt."""
        return self.samples_per_prompt or 8
