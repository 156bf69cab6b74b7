"""Config keys, values and arguments of plugins that were renamed, and plugins that moved to a different module.

The tables have two uses. A config with an old name is refused with an error that gives the new one
(`ptf.config.tree`); jobs that an earlier version of ptf has stored are translated when they are read, so that their
runs continue. Fingerprints are computed with the first names,
so that they do not depend on the version of ptf.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

# old key → new key, dotted; NAME stands for a name that the user chooses; a renamed key stays in its section. In the
# order of the new keys; if two old keys have one new key, the last one is the oldest, and is used for fingerprints.
KEYS = {
    "algo.bootstrap_cut_off": "algo.bootstrap_truncated",
    "algo.ce": "algo.ce_coef",
    "algo.centring": "algo.center_coef",
    "algo.entropy": "algo.entropy_coef",
    "algo.ratio": "algo.importance_sampling_level",
    "algo.kl": "algo.kl_coef",
    "algo.mean_over": "algo.loss_aggregation",
    "algo.loss": "algo.loss_type",
    "algo.minibatches": "algo.num_minibatches",
    "algo.overlong": "algo.overlong_buffer_tokens",
    "algo.precomputed": "algo.precompute",
    "algo.max_importance": "algo.tis_cap",
    "algo.epochs": "algo.update_epochs",
    "checkpoint.accept_changes": "checkpoint.accept_version_changes",
    "checkpoint.best.mode": "checkpoint.best.metric_direction",
    "checkpoint.sha256_up_to_gib": "checkpoint.sha256_max_gib",
    "checkpoint.verify_gib": "checkpoint.sha256_max_gib",
    "compute.mesh.tensor": "compute.mesh.tensor_parallel_size",
    "compute.pools.NAME.park": "compute.pools.NAME.offload",
    "data.max_bad": "data.max_bad_rows_share",
    "data.unseen_context": "data.omitted_context",
    "data.lookahead": "data.packing_lookahead",
    "data.lanes": "data.partitions",
    "data.answer_rendering": "data.response_rendering",
    "data.answer_text": "data.response_rendering",
    "data.render": "data.response_rendering",
    "data.share_beginnings": "data.share_prefixes",
    "data.shuffle": "data.shuffle_buffer",
    "data.sources.NAME.rows": "data.sources.NAME.row_count",
    "data.sources.NAME.weight": "data.sources.NAME.sampling_weight",
    "data.validation.NAME.rows": "data.validation.NAME.row_count",
    "data.validation.NAME.weight": "data.validation.NAME.sampling_weight",
    "evaluate.starting_model": "evaluate.measure_starting_model",
    "evaluate.start": "evaluate.measure_starting_model",
    "evaluate.ranking.sources.NAME.rows": "evaluate.ranking.sources.NAME.row_count",
    "evaluate.ranking.sources.NAME.weight": "evaluate.ranking.sources.NAME.sampling_weight",
    "evaluate.samples": "evaluate.samples_per_prompt",
    "evaluate.sources.NAME.rows": "evaluate.sources.NAME.row_count",
    "evaluate.sources.NAME.weight": "evaluate.sources.NAME.sampling_weight",
    "flow.steps": "flow.stages",
    "flow.stages.NAME.environment": "flow.stages.NAME.env_vars",
    "flow.stages.NAME.memory": "flow.stages.NAME.memory_mib",
    "flow.stages.NAME.minutes": "flow.stages.NAME.timeout_minutes",
    "model.train": "model.trainable",
    "publish.max_drop": "publish.max_regression",
    "publish.mode": "publish.metric_direction",
    "rollout.allowed": "rollout.constrained_decoding",
    "rollout.constrained_decoding.lines_per_answer": "rollout.constrained_decoding.lines_per_response",
    "rollout.constrained_decoding.repeat": "rollout.constrained_decoding.lines_per_response",
    "rollout.kv_cache_gib": "rollout.cpu_kv_cache_gib",
    "rollout.batches": "rollout.generation_batches",
    "rollout.gpu_share": "rollout.gpu_memory_utilization",
    "rollout.group": "rollout.group_size",
    "rollout.logprob_diff_bound": "rollout.logprob_diff_threshold",
    "rollout.max_logprob_diff": "rollout.logprob_diff_threshold",
    "rollout.lora": "rollout.lora_sync",
    "rollout.max_no_result": "rollout.max_no_result_share",
    "rollout.prompts": "rollout.prompts_per_step",
    "rollout.max_rounds": "rollout.max_resampling_rounds",
    "rollout.workers": "rollout.replicas",
    "rollout.scoring_processes": "rollout.reward_processes",
    "rollout.reward_env_processes": "rollout.reward_processes",
    "rollout.processes": "rollout.reward_processes",
    "rollout.scoring_retries": "rollout.reward_retries",
    "rollout.reward_env_retries": "rollout.reward_retries",
    "rollout.retries": "rollout.reward_retries",
    "rollout.scoring_timeout_s": "rollout.reward_timeout_s",
    "rollout.reward_env_timeout_s": "rollout.reward_timeout_s",
    "rollout.tensor": "rollout.tensor_parallel_size",
    "rollout.equal": "rollout.zero_variance_groups",
    "track.samples": "track.sample_prompts",
    "track.wandb": "track.wandb_project",
    "train.checkpointing": "train.activation_checkpointing",
    "train.stop": "train.early_stopping",
    "train.early_stopping.mode": "train.early_stopping.metric_direction",
    "train.sequences": "train.global_batch_sequences",
    "train.rows": "train.global_batch_sequences",
    "train.decay_at_loss": "train.lr_decay_at_loss",
    "train.decay_at": "train.lr_decay_at_loss",
    "train.decay": "train.lr_decay_steps",
    "train.lr_groups": "train.lr_multipliers",
    "train.clip": "train.max_grad_norm",
    "train.micro_sequences": "train.micro_batch_sequences",
    "train.micro_rows": "train.micro_batch_sequences",
    "train.min_lr": "train.min_lr_ratio",
    "train.warmup": "train.warmup_steps",
}
# old module → new module, for the addresses `use: module:name`
MODULES = {
    "ptf.data.events": "ptf.events.prepare",
    "ptf.data.item_vectors": "ptf.events.item_vectors",
    "ptf.data.ranking": "ptf.events.ranking_metrics",
    "ptf.data.semantic_ids": "ptf.events.semantic_ids",
    "ptf.model.declared": "ptf.model.custom_head",
    "ptf.recipes.dpo": "ptf.recipes.dpo.recipe",
    "ptf.recipes.grpo": "ptf.recipes.grpo.recipe",
    "ptf.recipes.kd": "ptf.recipes.kd.recipe",
    "ptf.recipes.next_item": "ptf.events.item_head",
    "ptf.recipes.opd": "ptf.recipes.opd.recipe",
    "ptf.recipes.ppo": "ptf.recipes.ppo.recipe",
    "ptf.recipes.rm": "ptf.recipes.rm.recipe",
    "ptf.recipes.sft": "ptf.recipes.sft.recipe",
    "ptf.rl.at_once": "ptf.rl.rewards.concurrent",
    "ptf.rl.env": "ptf.rl.environments.protocol",
    "ptf.rl.native_engine": "ptf.rl.engines.native",
    "ptf.rl.ranking": "ptf.events.model_ranking",
    "ptf.rl.reward_model": "ptf.rl.rewards.model",
    "ptf.rl.sandbox": "ptf.rl.rewards.sandbox",
    "ptf.rl.vllm_engine": "ptf.rl.engines.vllm_engine",
}
# dotted key → old value → new value, also of an item of a list; NAME as above. A key that was renamed stands here with
# each name under which it had old values.
# If two old values of a key have one new value, the last one listed, under the last name of the key, is the oldest, and
# is used for fingerprints.
VALUES = {
    "algo.loss_aggregation": {"sequence_mean": "episode_mean"},
    "algo.mean_over": {
        "tokens": "token_mean",
        "samples": "episode_mean",
        "sequences": "episode_mean",
        "answers": "episode_mean",
        "length": "constant_length",
    },
    "algo.ratio": {"sample": "sequence", "answer": "sequence"},
    "compute.pools.NAME.roles": {"reward": "reward_model"},
    "data.answer_text": {"generation_prompt": "append"},
    "data.render": {"served": "append"},
    "publish.gate": {"start": "starting_model"},
    "rollout.transport": {"path": "files"},
}
# address of a plugin → old argument → new argument
ARGUMENTS = {
    f"ptf.rl.rewards:{name}": {"in_flight": "max_concurrent_calls"} for name in ("http", "http_batch", "judge")
}
# metrics of responses: old name → new name
METRICS = {"pass@1": "greedy_pass_rate", "reward": "greedy_reward", "no_result": "no_result_share"}
# metrics of a step, in metrics.jsonl: old name → new name
STEP_METRICS = {"tis_capped_share": "tis_beyond_share", "update_slices_balanced": "update_slices_suggested"}
# dotted key → patterns of its old values, and their replacements, which are applied in this order. A metric of
# responses or of rankings was NAME/METRIC; what may be a metric of a source that is called `reward` or `no_result` is
# left alone.
ANSWER_METRIC = r"pass@\d+|reward|no_result|(?:all|new)/\w+@\d+"
NO_SOURCE = "|".join(("train|start|starting_model|loss|kl|ce|accuracy|reward|no_result|pass@\\d+", *METRICS.values()))
PATTERNS = {
    "publish.metric": (
        (rf"(?!(?:{NO_SOURCE})/)([^/]+)/({ANSWER_METRIC})", r"\2/\1"),
        *((rf"{old}/([^/]+)", rf"{new}/\1") for old, new in METRICS.items()),
    )
}
FIRST_PATTERNS = {
    "publish.metric": (
        *((rf"{new}/([^/]+)", rf"{old}/\1") for old, new in METRICS.items()),
        (rf"({ANSWER_METRIC})/([^/]+)", r"\2/\1"),
    )
}
# directory in a run's: the greedy responses of the evaluate stage, one line per prompt
RESPONSES, FORMER_RESPONSES = "responses", "answers"  # the second: of earlier versions
RETURNED = ("rollout.reward_timeout_s",)  # keys that have their first name again
FIRST_KEYS = {new: old for old, new in KEYS.items()} | {key: key for key in RETURNED}
FIRST_MODULES = {new: old for old, new in MODULES.items()}
FIRST_ARGUMENTS = {use: {new: old for old, new in names.items()} for use, names in ARGUMENTS.items()}
FIRST_VALUES: dict[str, dict[str, str]] = {}
for _key, _values in VALUES.items():
    FIRST_VALUES.setdefault(KEYS.get(_key, _key), {}).update({new: old for old, new in _values.items()})
# Comment at the end of a job.yaml that a run wrote; the digest follows it. Such a file is translated, not refused.
SEAL = "# SHA-256 of the run name and of what is above: "
FORMER_SEAL = "# SHA-256 of the lineage and of what is above: "


def sealed(text: str) -> tuple[str, str]:
    """Return what is above the seal of a job.yaml that a run wrote, and the digest; the text and "" if it has none."""
    found = re.fullmatch(rf"(.*\n)(?:{SEAL}|{FORMER_SEAL})([0-9a-f]{{64}})\n", text, re.DOTALL)
    return (found[1], found[2]) if found else (text, "")


class Names(NamedTuple):
    """The tables of one direction."""

    keys: Mapping[str, str]
    modules: Mapping[str, str]
    values: Mapping[str, Mapping[str, str]]
    patterns: Mapping[str, Sequence[tuple[str, str]]]
    arguments: Mapping[str, Mapping[str, str]]
    to_current: bool  # from earlier names to those of today; otherwise from those to the first ones

    def value(self, key: str, value: str) -> str:
        """Return the value that replaces `value` of a dotted key; the same one if it was not renamed."""
        steps = key.split(".")
        values = next((found for pattern, found in self.values.items() if _matches(pattern, steps)), {})
        new = values.get(value, value)
        for pattern, replacement in self.patterns.get(key, ()):
            new = re.sub(rf"\A(?:{pattern})\Z", replacement, new)
        return new

    def arguments_of(self, use: Any) -> Mapping[str, str]:
        """Return the replacements of the arguments of a plugin, by its address."""
        current = address(use) or use if isinstance(use, str) else ""
        return self.arguments.get(current, {})


TODAY = Names(KEYS, MODULES, VALUES, PATTERNS, ARGUMENTS, True)
FIRST = Names(FIRST_KEYS, FIRST_MODULES, FIRST_VALUES, FIRST_PATTERNS, FIRST_ARGUMENTS, False)


class Rename(NamedTuple):
    """One name in the values of a config, and the name that replaces it."""

    path: tuple[str | int, ...]  # path of the key, or of the address or value, from the top of the values
    # the same path as a dotted key, without the number of an item; in a trial of a sweep, the key begins at the top of
    # the job
    key: str
    old: str  # the old name: a dotted key, an address or a value
    new: str
    text: str  # the replacement in the text: the key without its section, or the address or value
    of_key: bool  # whether a key was renamed, also that of an argument; otherwise an address or a value


def outdated(values: Any) -> list[Rename]:
    """Return every old name in the values of a config, from the top down."""
    return list(_renames(values, TODAY, (), ()))


def address(use: str, modules: Mapping[str, str] = MODULES) -> str | None:
    """Return the current address of `module:name`; None if it has not moved."""
    module, colon, name = use.partition(":")
    return f"{modules[module]}:{name}" if colon and module in modules else None


def with_first_names(values: dict[str, Any]) -> dict[str, Any]:
    """Replace the names of keys, modules and values by the ones that they had first, for fingerprints.

    The values are changed in place and returned.
    """
    return renamed(values, list(_renames(values, FIRST, (), ())))


def renamed(values: Any, renames: Sequence[Rename]) -> Any:
    """Apply `renames`, which are ordered from the top down, to the values in place, and return the values."""
    for rename in reversed(renames):
        holder, name = holder_of(values, rename), rename.path[-1]
        if rename.of_key:
            holder[rename.text] = holder.pop(name)
        else:
            holder[name] = rename.text
    return values


def holder_of(values: Any, rename: Rename) -> Any:
    """Return the section that contains the name."""
    return reduce(lambda inner, step: inner[step], rename.path[:-1], values)


def current_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of a response (ptf.data.response_record) with the names of today.

    Earlier versions of ptf wrote `prompt`, `answer` and `outcome`.
    """
    if "row" in record:
        return dict(record)
    outcome = record.get("outcome", record.get("reward", record.get("no_result")))
    scored = isinstance(outcome, int | float)
    others = {name: value for name, value in record.items() if name not in ("prompt", "answer", "outcome")}
    return {
        **others,
        "row": record["prompt"],
        "response": record["answer"],
        "reward": outcome if scored else None,
        "no_result": None if scored else outcome,
    }


