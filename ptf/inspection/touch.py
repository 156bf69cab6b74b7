"""What `ptf check` opens of what a job names: models, the tokenizer, the first rows of each source, and the reward.

The functions that open them are those of training, so a problem has the words with which training would stop. Of
weights, only the headers are read. Nothing is downloaded, and torch is imported only if one of these is here.
"""

import contextlib
import glob
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptf.config import Job, Plugin, model_paths, plugin, resolve, sources_of
from ptf.config.plugin_checks import plugins, warnings
from ptf.config.plugin_code import code_of
from ptf.config.reward_signature import RewardSignature
from ptf.errors import UserError
from ptf.recipes.grpo.config import GRPOConfig
from ptf.rl.engines.vllm_support import config_of, raise_if_wrong

if TYPE_CHECKING:
    from ptf.data.tokenizer import Tokenizer
    from ptf.data.trajectory import Prompt
    from ptf.recipes.protocol import Recipe

ROWS = 32  # the first rows of each source that are encoded
MOST_BYTES = 256 << 20  # largest size of the sources' files together: counting the rows of JSON lines reads them whole
# with up to this many rows that are not tokenized, all are encoded and the numbers are exact; with more, the first rows
# of each source give an interval
FEW_ROWS = 2000
HOW = "`ptf inspect` prints the number of passes over the data and of steps"


def touch(job: Job) -> list[str]:
    """Open what a job names and this machine has, and return sentences on what to know of it, such as the passes and
    steps of the run. Raise the UserError with which the run would stop."""
    from ptf.model.hub import cached, is_id

    if is_id(job.model.path) and not is_here(job.model.path):
        with contextlib.suppress(ValueError):  # what is no id of the Hub
            if snapshot := cached(job.model.path):
                job = resolve(job, models={job.model.path: str(snapshot)})
    raise_if_vllm_is_wrong(job)
    named = {key: source.path for key, source in sources_of(job).items()} | model_paths(job)
    key_of_tokenizer = "model.tokenizer" if job.model.tokenizer else "model.path"
    named[key_of_tokenizer] = job.model.tokenizer or job.model.path
    here = {key for key, path in named.items() if is_here(path)}
    lines = [*warnings(job), *code_of([job.model_dump()[section] for section in ("recipe", "model")]).unseen]
    lines += job.algo.without_effect(job) if isinstance(job.algo, GRPOConfig) else []
    model = look_at_models(job) if "model.path" in here else None
    if key_of_tokenizer in here:
        lines += look_at_rows(job, here, model)
    if absent := [f"{key} ({path})" for key, path in named.items() if key not in here]:
        lines.append(f"not on this machine, so not looked at: {', '.join(absent)}; {HOW}")
    return lines


def fetched(job: Job) -> Job:
    """Return the job with what `data.prepare` makes, and with its model on this machine."""
    from ptf.model.model_files import locate
    from ptf.run import resolved

    job = resolved(job)
    return resolve(job, models={job.model.path: str(locate(job.model.path, verify_up_to=None))})


def raise_if_vllm_is_wrong(job: Job) -> None:
    """Raise UserError if an engine of the job is vLLM, which does not serve its model rightly. A model that is not on
    this machine is judged when the job starts."""
    config = config_of(job.model.path)
    if job.rollout and job.rollout.engine == "vllm":
        raise_if_wrong("rollout.engine", config, job.train.precision, synced=job.rollout.lora_sync != "adapter")
    if job.evaluate.sources and job.evaluate.engine == "vllm":
        raise_if_wrong("evaluate.engine", config, job.train.precision, synced=False)


def is_here(path: str) -> bool:
    """Return whether there is something at a path, or at one that a pattern matches, on this machine."""
    path = path.removeprefix("file://").rstrip("/")
    return bool(os.path.exists(path) or glob.glob(path))


def look_at_models(job: Job) -> Path:
    """Open the job's model and those beside it, and return the model's directory. Raise UserError for one that training
    would refuse."""
    from ptf.config.sections.model import ModelConfig
    from ptf.model.model_files import locate
    from ptf.recipes import registry
    from ptf.recipes.protocol import FrozenModelSpec
    from ptf.rl.rewards.model import raise_if_without_score
    from ptf.train.components import without_head
    from ptf.train.model_source import ModelSource

    recipe, section = registry.build(job), without_head(job.model) if job.model.tokens else job.model
    directory = locate(section.path, verify_up_to=None)
    model = ModelSource(section, directory).raise_if_unfit(recipe.head)
    for role, one in recipe.frozen_models.items():
        if one.path is not None and is_here(one.path):
            source = ModelSource.of(one, role, section)
            frozen_model = source.raise_if_unfit("lm")
            if one.same_architecture:
                source.raise_if_other_architecture(frozen_model.config, model.config)
    if job.rollout and (scorer := job.rollout.reward_model) and is_here(scorer.path):
        spec = FrozenModelSpec(scorer.path, same_architecture=False)
        source = ModelSource.of(spec, "rollout.reward_model.path", ModelConfig(path=scorer.path))
        raise_if_without_score(source.directory)
        source.raise_if_unfit("scalar")
    return directory


