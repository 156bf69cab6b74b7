"""`ptf check --dry-run`: one step of a job on this machine, with a model of the same architecture whose layers are 64
wide.

The job itself runs in this process, with its own data, template, reward, components and recipe; only sizes are changed.
It therefore fails now where it would fail an hour into the run: at a row that cannot be masked, a reward that raises, a
directory that cannot be written.
"""

import json
import shutil
import tempfile
import time
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ptf import storage
from ptf.compute.device_defaults import settled
from ptf.compute.world import World
from ptf.config import Job, Plugin, resolve
from ptf.config.backends import BACKENDS
from ptf.config.sections.compute import MeshConfig
from ptf.config.sections.model import ModelConfig
from ptf.config.sections.rollout import RolloutConfig
from ptf.errors import UserError
from ptf.model.backends import backend_of
from ptf.model.model_files import locate
from ptf.model.model_writer import save_hf
from ptf.recipes import registry
from ptf.run import resolved, run
from ptf.train.model_source import ModelSource
from ptf.train.trainer import load_model

ROWS = 64  # of each source
GPU_GIB = 80.0
SMALL = {  # keys of Hugging Face configs, as far as a model has them
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_experts_per_tok": 2,
    "query_pre_attn_scalar": 16,
}
KEPT_ANYWAY = (
    "tokenizer",
    "special_tokens",
    "added_tokens",
    "chat_template",
    "vocab",
    "merges",
    "generation_config",
    "preprocessor",
)


def fetched(job: Job) -> Job:
    """Return the job with what `data.prepare` makes, and with its model on this machine."""
    job = resolved(job)
    return resolve(job, models={job.model.path: str(locate(job.model.path, verify_up_to=None))})


def rehearse(job: Job) -> None:
    """Run a resolved job small, and print what is done. Raise UserError at the first thing that fails."""
    began, tell = time.monotonic(), partial(print, flush=True)
    job = settled(job)
    for key, place in {"checkpoint.to": job.checkpoint.to, "publish.to": job.publish.to, "output": job.output}.items():
        if place:
            writable(key, place)
            tell(f"{key}: {place} can be written")
    on_gpu = job.compute.device == "cuda" or (job.compute.device == "auto" and torch.cuda.is_available())
    if on_gpu and BACKENDS[job.model.backend].planned:
        tell(memory(job))
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        source = locate(job.model.path, verify_up_to=None)
        shrink(source, model)
        small = smaller(with_small_frozen_models(job, source, Path(scratch)), model, str(source), f"{scratch}/runs")
        tell(
            f"one step of {job.recipe if isinstance(job.recipe, str) else job.recipe.use} on a model with hidden size "
            f"64, {ROWS} rows of each source:"
        )
        run(small, "rehearsal")
        check_rewards(small, Path(scratch) / "runs" / "rehearsal")
    tell(
        f"data, template, reward and one step: no problem found ({time.monotonic() - began:.0f} s); not tested: "
        "memory, speed, several processes"
    )


def memory(job: Job) -> str:
    """Return a line on what the fullest GPU will need, as `ptf plan` computes it."""
    from ptf.rl.online_budget import online_budget
    from ptf.train.budget import budget, config_directory

    directory, workers = config_directory(job.model.path), job.compute.workers
    if job.rollout and isinstance(job.rollout.engine, Plugin):
        return "memory: not counted, because the rollout engine is your own"
    if job.rollout:
        plan = online_budget(job, directory, workers, room_gib=GPU_GIB)
        need, gpus = max(pool.total(phase) for pool in plan.pools for phase in pool.phases), plan.gpus
    else:
        plan = budget(job, directory, workers, room_gib=GPU_GIB)
        need, gpus = plan.memory.total, workers
    line = f"memory: {need / 2**30:.1f} GiB on the fullest of {gpus} GPUs"
    return line if plan.fits else f"{line}, which have {GPU_GIB:g}: `ptf plan` says what to change"


def writable(key: str, place: str) -> None:
    """Write a file there and remove it. Raises UserError."""
    probe = f"{place.rstrip('/')}/.ptf-{uuid.uuid4().hex}"
    existed = storage.exists(place)
    try:
        storage.write_text(probe, "")
        storage.remove(probe)
    except OSError as e:
        raise UserError(f"{key}: {place} cannot be written: {e}") from None
    if not existed and storage.is_local(place):
        Path(place).rmdir()


def shrink(source: Path, into: Path) -> None:
    """Write a directory with the tokenizer of `source`, and its config with the same family and number of layers but
    small sizes (`narrow`). It has no weights."""
    into.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file.name.startswith(KEPT_ANYWAY):
            shutil.copyfile(file, into / file.name)
    if (templates := source / "additional_chat_templates").is_dir():
        shutil.copytree(templates, into / templates.name)
    (into / "config.json").write_text(json.dumps(narrow(json.loads((source / "config.json").read_text()))))