def current_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of metrics.jsonl with the names of today."""
    return {STEP_METRICS.get(name, name): value for name, value in row.items()}


def responses_of(run: Path) -> Path:
    """Return the directory of a run's greedy responses; that of an earlier version if the run has no other."""
    directories = [run / name for name in (RESPONSES, FORMER_RESPONSES)]
    return next((directory for directory in directories if directory.is_dir()), directories[0])


def first_key(key: str) -> str:
    """Return the first name of a dotted key."""
    return ".".join(_renamed((), key.split("."), FIRST_KEYS))


def _renames(value: Any, names: Names, path: tuple[str | int, ...], at: tuple[str, ...]) -> Iterator[Rename]:
    """Yield the renames in a value at `path`, from the top down.

    `at` is the value's key in a job. It equals `path`, except in a sweep's trial, whose dotted keys begin at the top.
    """
    if isinstance(value, list):
        key = ".".join(at)
        for number, inner in enumerate(value):
            if isinstance(inner, str) and (new := names.value(key, inner)) != inner:
                yield Rename((*path, number), key, inner, new, new, False)
            below = () if at == ("flow", "sweep") else (*at, str(number))
            yield from _renames(inner, names, (*path, number), below)
    elif isinstance(value, dict):
        arguments = names.arguments_of(value.get("use"))
        for name, inner in value.items():
            if name == "args" and isinstance(inner, dict):
                args = ".".join((*at, "args"))
                for argument in [argument for argument in inner if argument in arguments]:
                    old, new = f"{args}.{argument}", arguments[argument]
                    yield Rename((*path, "args", argument), old, old, f"{args}.{new}", new, True)
            steps = name.split(".") if path and not at else [name]
            now = _renamed(at, steps, names.keys)
            old, new, here = ".".join((*at, *steps)), ".".join((*at, *now)), (*path, name)
            if now != steps:
                yield Rename(here, old, old, new, ".".join(now), True)
            if steps[-1] == "use" and isinstance(inner, str) and (moved := address(inner, names.modules)):
                yield Rename(here, old, inner, moved, moved, False)
            if isinstance(inner, str) and (value_now := names.value(old, inner)) != inner:
                yield Rename(here, old, inner, value_now, value_now, False)
            # a section may have been renamed too: keys below it are looked up by its name of today
            yield from _renames(inner, names, here, (*at, *(now if names.to_current else steps)))


def _renamed(at: tuple[str, ...], steps: list[str], keys: Mapping[str, str]) -> list[str]:
    """Return the steps of a key below `at`, each replaced by its new name in `keys`."""
    return [_last((*at, *steps[: i + 1]), keys) for i in range(len(steps))]


def _last(key: tuple[str, ...], keys: Mapping[str, str]) -> str:
    for old, new in keys.items():
        if old.endswith(f".{key[-1]}") and _matches(old, key):
            return new.rpartition(".")[2]
    return key[-1]


def _matches(pattern: str, key: Sequence[str]) -> bool:
    """Return whether the steps of a key match a dotted key in which NAME stands for any name."""
    steps = pattern.split(".")
    return len(steps) == len(key) and all(step in (part, "NAME") for step, part in zip(steps, key, strict=True))