def look_at_rows(job: Job, here: set[str], model: Path | None) -> list[str]:
    """Encode the first rows of the sources that are here, call the rewards, and return what was found. Raise UserError
    for a tokenizer and rows that training would refuse."""
    from ptf.data.added import tokenizer_of
    from ptf.data.prompts import prompts_once
    from ptf.data.survey import survey_source
    from ptf.model.backends import backend_of
    from ptf.model.vocabulary import raise_if_larger_tokenizer
    from ptf.recipes import registry
    from ptf.rl.prompts import raise_if_too_long
    from ptf.train.dataloading import make_partitions
    from ptf.train.job_tokenizer import rendered
    from ptf.train.source_specs import specs

    recipe, path = registry.build(job), job.model.tokenizer or str(model)
    tokenizer = rendered(job, tokenizer_of(path, job.model.tokens), None)
    if model and not job.model.tokens:
        raise_if_larger_tokenizer(model, path, tokenizer.vocab_size)
    lines: list[str] = []
    prompts: dict[str, Prompt] = {}
    longest = job.data.seq_len if recipe.config.online else 0
    for section, sources in job.sources_by_section.items():
        some = {name: source for name, source in sources.items() if f"{section}.{name}" in here}
        partitions = make_partitions(job, recipe, tokenizer, sources=specs(some, verify_up_to=0))
        partitions = replace(partitions, share_prefixes=False)
        for name, spec in partitions.sources.items():
            key = f"{section}.{name}"
            if section == "evaluate.sources" or recipe.config.online:
                for prompt in prompts_once(replace(spec, limit=min(spec.limit or ROWS, ROWS)), name, tokenizer):
                    prompts.setdefault(key, prompt)
                    if section == "data.sources" and job.rollout and job.data.too_long != "drop":
                        raise_if_too_long(prompt, job.data.seq_len - job.rollout.max_new_tokens)
                continue
            found, units = survey_source(partitions, name, ROWS)
            if found.bad and not job.data.max_bad_rows_share:
                raise UserError(f"{found.bad[0].where} (source {name}): {found.bad[0].reason}")
            if found.bad and not units:
                where, reason = found.bad[0].where, found.bad[0].reason
                lines.append(f"{key}: the first {found.counts['bad']} rows are all bad; {where}: {reason}")
                if found.whole:
                    raise UserError(lines[-1])
            if found.unread:
                lines.append(f"{key}: nothing reads {', '.join(found.unread)}")
            longest = max([longest, *(len(sample) for unit in units for sample in unit)])
    beyond = backend_of(job.model.backend).decoder_config(model).beyond(longest) if model else ""
    lines += [*([beyond] if beyond else []), *try_rewards(job, prompts)]
    if all(f"data.sources.{name}" in here for name in job.data.sources):
        lines.append(length_of_run(job, recipe, tokenizer))
    return lines


def try_rewards(job: Job, prompts: "Mapping[str, Prompt]") -> list[str]:
    """Have each reward score an empty response and one that repeats the prompt, and return what they gave; `prompts`
    are the first ones of the sources, by key."""
    from ptf.data.response_conversation import as_history, history_of
    from ptf.data.trajectory import Reward
    from ptf.rl.rewards.scoring import RewardWorkers

    training: Mapping[str, Plugin] = job.rollout.reward if job.rollout else {}
    evaluation = {"": job.evaluate.reward} if job.evaluate.reward else training
    limits: dict[str, Any] = {"timeout_s": job.rollout.reward_timeout_s} if job.rollout else {}
    lines: dict[str, str] = {}
    for key, prompt in prompts.items():
        by_source = evaluation if key.startswith("evaluate.") else training
        reward = by_source.get(prompt.source, by_source.get(""))
        if reward is None or repr(reward) in lines:
            continue
        if why := not_called(reward):
            lines[repr(reward)] = f"{reward.use} is not called by check: {why}"
            continue
        asked = str(as_history(history_of(prompt.row))[-1]["content"])
        called = Plugin(use=reward.use, args=reward.args)
        with contextlib.closing(RewardWorkers(called, retries=0, **limits)) as workers:
            outcomes = workers.score([(prompt.row, ""), (prompt.row, asked)])
        empty, repeated = (f"{o.value:g}" if isinstance(o, Reward) else f"no result ({o.reason})" for o in outcomes)
        lines[repr(reward)] = f"{reward.use} gives an empty response {empty}, one that repeats the prompt {repeated}"
    return list(lines.values())


def not_called(reward: Plugin) -> str | None:
    """Return why `ptf check` does not call a reward; None if it does."""
    from ptf.rl import rewards

    for _, use, args in plugins(reward.model_dump(), ()):  # of a weighted sum its parts too
        target = plugin.resolve(use)
        if isinstance(target, type) and issubclass(target, (rewards.http, rewards.judge)):
            return "it sends requests"
        if not getattr(target, "called_by_check", True):
            return "`called_by_check` is False"
        if RewardSignature.of(target, args).sees_episodes:
            return "it asks for the episode; `ptf try` plays some"
    return None


def length_of_run(job: Job, recipe: "Recipe", tokenizer: "Tokenizer") -> str:
    """Return the passes over each source and the steps. Raise UserError if warm-up and decay do not fit into them."""
    from ptf.data.sources.files import resolve_files
    from ptf.train.dataloading import make_partitions, preview_data
    from ptf.train.source_specs import specs

    if sum(sum(resolve_files(spec.path).sizes) for spec in specs(job.data.sources).values()) > MOST_BYTES:
        return f"the sources have more than {MOST_BYTES >> 20} MiB; {HOW}"
    return preview_data(job, make_partitions(job, recipe, tokenizer), FEW_ROWS)[0].describe()
