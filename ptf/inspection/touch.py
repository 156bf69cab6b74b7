"""What `ptf check` opens of what a job names: models, the tokenizer, the first rows of each source, and the reward.

The functions that open them are those of training, so a problem has the words with which training would stop. Nothing
is downloaded, and torch is imported only if one of these is here.
"""

import contextlib

from ptf.config import Job, model_paths, resolve, sources_of
from ptf.config.plugin_checks import warnings
from ptf.config.plugin_code import code_of
from ptf.inspection.places import HOW, is_here
from ptf.recipes.grpo.config import GRPOConfig
from ptf.rl.engines.vllm_support import config_of, raise_if_wrong


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
    if here & {"model.path", key_of_tokenizer}:
        from ptf.inspection import opened

        model = opened.look_at_models(job) if "model.path" in here else None
        lines += opened.look_at_rows(job, here, model) if key_of_tokenizer in here else []
    if absent := [f"{key} ({path})" for key, path in named.items() if key not in here]:
        lines.append(f"not on this machine, so not looked at: {', '.join(absent)}; {HOW}")
    return lines


def raise_if_vllm_is_wrong(job: Job) -> None:
    """Raise UserError if an engine of the job is vLLM, which does not serve its model rightly. A model that is not on
    this machine is judged when the job starts."""
    config = config_of(job.model.path)
    if job.rollout and job.rollout.engine == "vllm":
        raise_if_wrong("rollout.engine", config, job.train.precision, synced=job.rollout.lora_sync != "adapter")
    if job.evaluate.sources and job.evaluate.engine == "vllm":
        raise_if_wrong("evaluate.engine", config, job.train.precision, synced=False)
