"""Names of settings that people bring from other frameworks (TRL, transformers, verl, axolotl, LLaMA-Factory),
and the keys that do the same here.

Of several keys the first that the job has is quoted. The text behind them says what is different.
"""

from collections.abc import Container

# their names, the keys of ptf that do the same, and what is different
TABLE = (
    # length of a run and optimizer
    ("learning_rate peak_lr", "train.lr", ""),
    ("max_steps total_training_steps num_training_steps train_steps", "train.steps", ""),
    ("num_train_epochs num_epochs total_epochs", "train.epochs train.steps", ""),
    ("lr_warmup_steps num_warmup_steps", "train.warmup_steps", ""),
    ("warmup_ratio lr_warmup_steps_ratio", "train.warmup_steps", "below 1 it is a share of the run"),
    ("lr_scheduler_type lr_scheduler lr_schedule", "train.schedule", ""),
    ("max_grad_norm grad_clip gradient_clipping clip_grad", "train.max_grad_norm", ""),
    ("adam_beta1 adam_beta2", "train.betas", "both in one list"),
    ("adam_epsilon", "train.eps", ""),
    ("optim optimizer_type", "train.optimizer", "adamw, adamw_8bit or adamw_offload"),
    ("bf16 fp16 dtype torch_dtype mixed_precision", "train.precision", ""),
    (
        "gradient_checkpointing enable_gradient_checkpointing",
        "train.activation_checkpointing",
        "none, block, offload or selective",
    ),
    (
        "attn_implementation use_liger_kernel liger_kernel use_liger",
        "train.fused",
        "kernels that are used; those that the machine has are by default",
    ),
    ("torch_compile", "train.compile", "norms, gates and rotary embeddings only"),
    # batches
    (
        "batch_size train_batch_size global_batch_size",
        "train.global_batch_sequences rollout.prompts_per_step",
        "of a whole step, over all workers: packed sequences of data.seq_len tokens; online: prompts",
    ),
    (
        "per_device_train_batch_size micro_batch_size micro_batch_size_per_gpu ppo_micro_batch_size_per_gpu",
        "train.micro_batch_sequences",
        "packed, of data.seq_len tokens, in one pass of a worker",
    ),
    (
        "gradient_accumulation_steps",
        "train.micro_batch_sequences",
        "passes follow from it and train.global_batch_sequences",
    ),
    (
        "ppo_mini_batch_size mini_batch_size num_mini_batches",
        "algo.num_minibatches",
        "how many optimizer steps a pass over the rollouts has",
    ),
    ("ppo_epochs num_ppo_epochs num_iterations", "algo.update_epochs", ""),
    # data
    (
        "max_length max_seq_length max_seq_len sequence_len cutoff_len max_prompt_length model_max_length",
        "data.seq_len",
        "tokens of a packed sequence; prompt and response together",
    ),
    (
        "packing sample_packing padding_free neat_packing",
        "data.seq_len",
        "samples are always packed, and never see each other",
    ),
    (
        "train_on_inputs assistant_only_loss completion_only_loss train_on_prompt",
        "data.train_on",
        "by default what the assistant says is trained, and nothing else",
    ),
    (
        "dataset datasets dataset_name dataset_path train_files train_file",
        "data.sources",
        "a map: name → section with a `path`",
    ),
    (
        "split config subset dataset_config dataset_config_name dataset_split",
        "data.sources",
        "the path of a source ends with it, owner/name:config:split or directory::split",
    ),
    (
        "eval_dataset val_files test_datasets val_set_size validation_file",
        "data.validation evaluate.sources",
        "a map: name → section with a `path`",
    ),
    ("shuffle_seed data_seed", "seed", ""),
    ("dataloader_num_workers", "data.pretokenize", "a thread packs ahead of training; it has no number to set"),
    ("dataset_num_proc", "data.pretokenize", "the tokenize stage takes all cores"),
    # model
    ("model_name_or_path base_model model_name pretrained_model", "model.path", ""),
    ("revision model_revision", "model.path", "its end: owner/name@revision"),
    ("tokenizer_path tokenizer_name", "model.tokenizer", ""),
    ("template", "model.chat_template", "by default the tokenizer's own"),
    ("lora_r lora_rank", "model.lora.rank", ""),
    ("lora_alpha", "model.lora.alpha", ""),
    ("lora_target_modules target_modules lora_target", "model.lora.targets", ""),
    ("use_rslora", "model.lora.alpha", "rsLoRA is an alpha that is √rank times as large"),
    ("load_in_4bit bnb_4bit_quant_type quantization_bit", "model.quantization", "nf4"),
    ("peft_config adapter use_peft", "model.lora", "a section: rank, alpha, targets"),
    # rollouts
    ("max_completion_length max_response_length response_length", "rollout.max_new_tokens evaluate.max_new_tokens", ""),
    ("num_generations num_return_sequences rollout_n n_samples_per_prompt", "rollout.group_size", ""),
    ("reward_funcs reward_function custom_reward_function", "rollout.reward", ""),
    ("rollout_func agent_loop", "rollout.play", ""),
    ("reward_model_path", "rollout.reward_model.path", ""),
    ("use_vllm rollout_backend", "rollout.engine evaluate.engine", ""),
    ("vllm_mode", "compute.pools", ""),
    ("vllm_gpu_memory_utilization", "rollout.gpu_memory_utilization", ""),
    ("tensor_model_parallel_size vllm_tensor_parallel_size", "rollout.tensor_parallel_size", ""),
    # algorithms
    ("kl_loss_coef init_kl_coef kl_coeff beta", "algo.kl_coef algo.beta", ""),
    ("kl_penalty kl_loss_type", "algo.kl_estimator", ""),
    ("use_kl_in_reward use_kl_loss", "algo.kl_in", "loss or reward"),
    ("epsilon cliprange clip_ratio eps_clip", "algo.clip_low algo.clip_high", "set algo.clip_high, too"),
    ("clip_ratio_low", "algo.clip_low", ""),
    ("epsilon_high clip_ratio_high", "algo.clip_high", ""),
    ("entropy_coeff ent_coef", "algo.entropy_coef", ""),
    ("cliprange_value vf_clip", "algo.value_clip", ""),
    ("scale_rewards norm_adv_by_std_in_grpo", "algo.scale_by_std", ""),
    ("clip_ratio_c delta", "algo.dual_clip", ""),
    ("rollout_is", "algo.tis_level", ""),
    ("importance_sampling_mode", "algo.tis_mode", ""),
    ("loss_mode", "algo.policy_loss", ""),
    (
        "loss_agg_mode",
        "algo.loss_aggregation",
        "token-mean is token_mean, seq-mean-token-mean is episode_mean, and seq-mean-token-sum-norm is constant_length",
    ),
    ("loss_type", "algo.loss_aggregation algo.policy_loss", ""),
    ("vllm_importance_sampling_cap tis_imp_ratio_cap rollout_is_threshold", "algo.tis_cap", ""),
    ("overlong_buffer overlong_buffer_cfg soft_punish_cache", "algo.overlong_buffer_tokens", ""),
    (
        "dynamic_sampling filter_groups",
        "rollout.max_resampling_rounds",
        "draws other prompts in place of groups with equal rewards",
    ),
    ("mask_truncated_completions", "algo.overlong_filter", ""),
    ("center_rewards_coefficient", "algo.center_coef", ""),
    ("precompute_ref_log_probs", "algo.precompute", ""),
    (
        "ref_model reference_model ref_model_path",
        "algo.reference algo.kl_coef",
        "in online recipes the reference is the model that training starts from, and algo.kl_coef its weight",
    ),
    ("teacher_model teacher_model_name_or_path", "algo.teacher algo.teachers", ""),
    ("adv_estimator algorithm stage rl", "recipe", ""),
    # machines
    (
        "num_gpus n_gpus_per_node num_processes nproc_per_node nnodes",
        "compute.workers",
        "training processes, one per GPU, of all machines; pools of rollouts have GPUs of their own",
    ),
    (
        "fsdp fsdp_config deepspeed zero_stage",
        "compute.mesh",
        "weights, gradients and optimizer are sharded over the workers (FSDP2)",
    ),
    ("tp_size", "compute.mesh.tensor_parallel_size", ""),
    (
        "cp cp_size context_parallel sequence_parallel_size ulysses_sequence_parallel_size",
        "compute.mesh.context_parallel_size",
        "",
    ),
    # files, checkpoints, logs
    ("output_dir default_local_dir save_dir", "output", ""),
    ("save_steps save_freq save_interval", "checkpoint.every", ""),
    ("save_total_limit", "checkpoint.keep", ""),
    ("load_best_model_at_end metric_for_best_model", "checkpoint.best evaluate.metrics", ""),
    ("early_stopping_patience", "train.early_stopping", ""),
    ("eval_steps test_freq eval_interval", "train.validate_every", ""),
    ("logging_steps", "track.print_every", ""),
    ("report_to wandb project_name", "track.wandb_project", "metrics.jsonl is always written, TensorBoard by default"),
    ("hub_model_id push_to_hub", "publish.hub", ""),
    (
        "resume_from_checkpoint run_name",
        "",
        "no key: a run is named and continued by `ptf train CONFIG --run-name NAME`",
    ),
)
FOREIGN = {name: (keys.split(), note) for names, keys, note in TABLE for name in names.split()}


def hint(name: str, keys: Container[str]) -> str:
    """Return the end of a message that names the key of `keys` which does what a framework calls `name`.

    Return an empty text where there is none.
    """
    here, note = FOREIGN.get(name.lower(), ((), ""))
    if not here:
        return f"  ({note})" if note else ""
    key = next((key for key in here if key in keys), None)
    return f"  (here it is {key}{f': {note}' if note else ''})" if key else ""
