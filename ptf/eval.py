"""The evaluate stage: what a checkpoint answers on held-out prompts, and how often it is right."""

import json
from collections.abc import Mapping
from pathlib import Path

from ptf import storage
from ptf.config import Job
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model import bridge
from ptf.rl.fit import clustered, held_out_prompts, sampler_spec
from ptf.rl.rewards import Rewards
from ptf.rl.validate import pass_rates
from ptf.train.start import extended, start_directory, tokenizer_directory


def evaluate(job: Job, run: Path) -> dict[str, float]:
    """pass@1, pass@k and mean reward on each of `evaluate.sources`, of the trained model and, as `start/…`, of the model it started from.
    The greedy answers are left in `run/answers/`."""
    knobs = job.evaluate
    reward = knobs.reward or (job.rollout.reward if job.rollout else None)
    if not knobs.sources or reward is None:
        return {}
    base = bridge.locate(job.model.path, job.model.revision)
    spec, base = extended(job.model, base, run, job.seed)
    tokenizer_path = tokenizer_directory(spec, base, run)
    prompts = held_out_prompts(job.evaluate.sources, Tokenizer.load(tokenizer_path), knobs.limit)
    models = {"": run / "model"} | ({"start/": start_directory(spec, base, run, tokenizer_path, job.seed)} if knobs.start else {})
    metrics: dict[str, float] = {}
    length = max(len(p.tokens) for asked in prompts.values() for p in asked) + knobs.max_new_tokens
    max_no_result = job.rollout.max_no_result if job.rollout else 0.1
    rewards = Rewards(reward)
    try:
        with clustered(job, run, len(models), local=knobs.engine == "native") as cluster:  # our own decoder needs no process of its own
            for prefix, directory in models.items():
                group = cluster.start(sampler_spec(job, directory, tokenizer_path, run, engine=knobs.engine, version=0, workers=1, length=length))
                with cluster.phase(group, "evaluate"):
                    for name, asked in prompts.items():
                        rates, answers = pass_rates(
                            group, rewards, asked, 0, f"evaluate {name}", samples=knobs.samples, temperature=knobs.temperature,
                            max_new_tokens=knobs.max_new_tokens, max_no_result=max_no_result,
                        )  # fmt: skip
                        metrics |= {f"{prefix}{name}/{key}": value for key, value in rates.items()}
                        text = "".join(json.dumps(a) + "\n" for a in answers)
                        storage.write_text(str(run / "answers" / f"{prefix.replace('/', '_')}{name}.jsonl"), text)
    finally:
        rewards.close()
    return metrics


def refuse_regression(metrics: Mapping[str, float], published: Mapping[str, float], metric: str, max_drop: float) -> None:
    """Raises UserError if `metric` is missing or fell by more than `max_drop` below what is published."""
    if metric not in metrics:
        raise UserError(f"publish.metric: the evaluation has no {metric!r}; it has {', '.join(sorted(metrics)) or 'nothing'}")
    before = published.get(metric)
    if before is not None and not metrics[metric] >= before - max_drop:
        raise UserError(f"not published: {metric} is {metrics[metric]:.4g}, the published version has {before:.4g} (publish.max_drop {max_drop:g})")
