"""Rules between keys of a job, for combinations that do not work.

Each function returns its rules as a table: the line that is said of a job that breaks the rule, which begins with the
key to change, and whether the job does.
"""

import re
from typing import TYPE_CHECKING

from ptf.config.cron import schedule
from ptf.config.rollout_rules import rollout_rules
from ptf.config.section import AlgoConfig, Rules
from ptf.config.sections.train import TrainConfig
from ptf.config.tree import walk
from ptf.workspace.credentials import is_secret

if TYPE_CHECKING:
    from ptf.config.schema import Job

NAME = re.compile(r"[^\W_][^/\\\x00-\x1f]{0,99}")
SCHEDULE_IS_LONGER = (
    "train.warmup_steps and train.lr_decay_steps together are longer than the run; shares of it (0.1) fit any number "
    "of steps"
)


def source_rules(job: "Job") -> Rules:
    """Return the rules of the names of sources, which as part of a path could lead out of their directory, and of their
    kinds: prompts are for rollouts and evaluation, which take no others."""
    by_section = job.sources_by_section
    trained, held_out = by_section["data.sources"], by_section["evaluate.sources"]
    of_prompts = {f"evaluate.sources.{name}": source for name, source in held_out.items()}
    of_prompts |= {f"data.sources.{name}": source for name, source in trained.items() if job.rollout}
    ranked = {"evaluate.ranking.sources": job.evaluate.ranking.sources} if job.evaluate.ranking else {}
    rule = (
        "is not a valid source name: a name begins with a letter or a digit, contains no slash and has at most "
        "100 characters"
    )
    return {
        **{
            f"{key}: {name!r} {rule}": not NAME.fullmatch(name)
            for key, sources in (by_section | ranked).items()
            for name in sources
        },
        **{
            f"data.sources.{name}.kind: prompt is for recipes with rollouts": source.kind == "prompt"
            and not job.rollout
            and isinstance(job.recipe, str)
            for name, source in trained.items()
        },
        **{
            f"{key}.kind must be prompt, not {source.kind}": source.kind not in ("auto", "prompt")
            for key, source in of_prompts.items()
        },
    }


def secret_rules(job: "Job") -> Rules:
    """Return a rule for each secret that is written into the config: configs are stored, shown and published."""
    rule = (
        "is a secret, and a config is stored, shown and published; write env:NAME, "
        "the variable that holds it where it is needed"
    )
    found = list[str]()
    for where, value in walk(job.model_dump()):
        key = ".".join(map(str, where))  # of several values, where names hold dots
        variable = key.startswith("flow.stages.") and ".env_vars." in key
        if is_secret(value, key.rpartition(".")[2], variable=variable):
            found.append(f"{key}: {rule}")
    return dict.fromkeys(found, True)


def is_schedule_longer(train: TrainConfig, steps: int | None) -> bool:
    """Return whether warm-up and decay do not fit into a run of that many steps (None: not known yet)."""
    parts = [part or 0 for part in (train.warmup_steps, train.lr_decay_steps)]
    fixed = sum(part for part in parts if isinstance(part, int))
    fraction = sum(part for part in parts if isinstance(part, float))  # of the run
    return fraction > 1 or bool(steps and fixed + fraction * steps > steps)


def length_rules(job: "Job") -> Rules:
    """When the run ends, and what its data must be for that."""
    train, mix, sources = job.train, job.data.mix, job.data.sources
    epochs = {"train": train.epochs} | {f"data.sources.{name}": source.epochs for name, source in sources.items()}
    is_unweighted = len(sources) > 1 and all(source.sampling_weight is None for source in sources.values())
    without = (
        "if no source has a `sampling_weight`, every row is read once per epoch, and each source ends after its epochs"
    )
    return {
        "train.steps or train.epochs says how long to train: give one": train.steps is None and train.epochs is None,
        "train.steps or train.epochs says how long to train: not both": train.steps and train.epochs,
        **{
            f"{section}.epochs is for offline recipes; give train.steps": job.rollout and there
            for section, there in epochs.items()
        },
        "data.max_bad_rows_share is for offline recipes; online recipes stop at a bad row": job.rollout
        and job.data.max_bad_rows_share,
        "data.mix.by: tokens is for offline recipes; prompts are mixed by samples": job.rollout and mix.by != "samples",
        f"data.mix.exhausted: {mix.exhausted} needs train.epochs or a source's epochs": mix.exhausted != "repeat"
        and not any(epochs.values()),
        f"data.mix.exhausted: stop needs sampling weights: {without}": is_unweighted and mix.exhausted == "stop",
        f"data.mix.by: tokens needs sampling weights, which are then shares of tokens: {without}": is_unweighted
        and mix.by == "tokens",
    }


