"""The section `train`: the optimizer, its schedule and the loop."""

from typing import Annotated, Literal

from pydantic import Field

from ptf.config.section import Count, Fraction, Positive, PositiveFloat, Section, Steps, free


class StopConfig(Section):
    """A condition that ends a run early."""

    metric: str
    """`loss/NAME` of one of `data.validation`."""
    mode: Literal["min", "max"] = "min"
    """Whether lower (`min`) or higher (`max`) is better."""
    patience: Positive = 3
    """Number of measurements in a row (one every `train.validate_every` steps) without an improvement after which the
    run ends."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Smallest change that counts as an improvement."""


class TrainConfig(Section):
    """The optimizer and the loop."""

    steps: Positive | None = None
    """Number of global steps; in online recipes a step is one rollout with its update."""
    epochs: Positive | None = None
    """Passes over the data, in place of `steps` (offline recipes). The number of steps is computed before training, in
    a pass over the data."""
    lr: PositiveFloat
    """Peak learning rate of AdamW."""
    lr_groups: dict[str, PositiveFloat] = {}
    """Factors on `lr` by pattern of unified names (`{embed: 10, "*.lora_b": 16}`). The first pattern that matches
    applies; other parameters have factor 1."""
    sequences: Positive = 8
    """Packed sequences in a global step (offline recipes), over all workers."""
    micro_sequences: Positive = free(8)
    """Packed sequences in one forward and backward pass of a worker."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the decay after warm-up."""
    warmup: Steps = 0
    """Steps of linear warm-up, or, below 1, its share of the run (`0.03`)."""
    decay: Steps | None = None
    """Steps of decay at the end, or its share of the run; default: all steps after the warm-up."""
    decay_at_loss: PositiveFloat | None = None
    """Held-out loss (of the first of `data.validation`) at which the decay begins early. The run then ends `decay`
    steps later, and never after `steps`."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the decay, as a share of `lr`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of matrices; norms and biases have none."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's averages of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: PositiveFloat = 1.0
    """Largest global norm of the gradient."""
    on_nonfinite: Literal["stop", "skip"] = free("stop")
    """What to do if the loss or the gradient is not finite: end the run, or skip the step (at most 10 in a row). The
    documents of the step are written to `RUN/nonfinite/`."""
    early_stopping: StopConfig | None = None
    """Offline recipes: end the run when a held-out metric no longer improves."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """`bf16` computes in bfloat16 over fp32 master weights, optimizer and reductions. Frozen models, such as
    a reference or a teacher, are then held in bfloat16. Frozen weights of the trained model (`model.lora`,
    `model.trainable`) are held in bfloat16 only if its checkpoint is stored in bfloat16, otherwise in fp32, so that the
    export loses nothing."""
    activation_checkpointing: Literal["none", "block", "selective"] = free("none")
    """What the backward pass recomputes instead of keeping it in memory. `block`: everything inside a layer.
    `selective`: only cheap operations, that is all but matrix products and attention."""
    optimizer_offload: bool = free(False)
    """Keep AdamW's averages in host memory, 8 bytes a trained parameter, and step with those of 256 MiB, or of one
    parameter, on the device. The bits are the same; a step on a GPU also takes the time to copy them in and out. To
    save or to resume, all of them are on the device, where there are no activations then."""
    deterministic: bool = False
    """Compute the same bits for any `micro_sequences` and any number of workers, by adding the gradients of sequences
    in a fixed order. For small models in fp32 on a CPU."""
    compile: Literal["auto"] | bool = free("auto")
    """Compile norms, gates and rotary embeddings (torch.compile, for any shape), which saves memory traffic in every
    step. `auto`: on a GPU; not on a CPU, where compiling takes longer than many a run (22 to 96 s for each of the three
    on 2 busy cores) and changes the last bits."""
    validate_every: Count = free(0)
    """Steps between held-out losses, or (online) between greedy passes over `evaluate.sources`; 0: never."""
