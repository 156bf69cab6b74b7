"""Names of settings that people bring from other frameworks (TRL, transformers, verl, axolotl, LLaMA-Factory),
and the keys that do the same here.

Of several keys the first that the job has is quoted. The text behind them says what is different.
"""

from collections.abc import Container
from typing import NamedTuple


class Here(NamedTuple):
    """What does the same in ptf."""

    keys: tuple[str, ...]
    note: str = ""


def at(*keys: str, note: str = "") -> Here:
    """Return the keys of ptf that do what another framework's key does, with a note on the difference."""
    return Here(keys, note)


BATCH = at(
    "train.global_batch_sequences",
    "rollout.prompts_per_step",
    note="of a whole step, over all workers: packed sequences of data.seq_len tokens; online: prompts",
)
PASS = at("train.micro_batch_sequences", note="packed, of data.seq_len tokens, in one pass of a worker")
PARTS = at("algo.num_minibatches", note="how many optimizer steps a pass over the rollouts has")
LENGTH = at("data.seq_len", note="tokens of a packed sequence; prompt and response together")
PACKED = at("data.seq_len", note="samples are always packed, and never see each other")
TRAINED = at("data.train_on", note="by default what the assistant says is trained, and nothing else")
SOURCES = at("data.sources", note="a map: name → section with a `path`")
CHOSEN = at("data.sources", note="the path of a source ends with it, owner/name:config:split or directory::split")
HELD_OUT = at("data.validation", "evaluate.sources", note="a map: name → section with a `path`")
ANSWER = at("rollout.max_new_tokens", "evaluate.max_new_tokens")
GROUP = at("rollout.group_size")
KL = at("algo.kl_coef", "algo.beta")
KL_IN = at("algo.kl_in", note="loss or reward")
ADAPTERS = at("model.lora", note="a section: rank, alpha, targets")
WORKERS = at(
    "compute.workers", note="training processes, one per GPU, of all machines; pools of rollouts have GPUs of their own"
)
SHARDED = at("compute.mesh", note="weights, gradients and optimizer are sharded over the workers (FSDP2)")
AGGREGATION = (
    "token-mean is token_mean, seq-mean-token-mean is episode_mean, and seq-mean-token-sum-norm is constant_length"
)
RECIPE = at("recipe")
LOGGED = at("track.wandb_project", note="metrics.jsonl is always written, TensorBoard by default")

