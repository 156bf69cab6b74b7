"""What a step's responses were worth: metrics over their outcomes, and the end of a run that has too few."""

from collections.abc import Iterable, Sequence

import numpy as np

from ptf.config.sections.rollout import RolloutConfig
from ptf.data.trajectory import Group, NoResult, Reward
from ptf.errors import UserError


def rewards_differ(group: Group) -> bool:
    """Return whether the rewards of a group's responses differ, before length penalties and a KL reward."""
    return len({t.outcome.value for t in group if isinstance(t.outcome, Reward)}) > 1


def outcome_metrics(
    groups: Sequence[Group], version: int, config: RolloutConfig, by_source: bool = False
) -> dict[str, float]:
    """Return metrics over the rewards of all responses of a step, which trains the weights of `version`; `by_source`:
    also those of each data source.

    Raises UserError if too many responses have no result.
    """
    trajectories = [t for group in groups for t in group]
    rewards = [(t.prompt.source, t.outcome.value) for t in trajectories if isinstance(t.outcome, Reward)]
    values = np.array([value for _, value in rewards])
    reasons = [t.outcome.reason for t in trajectories if isinstance(t.outcome, NoResult)]
    if reasons:
        _report_no_results(reasons, len(trajectories), version, config)
    versions = [generation.versions for t in trajectories for generation in t.generations]
    if not versions:
        raise UserError(f"step {version + 1}: policy.trajectory(calls=[…]) selected no response to train on")
    truncated = sum(not t.complete for t in trajectories if isinstance(t.outcome, Reward))
    metrics: dict[str, float] = {}
    if len(values):
        metrics = {"reward": float(values.mean()), "reward_std": float(values.std())}
    if by_source:
        metrics |= _means("source_reward", rewards)
    metrics |= {
        "staleness": float((version - np.concatenate(versions)).mean()),
        "no_result_share": len(reasons) / len(trajectories),
        "response_length": float(np.mean([t.num_sampled_tokens for t in trajectories])),
        "truncated_share": truncated / max(len(values), 1),
        "sampled_tokens": float(sum(t.num_sampled_tokens for t in trajectories)),
    }
    if config.is_multi_turn:
        metrics["turns"] = float(np.mean([len(t.generations) for t in trajectories]))
    metrics |= _means("episode", (one for t in trajectories for one in t.counts.items()))
    metrics["zero_variance_share"] = 1 - sum(map(rewards_differ, groups)) / len(groups)
    return metrics


def reward_source(config: RolloutConfig) -> str:
    """Return the name of the reward function, model or environment, for messages."""
    found = ["the harness"] * bool(config.harness)
    found += [f"the rollout function {config.play.use}"] if config.play else []
    if rewards := ", ".join(what.use for what in config.reward.values()):
        found.append(f"the reward {rewards}")
    elif config.reward_model:
        found.append("the reward model")
    names = (what.use for what in config.environment.values())
    return " or ".join(found) or f"the environment {', '.join(names)}"


def _report_no_results(reasons: Sequence[str], responses: int, version: int, config: RolloutConfig) -> None:
    """Print that responses have no result. Raises UserError if they are too many."""
    count = f"step {version + 1}: {len(reasons)} of {responses} responses have no result"
    first_reason = f"the first reason, from {reward_source(config)}: {reasons[0]}"
    print(f"{count}; {first_reason}", flush=True)
    if len(reasons) > config.max_no_result_share * responses:
        raise UserError(
            f"{count} (rollout.max_no_result_share is {config.max_no_result_share:g}); {first_reason}. Fix its cause "
            "(ptf try CONFIG plays episodes without training), or raise rollout.max_no_result_share, which may change "
            "on resume"
        )


def _means(prefix: str, pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean of each name's values as PREFIX/NAME."""
    values: dict[str, list[float]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(float(value))
    return {f"{prefix}/{name}": float(np.mean(each)) for name, each in sorted(values.items())}