def train_rules(job: "Job") -> Rules:
    """Return the rules of `train`: of its schedule, of a held-out loss that it or `checkpoint.best` watches, and of
    what does not go with `train.deterministic`."""
    train, rollout, best = job.train, job.rollout, job.checkpoint.best
    known, watches = [f"loss/{name}" for name in job.data.validation], bool(train.early_stopping or best)
    deterministic = {
        "train.precision: fp32": train.precision == "fp32",
        "compute.device: cpu (a GPU's kernels add in an order of their own)": job.compute.device == "cpu",
        "rollout.engine: native (vllm's bits depend on its batches)": not rollout or rollout.engine != "vllm",
        "compute.threads: 1 in online recipes": not rollout or job.compute.threads == 1,
        "whole sequences and a whole model on every worker: compute.mesh.tensor_parallel_size: 1 and "
        "compute.mesh.context_parallel_size: 1": job.compute.mesh.sizes(job.compute.workers).model == 1,
    }
    return {
        SCHEDULE_IS_LONGER: is_schedule_longer(train, train.steps),
        "train.lr_decay_steps must be greater than 0; leave it out to decay over all steps after the warm-up": (
            train.lr_decay_steps == 0
        ),
        "train.lr_decay_at_loss needs train.lr_decay_steps, train.validate_every and data.validation": (
            train.lr_decay_at_loss and not (train.lr_decay_steps and train.validate_every and known)
        ),
        "train.lr_decay_at_loss needs train.lr_decay_steps as a number of steps where train.epochs says how long the "
        "run is": train.lr_decay_at_loss and train.epochs and isinstance(train.lr_decay_steps, float),
        **{f"train.deterministic needs {what}": train.deterministic and not has for what, has in deterministic.items()},
        "train.early_stopping and checkpoint.best are for recipes without rollouts": watches and rollout,
        "train.early_stopping and checkpoint.best need data.validation and train.validate_every": watches
        and not rollout
        and not (train.validate_every and known),
        f"checkpoint.best: {best} cannot be watched; only held-out losses can: {', '.join(known)}": best
        and not rollout
        and known
        and best not in known,
        "checkpoint.every must be a multiple of train.validate_every, so that every checkpoint has the metric of "
        "checkpoint.best": best
        and not rollout
        and train.validate_every
        and job.checkpoint.every % train.validate_every,
    }


def compute_rules(job: "Job") -> Rules:
    """Return the rules of where the run runs and writes, of how its workers divide the model and the data, and of
    engines that need a process of their own, which only Ray gives."""
    workers, launcher, mesh = job.compute.workers, job.compute.launcher, job.compute.mesh
    sizes, divisors = mesh.sizes(workers), ("context_parallel_size", "tensor_parallel_size")
    named = {name: getattr(mesh, name) for name in ("replicate", *divisors)}
    of_groups = "".join(f" / compute.mesh.{name} ({named[name]})" for name in divisors if named[name] > 1)
    dealt = {
        "data.partitions": job.data.partitions,
        "train.global_batch_sequences": job.train.global_batch_sequences,
    }
    engines = {
        "rollout.engine": job.rollout.engine if job.rollout and launcher == "local" else None,
        "evaluate.engine": job.evaluate.engine,
    }
    return {
        "output must be a directory on this machine; publish.to may be a URI": "://" in job.output,
        f"compute.mesh: {' × '.join(f'{name} ({size})' for name, size in named.items())} must divide compute.workers "
        f"({workers})": sizes.ranks != workers,
        "compute.pools is for recipes with rollouts; others have one group of compute.workers: remove it": (
            job.compute.pools and not job.rollout
        ),
        "compute.launcher: local is one process; use ray or torchrun for compute.workers > 1": launcher == "local"
        and workers > 1,
        **{
            f"{key} ({value}) must be a multiple of compute.workers ({workers}){of_groups}": not job.rollout
            and value % (sizes.data or 1)
            for key, value in dealt.items()
        },
        **{
            f"{key}: vllm needs a process of its own, which compute.launcher: {launcher} does not give; use native": (
                engine == "vllm" and launcher != "ray"
            )
            for key, engine in engines.items()
        },
    }