FOREIGN: dict[str, Here] = {
    # length of a run and optimizer
    **dict.fromkeys(("learning_rate", "peak_lr"), at("train.lr")),
    **dict.fromkeys(("max_steps", "total_training_steps", "num_training_steps", "train_steps"), at("train.steps")),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "total_epochs"), at("train.epochs", "train.steps")),
    **dict.fromkeys(("lr_warmup_steps", "num_warmup_steps"), at("train.warmup_steps")),
    **dict.fromkeys(
        ("warmup_ratio", "lr_warmup_steps_ratio"), at("train.warmup_steps", note="below 1 it is a share of the run")
    ),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "lr_schedule"), at("train.schedule")),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clipping", "clip_grad"), at("train.max_grad_norm")),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), at("train.betas", note="both in one list")),
    "adam_epsilon": at("train.eps"),
    **dict.fromkeys(("optim", "optimizer_type"), at("train.optimizer", note="adamw, adamw_8bit or adamw_offload")),
    **dict.fromkeys(("bf16", "fp16", "dtype", "torch_dtype", "mixed_precision"), at("train.precision")),
    **dict.fromkeys(
        ("gradient_checkpointing", "enable_gradient_checkpointing"),
        at("train.activation_checkpointing", note="none, block, offload or selective"),
    ),
    **dict.fromkeys(
        ("attn_implementation", "use_liger_kernel", "liger_kernel", "use_liger"),
        at("train.fused", note="kernels that are used; those that the machine has are by default"),
    ),
    "torch_compile": at("train.compile", note="norms, gates and rotary embeddings only"),
    # batches
    **dict.fromkeys(("batch_size", "train_batch_size", "global_batch_size"), BATCH),
    **dict.fromkeys(
        ("per_device_train_batch_size", "micro_batch_size", "micro_batch_size_per_gpu", "ppo_micro_batch_size_per_gpu"),
        PASS,
    ),
    "gradient_accumulation_steps": at(
        "train.micro_batch_sequences", note="passes follow from it and train.global_batch_sequences"
    ),
    **dict.fromkeys(("ppo_mini_batch_size", "mini_batch_size", "num_mini_batches"), PARTS),
    **dict.fromkeys(("ppo_epochs", "num_ppo_epochs", "num_iterations"), at("algo.update_epochs")),
    # data
    **dict.fromkeys(("max_length", "max_seq_length", "max_seq_len", "sequence_len", "cutoff_len"), LENGTH),
    **dict.fromkeys(("max_prompt_length", "model_max_length"), LENGTH),
    **dict.fromkeys(("packing", "sample_packing", "padding_free", "neat_packing"), PACKED),
    **dict.fromkeys(("train_on_inputs", "assistant_only_loss", "completion_only_loss", "train_on_prompt"), TRAINED),
    **dict.fromkeys(("dataset", "datasets", "dataset_name", "dataset_path", "train_files", "train_file"), SOURCES),
    **dict.fromkeys(("split", "config", "subset", "dataset_config", "dataset_config_name", "dataset_split"), CHOSEN),
    **dict.fromkeys(("eval_dataset", "val_files", "test_datasets", "val_set_size", "validation_file"), HELD_OUT),
    **dict.fromkeys(("shuffle_seed", "data_seed"), at("seed")),
    "dataloader_num_workers": at("data.pretokenize", note="a thread packs ahead of training; it has no number to set"),
    "dataset_num_proc": at("data.pretokenize", note="the tokenize stage takes all cores"),
    # model
    **dict.fromkeys(("model_name_or_path", "base_model", "model_name", "pretrained_model"), at("model.path")),
    **dict.fromkeys(("revision", "model_revision"), at("model.path", note="its end: owner/name@revision")),
    **dict.fromkeys(("tokenizer_path", "tokenizer_name"), at("model.tokenizer")),
    "template": at("model.chat_template", note="by default the tokenizer's own"),
    **dict.fromkeys(("lora_r", "lora_rank"), at("model.lora.rank")),
    "lora_alpha": at("model.lora.alpha"),
    **dict.fromkeys(("lora_target_modules", "target_modules", "lora_target"), at("model.lora.targets")),
    "use_rslora": at("model.lora.alpha", note="rsLoRA is an alpha that is √rank times as large"),
    **dict.fromkeys(("load_in_4bit", "bnb_4bit_quant_type", "quantization_bit"), at("model.quantization", note="nf4")),
    **dict.fromkeys(("peft_config", "adapter", "use_peft"), ADAPTERS),
    # rollouts
    **dict.fromkeys(("max_completion_length", "max_response_length", "response_length"), ANSWER),
    **dict.fromkeys(("num_generations", "num_return_sequences", "rollout_n", "n_samples_per_prompt"), GROUP),
    **dict.fromkeys(("reward_funcs", "reward_function", "custom_reward_function"), at("rollout.reward")),
    **dict.fromkeys(("rollout_func", "agent_loop"), at("rollout.play")),
    "reward_model_path": at("rollout.reward_model.path"),
    **dict.fromkeys(("use_vllm", "rollout_backend"), at("rollout.engine", "evaluate.engine")),
    "vllm_mode": at("compute.pools"),
    "vllm_gpu_memory_utilization": at("rollout.gpu_memory_utilization"),
    **dict.fromkeys(("tensor_model_parallel_size", "vllm_tensor_parallel_size"), at("rollout.tensor_parallel_size")),
    # algorithms
    **dict.fromkeys(("kl_loss_coef", "init_kl_coef", "kl_coeff"), KL),
    "beta": KL,
    **dict.fromkeys(("kl_penalty", "kl_loss_type"), at("algo.kl_estimator")),
    **dict.fromkeys(("use_kl_in_reward", "use_kl_loss"), KL_IN),
    **dict.fromkeys(
        ("epsilon", "cliprange", "clip_ratio", "eps_clip"),
        at("algo.clip_low", "algo.clip_high", note="set algo.clip_high, too"),
    ),
    "clip_ratio_low": at("algo.clip_low"),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high"), at("algo.clip_high")),
    **dict.fromkeys(("entropy_coeff", "ent_coef"), at("algo.entropy_coef")),
    **dict.fromkeys(("cliprange_value", "vf_clip"), at("algo.value_clip")),
    **dict.fromkeys(("scale_rewards", "norm_adv_by_std_in_grpo"), at("algo.scale_by_std")),
    **dict.fromkeys(("clip_ratio_c", "delta"), at("algo.dual_clip")),
    "rollout_is": at("algo.tis_level"),
    "importance_sampling_mode": at("algo.tis_mode"),
    "loss_mode": at("algo.policy_loss"),
    "loss_agg_mode": at("algo.loss_aggregation", note=AGGREGATION),
    "loss_type": at("algo.loss_aggregation", "algo.policy_loss"),
    **dict.fromkeys(("vllm_importance_sampling_cap", "tis_imp_ratio_cap", "rollout_is_threshold"), at("algo.tis_cap")),
    **dict.fromkeys(("overlong_buffer", "overlong_buffer_cfg", "soft_punish_cache"), at("algo.overlong_buffer_tokens")),
    **dict.fromkeys(
        ("dynamic_sampling", "filter_groups"),
        at("rollout.max_resampling_rounds", note="draws other prompts in place of groups with equal rewards"),
    ),
    "mask_truncated_completions": at("algo.overlong_filter"),
    "center_rewards_coefficient": at("algo.center_coef"),
    "precompute_ref_log_probs": at("algo.precompute"),
    **dict.fromkeys(
        ("ref_model", "reference_model", "ref_model_path"),
        at(
            "algo.reference",
            "algo.kl_coef",
            note="in online recipes the reference is the model that training starts from, and algo.kl_coef its weight",
        ),
    ),
    **dict.fromkeys(("teacher_model", "teacher_model_name_or_path"), at("algo.teacher", "algo.teachers")),
    **dict.fromkeys(("adv_estimator", "algorithm", "stage", "rl"), RECIPE),
    # machines
    **dict.fromkeys(("num_gpus", "n_gpus_per_node", "num_processes", "nproc_per_node", "nnodes"), WORKERS),
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed", "zero_stage"), SHARDED),
    "tp_size": at("compute.mesh.tensor_parallel_size"),
    # files, checkpoints, logs
    **dict.fromkeys(("output_dir", "default_local_dir", "save_dir"), at("output")),
    **dict.fromkeys(("save_steps", "save_freq", "save_interval"), at("checkpoint.every")),
    "save_total_limit": at("checkpoint.keep"),
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model"), at("checkpoint.best", "evaluate.metrics")),
    "early_stopping_patience": at("train.early_stopping"),
    **dict.fromkeys(("eval_steps", "test_freq", "eval_interval"), at("train.validate_every")),
    "logging_steps": at("track.print_every"),
    **dict.fromkeys(("report_to", "wandb", "project_name"), LOGGED),
    **dict.fromkeys(("hub_model_id", "push_to_hub"), at("publish.hub")),
    **dict.fromkeys(
        ("resume_from_checkpoint", "run_name"),
        Here((), "no key: a run is named and continued by `ptf train CONFIG --run-name NAME`"),
    ),
}


def hint(name: str, keys: Container[str]) -> str:
    """Return the end of a message that names the key of `keys` which does what a framework calls `name`.

    Return an empty text where there is none.
    """
    here = FOREIGN.get(name.lower())
    if here is None:
        return ""
    if not here.keys:
        return f"  ({here.note})"
    key = next((key for key in here.keys if key in keys), None)
    return f"  (here it is {key}{f': {here.note}' if here.note else ''})" if key else ""
