"""Rules between keys of a job, for combinations that do not work.

Each rule returns its problems as lines that begin with the key to change. `RULES` lists them in the order in which
their problems are reported.
"""

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ptf.config.cron import schedule
from ptf.config.rollout_rules import pool_errors, prompt_errors, rollout_errors
from ptf.config.section import AlgoConfig
from ptf.config.sections.train import TrainConfig
from ptf.workspace.credentials import is_secret

if TYPE_CHECKING:
    from ptf.config.schema import Job

NAME = re.compile(r"[^\W_][^/\\\x00-\x1f]{0,99}")


def name_errors(job: "Job") -> list[str]:
    """Return the problems of names that, as part of a path, could lead out of their directory."""
    by_key = job.sources_by_section
    if job.evaluate.ranking:
        by_key["evaluate.ranking.sources"] = job.evaluate.ranking.sources
    rule = (
        "is not a valid source name: a name begins with a letter or a digit, contains no slash and has at most "
        "100 characters"
    )
    return [
        f"{key}: {name!r} {rule}" for key, sources in by_key.items() for name in sources if not NAME.fullmatch(name)
    ]


def secret_errors(job: "Job") -> list[str]:
    """Return a problem for each secret that is written into the config: configs are stored, shown and published."""
    rule = (
        "is a secret, and a config is stored, shown and published; write env:NAME, "
        "the variable that holds it where it is needed"
    )
    return [f"{key}: {rule}" for key in _secrets(job.model_dump(), "")]