def stage_rules(job: "Job") -> Rules:
    """Return the rules of held-out data and of the metrics on it, of what is published, and of when the flow runs."""
    evaluate, cron, what = job.evaluate, job.flow.cron, job.publish.what
    taken = {"greedy_pass_rate", f"pass@{evaluate.samples}", "greedy_reward", "no_result_share"}
    return {
        "evaluate.sources needs evaluate.reward to score the responses": evaluate.sources
        and not (evaluate.reward or job.rollout),
        "evaluate.metrics needs evaluate.sources: metrics are computed from the responses to held-out prompts": (
            evaluate.metrics and not evaluate.sources
        ),
        **{
            f"evaluate.metrics.{name}: the name of a metric must not be {', '.join(sorted(taken))} or contain a slash; "
            "choose another": name in taken or "/" in name
            for name in evaluate.metrics
        },
        f"flow.cron: {cron!r} is not a schedule: give minute, hour, day of the month, month and day of the week, "
        "like '0 3 * * 1'": cron is not None and not schedule(cron),
        f"publish.what: {what} needs model.lora, which trains the adapter": what != "merged" and not job.model.lora,
        f"publish.what: {what} publishes an adapter, and the base model of this one has the tokens of model.tokens, "
        "which no published model has; use merged": what != "merged" and job.model.tokens,
    }


def model_rules(job: "Job") -> Rules:
    """Return the rules of components and tokens of the user's own, of weights in four bits, and of what
    `model.backend: hf` does not support."""
    model, tokens, form, mesh = job.model, job.model.tokens, job.model.quantization, job.compute.mesh
    can_share = isinstance(job.algo, AlgoConfig) and job.algo.may_share_prefixes and model.backend == "ptf"
    has_head, nf4 = model.head or "head" in model.replace, form == "nf4"
    engines = {
        "rollout.engine": job.rollout.engine if job.rollout else None,
        "evaluate.engine": job.evaluate.engine if job.evaluate.sources else None,
    }
    unsupported = {
        "model.replace": model.replace,
        "model.head": model.head,
        "model.quantization": form,
        "compute.mesh.tensor_parallel_size": mesh.tensor_parallel_size > 1,
        "compute.mesh.context_parallel_size": mesh.context_parallel_size > 1,
        "evaluate.ranking": job.evaluate.ranking,
    }
    return {
        "model.tokens adds none: give added or file": tokens and not (tokens.added or tokens.file),
        "model.tokens.init: description needs model.tokens.file, whose rows have a description": tokens
        and tokens.init == "description"
        and not tokens.file,
        "data.share_prefixes is for recipe sft with model.backend: ptf and without model.replace": (
            job.data.share_prefixes and (model.replace or not can_share)
        ),
        "model.head: rollouts are sampled from logits over the vocabulary, not from a custom head; train it with an "
        "offline recipe, or remove the custom head": has_head and job.rollout,
        "model.head: evaluate.sources needs a model that generates text": has_head and job.evaluate.sources,
        **{
            f"{key}: vllm does not know the components of model.replace; use native": model.replace and engine == "vllm"
            for key, engine in engines.items()
        },
        **{
            f"{key} is not supported with model.backend: hf; use ptf": model.backend == "hf" and used
            for key, used in unsupported.items()
        },
        "model.quantization needs model.lora, which trains adapters beside weights in four bits": form
        and not model.lora,
        "model.quantization needs compute.mesh.tensor_parallel_size: 1": form and mesh.tensor_parallel_size > 1,
        "model.replace needs compute.mesh.context_parallel_size: 1 (it may mix tokens, which lie on different workers; "
        "a head may be replaced)": mesh.context_parallel_size > 1 and set(model.replace) - {"head"},
        "model.quantization does not work with model.replace": form and model.replace,
        "model.quantization: nf4 works with model.trainable in recipes sft, kd and rm only (the reference of others "
        "would have weights that are not rounded)": nf4 and model.trainable and job.recipe not in ("sft", "kd", "rm"),
        "model.quantization: nf4 needs rollout.lora_sync: merged (an engine would apply the adapter alone to weights "
        "that are not rounded)": nf4 and job.rollout and job.rollout.lora_sync == "adapter",
    }


def broken(job: "Job") -> list[str]:
    """One line for each rule that is broken, the recipe's own among them, beginning with the key to change."""
    every = (source_rules, secret_rules, compute_rules, length_rules, train_rules, model_rules, stage_rules)
    tables = [rules(job) for rules in every]
    if job.rollout:
        tables.append(rollout_rules(job, job.rollout))
    if isinstance(job.algo, AlgoConfig):
        tables.append(job.algo.config_rules(job))
    return [line for table in tables for line, is_broken in table.items() if is_broken]
