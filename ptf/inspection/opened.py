"""Models, rows and rewards of a job, opened by the functions of training: what `ptf check` does with those that this
machine has. Of weights, only the headers are read.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptf.config import Job, Plugin, plugin
from ptf.config.plugin_checks import plugins
from ptf.config.reward_signature import RewardSignature
from ptf.config.sections.model import ModelConfig
from ptf.data.added import tokenizer_of
from ptf.data.prompts import prompts_once
from ptf.data.response_conversation import as_history, history_of
from ptf.data.sources.files import resolve_files
from ptf.data.sources.rows import specs
from ptf.data.survey import survey_source
from ptf.data.trajectory import Prompt, Reward
from ptf.errors import UserError
from ptf.inspection.places import HOW, is_here
from ptf.model.backends import backend_of
from ptf.model.model_files import locate
from ptf.model.vocabulary import raise_if_larger_tokenizer
from ptf.recipes import registry
from ptf.recipes.protocol import FrozenModelSpec
from ptf.rl import rewards
from ptf.rl.prompts import raise_if_too_long
from ptf.rl.rewards.model import raise_if_without_score
from ptf.rl.rewards.scoring import RewardWorkers
from ptf.train.components import without_head
from ptf.train.dataloading import make_partitions, preview_data
from ptf.train.job_tokenizer import rendered
from ptf.train.model_source import ModelSource

ROWS = 32  # the first rows of each source that are encoded
MOST_BYTES = 256 << 20  # largest size of the sources' files together: counting the rows of JSON lines reads them whole
# with up to this many rows that are not tokenized, all are encoded and the numbers are exact; with more, the first rows
# of each source give an interval
FEW_ROWS = 2000


def look_at_models(job: Job) -> Path:
    """Open the job's model and those beside it, and return the model's directory. Raise UserError for one that training
    would refuse."""
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
        source = ModelSource.of(
            FrozenModelSpec(scorer.path, same_architecture=False),
            "rollout.reward_model.path",
            ModelConfig(path=scorer.path),
        )
        raise_if_without_score(source.directory)
        source.raise_if_unfit("scalar")
    return directory


def look_at_rows(job: Job, here: set[str], model: Path | None) -> list[str]:
    """Encode the first rows of the sources that are here, call the rewards, and return what was found. Raise UserError
    for a tokenizer and rows that training would refuse."""
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
        if sum(sum(resolve_files(spec.path).sizes) for spec in specs(job.data.sources).values()) > MOST_BYTES:
            lines.append(f"the sources have more than {MOST_BYTES >> 20} MiB; {HOW}")
        else:  # this raises UserError if warm-up and decay do not fit into the steps
            lines.append(preview_data(job, make_partitions(job, recipe, tokenizer), FEW_ROWS)[0].describe())
    return lines


def try_rewards(job: Job, prompts: Mapping[str, Prompt]) -> list[str]:
    """Have each reward score an empty response and one that repeats the prompt, and return what they gave; `prompts`
    are the first ones of the sources, by key."""
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
        with contextlib.closing(
            RewardWorkers(Plugin(use=reward.use, args=reward.args), retries=0, **limits)
        ) as workers:
            outcomes = workers.score([(prompt.row, ""), (prompt.row, asked)])
        empty, repeated = (f"{o.value:g}" if isinstance(o, Reward) else f"no result ({o.reason})" for o in outcomes)
        lines[repr(reward)] = f"{reward.use} gives an empty response {empty}, one that repeats the prompt {repeated}"
    return list(lines.values())


def not_called(reward: Plugin) -> str | None:
    """Return why `ptf check` does not call a reward; None if it does."""
    for _, use, args in plugins(reward.model_dump(), ()):  # of a weighted sum its parts too
        target = plugin.resolve(use)
        if isinstance(target, type) and issubclass(target, (rewards.http, rewards.judge)):
            return "it sends requests"
        if not getattr(target, "called_by_check", True):
            return "`called_by_check` is False"
        if RewardSignature.of(target, args).sees_episodes:
            return "it asks for the episode; `ptf try` plays some"
    return None