def with_small_frozen_models(job: Job, model: Path, scratch: Path) -> Job:
    """Return the job with narrow models of random weights in place of the ones that its recipe looks at.

    Raise UserError for one that does not go with the job's model.
    """
    paths = {}
    for role, one in registry.build(job).frozen_models.items():
        if one.path is None:
            continue
        source = ModelSource.of(one, role, job.model)
        place, of_config = source.directory, scratch / f"{role}.config"
        if one.same_architecture:
            build = backend_of(job.model.backend).build
            source.raise_if_other_architecture(build(place).config, build(model).config)
        shrink(place, of_config)
        drawn = load_model(
            of_config,
            World(),
            ModelConfig(path="-", init="random", backend=source.section.backend),
            seed=0,
            precision="fp32",
        )
        paths[one.path] = str(scratch / role)
        tokenizer = str(place) if (place / "tokenizer_config.json").exists() else None
        save_hf(
            drawn.hf_tensors(),
            of_config,
            scratch / role,
            writes=True,
            tokenizer=tokenizer,
            carried=drawn.carried(of_config),
        )
    return resolve(job, models=paths)


def narrow(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's config with small sizes."""
    inner: dict[str, Any] = {
        key: narrow(value) if key == "text_config" else value
        for key, value in config.items()
        if key != "quantization_config"
    }
    small = {key: min(size, inner[key]) for key, size in SMALL.items() if isinstance(inner.get(key), int)}
    if "kv_lora_rank" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]  # which latent attention must have
    if small.get("num_attention_heads", 4) % small.get("num_key_value_heads", 1):
        small["num_key_value_heads"] = 1
    return {**inner, **small}


def smaller(job: Job, model: Path, source: str, output: str) -> Job:
    """Return the job, one step long, in this process."""

    def few(sources):
        return {name: s.model_copy(update={"limit": min(s.limit or ROWS, ROWS)}) for name, s in sources.items()}

    updates: dict[str, Any] = {
        "output": output,
        "model": smaller_model(job.model, model, source),
        "data": job.data.model_copy(
            update={
                "sources": few(job.data.sources),
                "validation": few(job.data.validation),
                "partitions": 1,
                "shuffle_buffer": min(job.data.shuffle_buffer, 8),
                "prepare": None,
            }
        ),
        "train": job.train.model_copy(
            update={
                "steps": 1,
                "epochs": None,
                "global_batch_sequences": 1,
                "micro_batch_sequences": 1,
                "warmup_steps": 0,
                "lr_decay_steps": None,
                "lr_decay_at_loss": None,
                "early_stopping": None,
                "validate_every": min(job.train.validate_every, 1),
                "compile": False,
            }
        ),
        "compute": job.compute.model_copy(
            update={"launcher": "local", "address": None, "workers": 1, "device": "cpu", "mesh": MeshConfig()}
        ),
        "checkpoint": job.checkpoint.model_copy(update={"to": None, "every": 1, "best": None}),
        "track": job.track.model_copy(update={"tensorboard": False, "wandb_project": None}),
        "evaluate": job.evaluate.model_copy(update={"sources": few(job.evaluate.sources), "limit": 2}),
    }
    if job.rollout:
        updates["rollout"] = smaller_rollout(job.rollout)
    return job.model_copy(update=updates)


def smaller_model(spec: ModelConfig, model: Path, source: str) -> ModelConfig:
    """Return the section `model` with the narrow model of random weights."""
    tokens = spec.tokens
    if tokens and tokens.vectors:  # they have the width of the real model
        tokens = tokens.model_copy(update={"init": "mean"})
    start = {
        "path": str(model),
        "init": "random",
        "tokenizer": spec.tokenizer or source,
        "tokens": tokens,
    }
    return spec.model_copy(update=start)


def smaller_rollout(rollout: RolloutConfig) -> RolloutConfig:
    """Return the section `rollout` with two short responses to two prompts, of one native engine."""
    answer = rollout.max_new_tokens if rollout.constrained_decoding else min(rollout.max_new_tokens, 8)
    return rollout.model_copy(
        update={
            "engine": "native",
            "prompts_per_step": 2,
            "group_size": 2,
            "replicas": 1,
            "max_new_tokens": answer,
            "max_no_result_share": 1.0,
            "transport": "object_store",
            "tensor_parallel_size": 1,
        }
    )


def check_rewards(job: Job, directory: Path) -> None:
    """Raise UserError if the reward had no result for what the small model said."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    if job.rollout and (failed := rows[-1].get("no_result_share", 0.0)) > 0:
        names = ("reward", "environment", "play", "harness")
        what = next((name for name in names if getattr(job.rollout, name)), "reward_model")
        raise UserError(f"rollout.{what} gave no result for {failed:.0%} of the responses; the lines above say why")