def _secrets(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _secrets(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _secrets(inner, f"{key}.{i}")
    elif is_secret(value, key.rpartition(".")[2], variable=key.startswith("flow.stages.") and ".env_vars." in key):
        yield key


def data_parallel_errors(job: "Job") -> list[str]:
    """Return a problem for each number that must be a multiple of the number of data-parallel ranks and is not."""
    workers, mesh = job.compute.workers, job.compute.mesh
    data_ranks, divisor = (
        (workers // mesh.tensor_parallel_size or 1),
        f"compute.workers ({workers})"
        + (
            f" / compute.mesh.tensor_parallel_size ({mesh.tensor_parallel_size})"
            if mesh.tensor_parallel_size > 1
            else ""
        ),
    )
    dealt = (
        {}
        if job.rollout
        else {"data.partitions": job.data.partitions, "train.global_batch_sequences": job.train.global_batch_sequences}
    )
    return [f"{key} ({value}) must be a multiple of {divisor}" for key, value in dealt.items() if value % data_ranks]


def launch_errors(job: "Job") -> list[str]:
    """Return the problems of where the run runs and writes, of how its workers divide the model, and of engines that
    need a process of their own, which only Ray gives."""
    workers, mesh, errors = job.compute.workers, job.compute.mesh, []
    if "://" in job.output:
        errors.append("output must be a directory on this machine; publish.to may be a URI")
    if workers % (mesh.replicate * mesh.tensor_parallel_size):
        errors.append(
            f"compute.mesh: replicate ({mesh.replicate}) × tensor_parallel_size ({mesh.tensor_parallel_size}) "
            f"must divide compute.workers ({workers})"
        )
    if job.compute.launcher == "local" and workers > 1:
        errors.append("compute.launcher: local is one process; use ray or torchrun for compute.workers > 1")
    engines = {
        "rollout.engine": job.rollout.engine if job.rollout and job.compute.launcher == "local" else None,
        "evaluate.engine": job.evaluate.engine,
    }
    errors += [
        f"{key}: vllm needs a process of its own, which compute.launcher: {job.compute.launcher} does not give; "
        "use native"
        for key, engine in engines.items()
        if engine == "vllm" and job.compute.launcher != "ray"
    ]
    return errors


def held_out_errors(job: "Job") -> list[str]:
    """Return the problems of held-out data and of the metrics on it."""
    errors = []
    if job.evaluate.sources and not (job.evaluate.reward or job.rollout):
        errors.append("evaluate.sources needs evaluate.reward to score the responses")
    if job.evaluate.metrics and not job.evaluate.sources:
        errors.append(
            "evaluate.metrics needs evaluate.sources: metrics are computed from the responses to held-out prompts"
        )
    taken = {"greedy_pass_rate", f"pass@{job.evaluate.samples}", "greedy_reward", "no_result_share"}
    errors += [
        f"evaluate.metrics.{name}: the name of a metric must not be {', '.join(sorted(taken))} or contain a slash; "
        "choose another"
        for name in job.evaluate.metrics
        if name in taken or "/" in name
    ]
    return errors


def deployment_errors(job: "Job") -> list[str]:
    """Return the problems of when the flow runs and of what it publishes."""
    errors = []
    if job.flow.cron is not None and not schedule(job.flow.cron):
        errors.append(
            f"flow.cron: {job.flow.cron!r} is not a schedule: give minute, hour, day of the month, month and day of "
            "the week, like '0 3 * * 1'"
        )
    if job.publish.what != "merged" and job.model.lora is None:
        errors.append(f"publish.what: {job.publish.what} needs model.lora, which trains the adapter")
    if job.publish.what != "merged" and job.model.tokens is not None:
        errors.append(
            f"publish.what: {job.publish.what} publishes an adapter, and the base model of this one has the tokens of "
            "model.tokens, which no published model has; use merged"
        )
    return errors


def schedule_fault(train: TrainConfig, steps: int | None) -> str | None:
    """Return why warm-up and decay do not fit into a run of that many steps (None: not known yet); None if they do."""
    parts = [part or 0 for part in (train.warmup_steps, train.lr_decay_steps)]
    fixed = sum(part for part in parts if isinstance(part, int))
    fraction = sum(part for part in parts if isinstance(part, float))  # of the run
    if fraction <= 1 and (not steps or fixed + fraction * steps <= steps):
        return None
    return (
        "train.warmup_steps and train.lr_decay_steps together are longer than the run; shares of it (0.1) fit any "
        "number of steps"
    )


def schedule_errors(job: "Job") -> list[str]:
    """Warm-up and decay must fit into the run."""
    train, errors = job.train, []
    if fault := schedule_fault(train, train.steps):
        errors.append(fault)
    if train.lr_decay_steps == 0:
        errors.append(
            "train.lr_decay_steps must be greater than 0; leave it out to decay over all steps after the warm-up"
        )
    if train.lr_decay_at_loss and not (train.lr_decay_steps and train.validate_every and job.data.validation):
        errors.append("train.lr_decay_at_loss needs train.lr_decay_steps, train.validate_every and data.validation")
    if train.lr_decay_at_loss and train.epochs and isinstance(train.lr_decay_steps, float):
        errors.append(
            "train.lr_decay_at_loss needs train.lr_decay_steps as a number of steps where train.epochs says how long "
            "the run is"
        )
    return errors


def length_errors(job: "Job") -> list[str]:
    """When the run ends, and what its data must be for that."""
    errors = []
    if (job.train.steps is None) == (job.train.epochs is None):
        errors.append(
            "train.steps or train.epochs says how long to train: "
            + ("give one" if job.train.steps is None else "not both")
        )
    if job.rollout:
        epochs = {f"data.sources.{name}": source.epochs for name, source in job.data.sources.items()}
        errors += [
            f"{section}.epochs is for offline recipes; give train.steps"
            for section, there in {"train": job.train.epochs, **epochs}.items()
            if there
        ]
        if job.data.max_bad_rows_share:
            errors.append("data.max_bad_rows_share is for offline recipes; online recipes stop at a bad row")
        if job.data.mix.by != "samples":
            errors.append("data.mix.by: tokens is for offline recipes; prompts are mixed by samples")
    bounded = job.train.epochs or any(s.epochs for s in job.data.sources.values())
    if job.data.mix.exhausted != "repeat" and not bounded:
        errors.append(f"data.mix.exhausted: {job.data.mix.exhausted} needs train.epochs or a source's epochs")
    if len(job.data.sources) > 1 and all(source.sampling_weight is None for source in job.data.sources.values()):
        without = (
            "if no source has a `sampling_weight`, every row is read once per epoch, and each source ends after its "
            "epochs"
        )
        if job.data.mix.exhausted == "stop":
            errors.append(f"data.mix.exhausted: stop needs sampling weights: {without}")
        if job.data.mix.by == "tokens":
            errors.append(f"data.mix.by: tokens needs sampling weights, which are then shares of tokens: {without}")
    return errors


def foreign_model_errors(job: "Job") -> list[str]:
    """Return the problems of keys that `model.backend: hf` does not support."""
    if job.model.backend != "hf":
        return []
    uses = {
        "model.replace": bool(job.model.replace),
        "model.head": job.model.head is not None,
        "model.quantization": job.model.quantization is not None,
        "compute.mesh.tensor_parallel_size": job.compute.mesh.tensor_parallel_size > 1,
        "evaluate.ranking": job.evaluate.ranking is not None,
    }
    return [f"{key} is not supported with model.backend: hf" for key, used in uses.items() if used]


def quantised_weight_errors(job: "Job") -> list[str]:
    """Return the problems of keys that do not go with `model.quantization`."""
    if job.model.quantization is None:
        return []
    exact, trains = job.model.quantization == "mxfp4", bool(job.model.trainable)
    rules = {
        "model.quantization needs model.lora, which trains adapters beside weights in four bits": job.model.lora
        is not None,
        "model.quantization needs compute.mesh.tensor_parallel_size: 1": job.compute.mesh.tensor_parallel_size == 1,
        "model.quantization does not work with model.replace": not job.model.replace,
        "model.quantization: nf4 works with model.trainable in recipes sft, kd and rm only (the reference of others "
        "would have weights that are not rounded)": exact or not trains or job.recipe in ("sft", "kd", "rm"),
        "model.quantization: nf4 needs rollout.lora_sync: merged (an engine would apply the adapter alone to weights "
        "that are not rounded)": exact or job.rollout is None or job.rollout.lora_sync != "adapter",
    }
    return [error for error, kept in rules.items() if not kept]


def deterministic_errors(job: "Job") -> list[str]:
    """Return the problems of keys that do not go with `train.deterministic`."""
    if not job.train.deterministic:
        return []
    on_cpu, whole = job.compute.device == "cpu", job.compute.mesh.tensor_parallel_size == 1
    rules = {
        "train.deterministic needs train.precision: fp32": job.train.precision == "fp32",
        "train.deterministic needs compute.device: cpu (a GPU's kernels add in an order of their own)": on_cpu,
        "train.deterministic needs rollout.engine: native (vllm's bits depend on its batches)": job.rollout is None
        or job.rollout.engine != "vllm",
        "train.deterministic needs compute.threads: 1 in online recipes": job.rollout is None
        or job.compute.threads == 1,
        "train.deterministic needs a whole model on every worker: compute.mesh.tensor_parallel_size: 1": whole,
    }
    return [error for error, kept in rules.items() if not kept]


def watched_metric_errors(job: "Job") -> list[str]:
    """Return the problems of a held-out loss that train.early_stopping or checkpoint.best watches."""
    if not (job.train.early_stopping or job.checkpoint.best):
        return []
    if job.rollout:
        return ["train.early_stopping and checkpoint.best are for recipes without rollouts"]
    errors, known = [], [f"loss/{name}" for name in job.data.validation]
    if not (job.train.validate_every and known):
        errors.append("train.early_stopping and checkpoint.best need data.validation and train.validate_every")
    best = job.checkpoint.best
    if best and known and best not in known:
        errors.append(f"checkpoint.best: {best} cannot be watched; only held-out losses can: {', '.join(known)}")
    if best and job.train.validate_every and job.checkpoint.every % job.train.validate_every:
        errors.append(
            "checkpoint.every must be a multiple of train.validate_every, "
            "so that every checkpoint has the metric of checkpoint.best"
        )
    return errors


def own_component_errors(job: "Job") -> list[str]:
    """Return the problems of keys that do not go with components and tokens of the user's own."""
    model, tokens, errors = job.model, job.model.tokens, []
    if tokens and not (tokens.added or tokens.file):
        errors.append("model.tokens adds none: give added or file")
    if tokens and tokens.init == "description" and not tokens.file:
        errors.append("model.tokens.init: description needs model.tokens.file, whose rows have a description")
    can_share = isinstance(job.algo, AlgoConfig) and job.algo.may_share_prefixes and model.backend == "ptf"
    if job.data.share_prefixes and (model.replace or not can_share):
        errors.append("data.share_prefixes is for recipe sft with model.backend: ptf and without model.replace")
    custom_head = model.head or "head" in model.replace
    if custom_head and job.rollout:
        errors.append(
            "model.head: rollouts are sampled from logits over the vocabulary, not from a custom head; "
            "train it with an offline recipe, or remove the custom head"
        )
    if custom_head and job.evaluate.sources:
        errors.append("model.head: evaluate.sources needs a model that generates text")
    engines = {
        "rollout.engine": job.rollout.engine if job.rollout else None,
        "evaluate.engine": job.evaluate.engine if job.evaluate.sources else None,
    }
    if model.replace:
        errors += [
            f"{key}: vllm does not know the components of model.replace; use native"
            for key, engine in engines.items()
            if engine == "vllm"
        ]
    return errors


RULES: tuple[Callable[["Job"], list[str]], ...] = (
    data_parallel_errors,
    name_errors,
    secret_errors,
    launch_errors,
    length_errors,
    schedule_errors,
    deterministic_errors,
    watched_metric_errors,
    own_component_errors,
    foreign_model_errors,
    quantised_weight_errors,
    pool_errors,
    held_out_errors,
    deployment_errors,
    rollout_errors,
    prompt_errors,
)


def broken(job: "Job") -> list[str]:
    """One line for each rule that is broken, the recipe's own among them, beginning with the key to change."""
    own = job.algo.config_errors(job) if isinstance(job.algo, AlgoConfig) else []
    return [error for rule in RULES for error in rule(job)] + own
