"""Greedy pass rates and pass@k on held-out prompts, while training and in the evaluate stage."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ptf.compute.device_defaults import computes_on_gpu
from ptf.compute.meter import peak_flops
from ptf.config import Job
from ptf.data.trajectory import NoResult, Prompt, Reward, Trajectory, response_record
from ptf.errors import UserError
from ptf.model import model_files
from ptf.model.kernels import matrix_product
from ptf.rl.cluster import RoleGroup
from ptf.rl.rewards.scoring import Rewards, score_groups
from ptf.workspace import progress

CPU_FLOPS = 1e13  # of an evaluation by default: four minutes at 40 GFLOP/s, which two cores with AVX2 reach
LEAST = 16  # prompts of each source, however long they take
SHARE = 0.4  # of the peak of a CPU's products, which the native engine reaches with 64 responses or more

Prompts = dict[str, list[Prompt]]


def affordable(prompts: Prompts, job: Job, directory: Path, models: int, samples: int = 0) -> tuple[Prompts, Job]:
    """Return the prompts of each source to measure, and the job with the number of samples of each; print how many
    tokens and how much time that is.

    On a CPU, what `evaluate.limit` and `evaluate.samples_per_prompt` leave open is lowered until `models` of the
    size of the one in the directory need no more than `CPU_FLOPS`. `samples`: in place of the job's.
    """
    config, gpu = job.evaluate, computes_on_gpu(job.compute)
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    flops = 2 * weights / model_files.export_dtype(directory).itemsize  # of a token
    samples, read = samples or config.samples, sum(map(len, prompts.values()))

    def tokens() -> int:
        lengths = [len(prompt.tokens) for of_source in prompts.values() for prompt in of_source]
        passes, responses = (2, 1 + samples) if samples > 1 else (1, 1)  # each pass reads the prompts
        return models * (passes * sum(lengths) + responses * len(lengths) * config.max_new_tokens)

    if not gpu and flops * tokens() > CPU_FLOPS:
        named = (job.publish.metric or "", *job.publish.guards)
        if config.samples_per_prompt is None and not any(name.startswith("pass@") for name in named):
            samples = 1
        share = CPU_FLOPS / (flops * tokens())
        if config.limit is None and share < 1:
            prompts = {name: some[: max(LEAST, int(share * len(some)))] for name, some in prompts.items()}
    time = ""
    if not gpu:
        rate = SHARE * peak_flops(torch.device("cpu"), job.train.precision, matrix_product.linear)
        time = f", about {max(1, round(flops * tokens() / rate / 60))} min"
    what = f"{sum(map(len, prompts.values()))} of {read} prompts, greedy" + f" and {samples} samples" * (samples > 1)
    print(f"evaluate: {what}, by {models} models: at most {tokens():,} tokens{time}", flush=True)
    return prompts, job.model_copy(update={"evaluate": config.model_copy(update={"samples_per_prompt": samples})})


def pass_rates(
    rollout: RoleGroup,
    rewards: Rewards,
    prompts: Sequence[Prompt],
    version: int,
    key: str,
    *,
    samples: int,
    temperature: float,
    max_new_tokens: int,
    max_no_result_share: float,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return pass rates as shares of the prompts, and a record of each greedy response.

    The rates are `greedy_pass_rate` (the one greedy response passes), `greedy_reward` (its mean reward), and with
    samples > 1 `pass@k` (any of k sampled responses passes). A response passes if its reward is 1 or more. Responses
    without a result are counted in `no_result_share` and left out. Raises UserError if their share exceeds
    `max_no_result_share`, because the remaining responses would be a biased sample.
    """

    def answer(n: int, temperature: float, name: str) -> list[tuple[Trajectory, ...]]:
        with progress.phase(f"{key} {name}", n * len(prompts), "responses") as phase:
            arguments = (list(prompts), version, f"{key} {name}", n, max_new_tokens, temperature)
            groups = rollout.call("rollout", *arguments, on_result=lambda _, group: phase.advance(len(group)))
        return score_groups(rewards, groups)

    greedy = [group[0] for group in answer(1, 0.0, "greedy")]
    values = np.array([t.outcome.value for t in greedy if isinstance(t.outcome, Reward)])
    failed = [t.outcome.reason for t in greedy if isinstance(t.outcome, NoResult)]
    if len(failed) > max_no_result_share * len(greedy) or not len(values):
        raise UserError(
            f"{len(failed)} of {len(greedy)} held-out responses have no result (permitted share: "
            f"{max_no_result_share:g}); the first reason: {failed[0] if failed else 'there are no prompts'}"
        )
    rates = {
        "greedy_pass_rate": float((values >= 1).mean()),
        "greedy_reward": float(values.mean()),
        "no_result_share": len(failed) / len(greedy),
    }
    if samples > 1:
        passed = [
            [t.outcome.value >= 1 for t in g if isinstance(t.outcome, Reward)]
            for g in answer(samples, temperature, "sampled")
        ]
        rates[f"pass@{samples}"] = float(np.mean([any(p) for p in passed if p]))
    return rates, [response_record(t) for t in greedy]
