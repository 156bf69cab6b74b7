"""Greedy pass rates and pass@k on held-out prompts, while training and in the evaluate stage."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ptf.data.response_record import response_record
from ptf.data.trajectory import NoResult, Prompt, Reward, Trajectory
from ptf.errors import UserError
from ptf.rl.cluster import RoleGroup
from ptf.rl.rewards.by_source import Rewards, score_groups


def pass_rates(
    rollout: RoleGroup,
    rewards: Rewards | None,
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
        groups = rollout.call("rollout", list(prompts), version, f"{key} {name}", n, max_new_tokens, temperature)
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
    responses = [response_record(t) for t in greedy]
    return rates, responses
