"""What `ptf check` opens of what a job names: models, the tokenizer, the first rows of each source, and the reward.

The functions that open them are those of training, so a problem has the words with which training would stop. Of
weights, only the headers are read. Nothing is downloaded, and torch is imported only if one of these is here.
"""

import contextlib
import glob
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptf.config import Job, Plugin, model_paths, plugin, sources_of
from ptf.config.plugin_checks import plugins
from ptf.config.reward_signature import RewardSignature
from ptf.config.section import AlgoConfig
from ptf.errors import UserError

if TYPE_CHECKING:
    from ptf.data.quarantine import BadRow
    from ptf.data.sample import PackUnit
    from ptf.data.sources.rows import SourceSpec
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
    """Open what a job names and this machine has, and return sentences on what to know of it; the last one is about the
    passes and steps of the run. Raise the UserError with which the run would stop."""
    named = {key: source.path for key, source in sources_of(job).items()} | model_paths(job)
    key_of_tokenizer = "model.tokenizer" if job.model.tokenizer else "model.path"
    named[key_of_tokenizer] = job.model.tokenizer or job.model.path
    here = {key for key, path in named.items() if is_here(path)}
    lines = job.algo.without_effect(job) if isinstance(job.algo, AlgoConfig) else []
    model = look_at_models(job) if "model.path" in here else None
    tokenizer = tokenizer_of_job(job, model) if key_of_tokenizer in here else None
    if tokenizer is not None:
        lines += look_at_rows(job, tokenizer, here, model)
    if absent := [f"{key} ({path})" for key, path in named.items() if key not in here]:
        lines.append(f"not on this machine, so not looked at: {', '.join(absent)}")
    if tokenizer is None or any(f"data.sources.{name}" not in here for name in job.data.sources):
        return [*lines, HOW]
    return [*lines, length_of_run(job, tokenizer)]


def is_here(path: str) -> bool:
    """Return whether there is something at a path on this machine."""
    return bool(glob.glob(path.removeprefix("file://").rstrip("/")))


def look_at_models(job: Job) -> Path:
    """Open the job's model and those beside it, and return the model's directory. Raise UserError for one that training
    would refuse."""
    from ptf.config.sections.model import ModelConfig
    from ptf.model.bridge import locate
    from ptf.recipes import registry
    from ptf.recipes.protocol import FrozenModelSpec
    from ptf.rl.rewards.model import raise_if_without_score
    from ptf.train.components import without_head
    from ptf.train.frozen_models import backend_of, located, raise_if_other_architecture, section_of
    from ptf.train.trainer import raise_if_unfit

    recipe, section = registry.build(job), without_head(job.model) if job.model.tokens else job.model
    directory = locate(section.path, section.revision, verify_up_to=None)
    model = raise_if_unfit(directory, section, recipe.head)
    for role, one in recipe.frozen_models.items():
        if one.path is not None and is_here(one.path):
            place = located(one, role, None)
            frozen_model = raise_if_unfit(place, section_of(one, section, place), "lm")
            if one.same_architecture:
                raise_if_other_architecture(frozen_model, model, place, role)
    if job.rollout and (scorer := job.rollout.reward_model) and is_here(scorer.path):
        place = located(FrozenModelSpec(scorer.path, scorer.revision), "rollout.reward_model.path", None)
        raise_if_without_score(place)
        raise_if_unfit(place, ModelConfig(path=str(place), backend=backend_of(place, "ptf")), "scalar")
    return directory


def tokenizer_of_job(job: Job, model: Path | None) -> "Tokenizer":
    """Return the tokenizer as the job renders with it; `model` is the model's directory, if it is here."""
    from ptf.data.added import tokenizer_of
    from ptf.model.vocabulary import raise_if_larger_tokenizer
    from ptf.train.job_tokenizer import rendered

    path = job.model.tokenizer or str(model)
    tokenizer = rendered(job, tokenizer_of(path, job.model.tokens), None)
    if model and not job.model.tokens:
        raise_if_larger_tokenizer(model, path, tokenizer.vocab_size)
    return tokenizer


