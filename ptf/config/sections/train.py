"""The section `train`: the optimizer, its schedule and the loop."""

from typing import Annotated, Literal

from pydantic import Field

from ptf.config.section import Count, Fraction, Positive, PositiveFloat, Section, Steps, changeable


class TrainConfig(Section):
    """The optimizer and the loop."""

    steps: Positive | None = None
    """Number of steps. In offline recipes a step is one optimizer step. In online recipes it generates
    `rollout.prompts_per_step` × `rollout.group_size` responses and makes up to `algo.update_epochs` ×
    `algo.num_minibatches` optimizer steps on them; schedule, checkpoints and validation count these steps."""
    epochs: Positive | None = None
    """Passes over the data, in place of `steps` (offline recipes). The number of steps is computed before training, in
    a pass over the data."""
    lr: PositiveFloat
    """Peak learning rate of AdamW."""
    lr_multipliers: dict[str, PositiveFloat] = {}
    """Factors on `lr` by pattern of ptf's parameter names (`{embed: 10, "*.lora_b": 16}`). The first pattern that
    matches applies; other parameters have factor 1."""
    global_batch_sequences: Positive = 8
    """Packed sequences per optimizer step over all workers, in offline recipes. Online recipes do not use it: an
    optimizer step there trains on `rollout.prompts_per_step` × `rollout.group_size` / `algo.num_minibatches`
    responses."""
    micro_batch_sequences: Positive = changeable(8)
    """Packed sequences in one forward and backward pass of a worker."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the decay after warm-up."""
    warmup_steps: Steps = 0
    """Length of the linear warm-up in steps, or, below 1, as a share of the run (`0.03`)."""
    lr_decay_steps: Steps | None = None
    """Length of the decay at the end of the run in steps, or, below 1, as a share of the run. Default: all steps after
    the warm-up."""
    lr_decay_at_loss: PositiveFloat | None = None
    """Held-out loss (of the first of `data.validation`) at which the decay begins early. The run then ends
    `lr_decay_steps` later, and never after `steps`."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the decay, as a share of `lr`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of matrices; norms and biases have none."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of AdamW's moments: the averages of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: PositiveFloat = 1.0
    """A gradient with a larger global norm is scaled down to this norm (clipping)."""
    on_nonfinite: Literal["stop", "skip"] = changeable("stop")
    """What to do if the loss or the gradient is not finite: end the run, or skip the step (the tenth in a row ends the
    run). The documents of the step are written to `RUN/nonfinite/`."""
    early_stopping: Positive | None = None
    """Offline recipes: end the run after so many measurements in a row (one every `validate_every` steps) without a new
    lowest held-out loss: that of `checkpoint.best`, by default of the first of `data.validation`."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto`: bf16, but fp32 on a CPU without units for bf16 (AVX512-BF16, AMX, or ARM's), where bf16 takes several
    times as long; a run keeps what it began with. `bf16` computes in bfloat16; master weights, optimizer state and
    reductions are fp32. Frozen models, such as a reference or a teacher, are then held in bfloat16. Frozen weights of
    the trained model (`model.lora`, `model.trainable`) are held in bfloat16 only if its checkpoint is stored in
    bfloat16, otherwise in fp32, so that the export loses nothing."""
    activation_checkpointing: Literal["none", "block", "offload", "selective"] = changeable("none")
    """What the backward pass recomputes instead of keeping it in memory. `block`: everything inside a layer; the
    layer's input is kept. `offload`: the same, with the inputs in host memory, for long sequences. `selective`: only
    cheap operations, that is, all except matrix products and attention."""
    optimizer: Literal["adamw", "adamw_8bit", "adamw_offload"] = "adamw"
    """Where AdamW's moments are (docs/launch.md, "The optimizer's memory"). `adamw`: in fp32, 8 bytes per trained
    parameter. `adamw_8bit`: in 8 bits, about 2 bytes; needs bitsandbytes (`pip install 'ptf[bitsandbytes]'`).
    `adamw_offload`: in host memory; the same bits as `adamw`, in longer steps."""
    deterministic: bool = False
    """Add the gradients of sequences in a fixed order, so that the bits do not depend on how the batch is split
    (`micro_batch_sequences`) and on the number of workers. Without it, a run on one CPU machine repeats to the bit
    with the same split and number of workers. For small models in fp32 on a CPU."""
    compile: Literal["auto"] | bool = changeable("auto")
    """Compile norms, gates and rotary embeddings (torch.compile, for any shape), which saves memory traffic in every
    step. `auto` compiles on a GPU only: on a CPU, compilation takes longer than many runs (22 to 96 s for each of the
    three on 2 busy cores) and changes the last bits."""
    fused: Literal["auto"] | list[Literal["flash_attn", "flash_attn_4", "liger_kernel", "fla"]] = "auto"
    """Packages whose kernels training uses on a GPU in place of PyTorch's functions. `flash_attn_4` (flash-attn-4, on
    Hopper and Blackwell) or `flash_attn` (flash-attn, version 2): attention, in bf16; documents that share a prefix,
    attention sinks, heads of more than 256 dimensions and, with `flash_attn_4`, windows keep FlexAttention.
    `liger_kernel`: gates, of dense models and experts. `fla` (flash-linear-attention): the rule of linear attention, in
    bf16. `auto` uses those that the machine has, except `flash_attn_4`, which has to be named, and from Hopper on
    `flash_attn`, as version 2's kernels in torch were slower than FlexAttention on an H200; on a CPU it uses none. A
    list refuses to begin without one of them; `[]` uses none. The run's first lines name what is used, and a run does
    not continue with other versions, unless `checkpoint.accept_version_changes` allows it."""
    validate_every: Count = changeable(0)
    """Steps between measurements of the held-out losses, or (online recipes) between greedy passes over
    `evaluate.sources`; 0: never."""