def look_at_rows(job: Job, tokenizer: "Tokenizer", here: set[str], model: Path | None) -> list[str]:
    """Encode the first rows of the sources that are here, call the rewards, and return what was found. Raise UserError
    for rows that training would refuse."""
    from ptf.data.prompts import prompts_once
    from ptf.model.bridge import decoder_config
    from ptf.recipes import registry
    from ptf.rl.prompts import raise_if_too_long
    from ptf.train.source_specs import specs

    recipe = registry.build(job)
    prompts: dict[str, Prompt] = {}
    longest = job.data.seq_len if recipe.online else 0
    for key, source in sources_of(job).items():
        if key not in here:
            continue
        section, _, name = key.rpartition(".")
        spec = specs({name: source}, verify_up_to=0)[name]
        spec = replace(spec, limit=min(spec.limit or ROWS, ROWS))
        if section != "evaluate.sources" and not recipe.online:
            units = first_units(job, recipe, tokenizer, key, spec)
            longest = max([longest, *(len(sample) for unit in units for sample in unit)])
            continue
        for prompt in prompts_once(spec, name, tokenizer):
            prompts.setdefault(key, prompt)
            if section == "data.sources" and job.rollout and job.data.too_long != "drop":
                raise_if_too_long(prompt, job.data.seq_len - job.rollout.max_new_tokens)
    beyond = decoder_config(model, job.model.backend).beyond(longest) if model else ""
    return [*([beyond] if beyond else []), *try_rewards(job, tokenizer, prompts)]


def first_units(job: Job, recipe: "Recipe", tokenizer: "Tokenizer", key: str, spec: "SourceSpec") -> "list[PackUnit]":
    """Encode the rows of a source as training does. Raise UserError for a bad row (`data.on_bad_row: error`), or if
    every row is bad."""
    from ptf.data.source_units import pack_units_once

    bad: list[BadRow] = []
    units = pack_units_once(
        {key.rpartition(".")[2]: spec},
        tokenizer=tokenizer,
        encode=lambda row, source: recipe.encode(row, tokenizer, source),
        seq_len=job.data.seq_len,
        too_long=job.data.too_long,
        set_aside=(lambda row, counts: bad.append(row)) if job.data.on_bad_row == "skip" else None,
    )
    if not (found := list(units)) and bad:
        raise UserError(f"{key}: the first {len(bad)} rows are all bad; {bad[0].where}: {bad[0].reason}")
    return found


def try_rewards(job: Job, tokenizer: "Tokenizer", prompts: "Mapping[str, Prompt]") -> list[str]:
    """Have each reward score an empty response and one that repeats the prompt, and return what they gave; `prompts`
    are the first ones of the sources, by key."""
    training: Mapping[str, Plugin] = job.rollout.rewards_by_source if job.rollout else {}
    evaluation = {"": job.evaluate.reward} if job.evaluate.reward else training
    tried: dict[str, str] = {}
    for key, prompt in prompts.items():
        by_source = evaluation if key.startswith("evaluate.") else training
        reward = by_source.get(prompt.source, by_source.get(""))
        if reward is not None and repr(reward) not in tried:
            tried[repr(reward)] = try_reward(job, tokenizer, reward, prompt)
    return list(tried.values())


def try_reward(job: Job, tokenizer: "Tokenizer", reward: Plugin, prompt: "Prompt") -> str:
    """Have a reward score two responses to a prompt, and return what it gave, or why it was not called. Raise UserError
    if it has no result for either."""
    from ptf.data.trajectory import NoResult, Reward
    from ptf.episode_preview.scripts import echo
    from ptf.rl.rewards.scoring import RewardWorkers

    if why := not_called(reward):
        return f"{reward.use} is not called by check: {why}"
    limits: dict[str, Any] = {"timeout_s": job.rollout.reward_timeout_s} if job.rollout else {}
    responses = "", echo(tokenizer)(0, 0, tokenizer.decode(prompt.tokens))
    with contextlib.closing(RewardWorkers(Plugin(use=reward.use, args=reward.args), retries=0, **limits)) as workers:
        outcomes = workers.score([(prompt.row, text) for text in responses])
    empty, repeated = (f"{o.value:g}" if isinstance(o, Reward) else f"no result ({o.reason})" for o in outcomes)
    if all(isinstance(outcome, NoResult) for outcome in outcomes):
        raise UserError(f"{reward.use} has {empty} for a response to the first prompt of {prompt.source}")
    return f"{reward.use} gives an empty response {empty}, and one that repeats the prompt {repeated}"


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


def length_of_run(job: Job, tokenizer: "Tokenizer") -> str:
    """Return the passes over each source and the steps. Raise UserError if warm-up and decay do not fit into them."""
    from ptf.data.sources.blocks import Location, resolve_files
    from ptf.recipes import registry
    from ptf.train.data_plan import preview_data, raise_if_schedule_is_longer
    from ptf.train.source_specs import specs

    if sum(sum(resolve_files(Location.of(spec)).sizes) for spec in specs(job.data.sources).values()) > MOST_BYTES:
        return f"the sources have more than {MOST_BYTES >> 20} MiB; {HOW}"
    plan = preview_data(job, registry.build(job), tokenizer, FEW_ROWS)[0]
    raise_if_schedule_is_longer(job, plan)
    return plan.describe()
