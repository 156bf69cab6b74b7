"""The schema of a config: every key of ptf. A `Job` is one YAML file: what to train, from what data, how, and where.

Keys are declared here and nowhere else. Each is *frozen* on resume (changing it would change what is trained) unless it
is declared with `free(...)`. Paths are relative to the working directory and may be local or any fsspec URI; two
prefixes point at what other stages make: `prepare:NAME` (a file or directory that `data.prepare` wrote) and
`job:CONFIG` (the model which that config last published).
"""

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, create_model, model_validator

from ptf.config.section import (
    Count,
    Fraction,
    Knobs,
    Patterns,
    Plug,
    Positive,
    PositiveFloat,
    Section,
    Steps,
    Temperature,
    free,
)

# Largest difference between two engines' log-prob of a token that is rounding and not a fault. A small model trained to
# a sharp function turns fp32 rounding (1e-7) into 1e-4 on tokens that it is unsure of: measured against float64,
# in the trainer and in vLLM alike.
LOGPROB_BOUND = {"fp32": 1e-3, "bf16": 0.2}


class TokensConfig(Section):
    """Tokens that the tokenizer does not have yet. The run starts from an extended copy of the model, which has rows
    for them; a token that the tokenizer has already keeps its id and its rows."""

    added: list[str] = []
    """Tokens, in the order of their ids."""
    file: str | None = None
    """jsonl of further tokens: rows of `token` and, for `init: description`, `description`; `prepare:NAME`."""
    semantic_ids: list[Positive] = []
    """Codes on each level of semantic ids: [256, 256] adds <a_0> … <a_255> and <b_0> … <b_255>."""
    special: bool = False
    """Register them as special tokens, which a decoder may leave out of the text."""
    init: Literal["mean", "description", "vectors"] = "mean"
    """How their rows are initialised: `mean`, the mean of the rows in use; `description`, the mean of the rows of the
    tokens of their description; `vectors`."""
    vectors: str | None = None
    """safetensors with `embed` [tokens, width], in the order of the tokens, and, if the head is not tied, `head`
    (without it the head's rows take the mean); `prepare:NAME`."""


class LoraConfig(Section):
    """Low-rank adapters: the model's own weights stay as they are, unless `model.train` says otherwise."""

    rank: Positive = 16
    """Inner width of each adapter."""
    alpha: PositiveFloat = 32.0
    """The output of an adapter is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply it by alpha / √rank instead, so that its size does not depend on the rank."""
    targets: Patterns = ["layers.*_proj"]
    """Patterns of unified names of the projections that get an adapter (`layers.*.attn.q_proj`,
    `layers.*.moe.experts.*`); by default all but routers."""


class ModelConfig(Section):
    """The model that is trained."""

    path: str
    """Hugging Face id, directory or URI of a checkpoint; `prepare:NAME`; `job:CONFIG`."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id."""
    tokenizer: str | None = None
    """Directory or Hugging Face id of the tokenizer, if it is not the model's own."""
    chat_template: str | None = None
    """File of a chat template (Jinja) that replaces the tokenizer's own; it is published with the model."""
    template_args: dict[str, Any] = {}
    """Arguments of the chat template (`enable_thinking: false`). They are its defaults in training, in generation and
    in what is published; a row's own (`template_args` or `chat_template_kwargs`) override them."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` reads only config.json and draws the weights from `seed`."""
    backend: Literal["ptf", "hf"] = "ptf"
    """`ptf`: our own decoder. `hf`: any causal language model of transformers,
    slower and with fewer features (ptf.model.hf_backend)."""
    tokens: TokensConfig | None = None
    """Tokens to add."""
    replace: dict[str, Plug] = {}
    """Components of your own, by a pattern of unified names (`layers.*.mlp`, `layers.0.attn`). Each is constructed in
    place of the class there, with that class's arguments."""
    head: Plug | None = None
    """An output head of your own, with its loss (ptf.model.custom_head);
    its tensors are exported to `head.safetensors`."""
    lora: LoraConfig | None = None
    """Train adapters (LoRA). The run writes them to `adapter` (PEFT), and the merged model to `model`."""
    train: Patterns | None = None
    """Patterns of unified names of what trains (`embed`, `layers.*.attn`). Default: everything. With `lora` the
    adapters always train, and these patterns add to them."""


class Source(Section):
    """One dataset: jsonl (plain, `.gz`, `.zst`), json, csv, parquet, arrow or feather files,
    or what `datasets` saved to disk."""

    path: str
    """File, directory, glob or URI; `prepare:NAME`; or a dataset of the Hugging Face Hub: `owner/name`,
    `owner/name:config:split`, or `hf://datasets/owner/name` if a local directory has the same name."""
    config: str | None = None
    """Config of a dataset that has several: a name in the header of its README, or else a folder."""
    split: str | None = None
    """Split of a dataset that has several (`train`, `test`, …); `a+b` takes two."""
    revision: str | None = None
    """Branch, tag or commit of a dataset of the Hub. A run keeps the commit that it began with."""
    kind: Literal["auto", "chat", "completion", "scored", "text", "events", "preference", "prompt", "tokenized"] = (
        "auto"
    )
    """What the rows are. `auto`: what the columns of the first row imply; in online recipes, prompts. `chat`:
    `messages`, and `tools`. `completion`: `prompt` and `completion`. `scored`: those and a number `reward` (or a
    `label`), or `messages` in which some of the assistant's have a `reward`. `text`. `events`: a list of strings and of
    baskets (lists of strings), of which the first `context` are given. `preference`: `chosen` and `rejected`. `prompt`:
    `messages` that end before the answer, or `prompt`; other columns go to the reward. `tokenized`: written by the
    tokenize stage. A row's `weight` multiplies the weight of its tokens, of its pair or of its score."""
    columns: dict[str, str | None] = {}
    """ptf's name of a column → its name in the files (`{messages: dialogue}`), or null if the column is not to be used
    (`{label: null}`)."""
    weight: PositiveFloat | None = None
    """Share in the mixture, relative to the other sources; a source without a weight counts 1. If no source has a
    weight, every row comes once an epoch: sources are interleaved in proportion to their numbers of rows, and each ends
    after its epochs."""
    rows: Positive | None = None
    """Approximate number of rows. It is needed only where an error asks for it, for files that must be read to be
    counted (compressed files, lines in an object store)."""
    limit: Positive | None = None
    """Number of rows that are used: the first ones in the order of the files."""
    epochs: Positive | None = None
    """Passes over it after which it is exhausted; default: `train.epochs`, without which it never is."""


class MixConfig(Section):
    """How several sources make one stream."""

    by: Literal["samples", "tokens"] = "samples"
    """The unit in which the weights of sources are shares."""
    temperature: PositiveFloat = 1.0
    """Shares are proportional to weight^(1 / temperature), without weights to rows^(1 / temperature); a temperature
    above 1 makes them more equal."""
    exhausted: Literal["repeat", "drop", "stop"] = "repeat"
    """With weights: what happens when a source has had its epochs. `repeat`: it starts again, until all sources have
    had theirs. `drop`: the others continue without it. `stop`: the run ends. Without weights it is `drop`."""


class DataConfig(Section):
    """What is read, and how it becomes rows of tokens."""

    sources: dict[str, Source] = Field(min_length=1)
    """Training data by name."""
    validation: dict[str, Source] = {}
    """Held-out data: its loss is reported every `train.validate_every` steps."""
    prepare: Plug | None = None
    """Function that makes data, a tokenizer or a model config before all other stages: called as `f(directory,
    **args)`."""
    partitions: Positive = 8
    """Equal slices of the data, each shuffled and packed by itself; the number of workers must divide their number.
    Batches depend on it, not on the number of workers."""
    seq_len: Positive = 2048
    """Tokens in one packed sequence; no sample may be longer."""
    shuffle: Count = 1024
    """Samples in each partition's shuffle window. What enters it is read from blocks (row groups of parquet, 1 MiB of
    lines) that are permuted each epoch; compressed files are permuted whole. 0 keeps the order of the files."""
    baskets: Literal["shuffle", "keep"] = "shuffle"
    """The order of the events inside a basket (`kind: events`), which has no meaning: `shuffle` draws it anew each time
    the basket is read."""
    lookahead: Positive = 64
    """Samples that the packer may choose from to fill a sequence."""
    mix: MixConfig = MixConfig()
    """How several sources make one stream."""
    too_long: Literal["error", "drop", "truncate", "split"] = "error"
    """What to do with a sample longer than `seq_len`; what was dropped or cut is counted.
    `split` makes documents of its pieces."""
    train_on: Annotated[str, Field(pattern=r"^(assistant|last|all|field:.+)$")] = "assistant"
    """Which tokens of a chat are trained. `assistant`: all turns of the assistant; `last`: the last of them; `all`:
    every token; `field:NAME`: each turn of the assistant with the weight in its key NAME (true, false or a number)."""
    share_prefixes: bool = False
    """Compute the common beginning of a conversation's samples once, as rollouts do for the answers to one prompt
    (recipe sft). It helps with templates that make every turn a sample of its own, which `ptf inspect` reports as
    *expansion*; losses are the same but for rounding."""
    render: Literal["template", "served"] = "template"
    """`template`: an answer is trained as the chat template writes it, and refused if the template does not write it
    after the served prompt. `served`: such an answer and its thinking are appended to that prompt, as a server's model
    would generate them."""
    unseen_context: Literal["error", "allow"] = "error"
    """Whether a chat template may leave out context: tools, their results, developer and system messages,
    earlier answers."""
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")] | None = None
    """The date (YYYY-MM-DD) given to chat templates that render today's date. Default: the day on which the run
    began."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with a row that cannot be encoded. `skip` writes it to `quarantine` with the reason, and counts it."""
    max_bad: Fraction = 0.01
    """Largest share of a source's rows that may be skipped before the run stops; with fewer than 1,000 rows read, the
    share of 1,000."""
    pretokenize: bool = True
    """In a flow: tokenize once to parquet, before training. Otherwise rows are tokenized while training."""
    prefetch: Positive = free(4)
    """Global steps packed ahead in the background."""


class RewardModelConfig(Section):
    """A model that scores answers, as recipe rm trains them; it uses its own tokenizer and chat template."""

    path: str
    """As `model.path`; the head of the model must be one score (`…ForSequenceClassification` with one label)."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id."""
    weight: float = 1.0
    """Factor on its score."""


class AllowedConfig(Section):
    """The permitted answers: the policy can generate nothing else."""

    path: str
    """A text file with one answer per line."""
    repeat: Positive = 1
    """How many of them make up one answer, directly one after the other."""
    distinct: bool = False
    """An answer contains none of them twice: those that were generated may not follow again."""


class RolloutConfig(Section):
    """How the policy generates (online recipes)."""

    reward: Plug | None = None
    """`f(row, text, **args) -> float`; an exception counts as no result, never as 0."""
    reward_model: RewardModelConfig | None = None
    """A reward model that replaces `reward`, or whose score is added to it; it is a role of its own."""
    environment: Plug | None = None
    """For conversations with several turns, in place of `reward`: `make(row, seed, **args) -> Environment`
    (ptf.rl.environments.protocol), which returns the rewards."""
    max_turns: Positive = 8
    """Most turns of the policy in one episode (`environment`). `max_new_tokens` limits each turn, `data.seq_len` the
    whole episode with the messages of the environment."""
    processes: Positive = free(1)
    """Processes that compute rewards; for environments, the number of processes beside each engine replica."""
    reward_timeout_s: PositiveFloat = free(10.0)
    """Deadline of one reward, or of one reply of an environment; a process that misses it is killed."""
    retries: Count = free(1)
    """How often a reward or an environment that failed is called again before its answer counts as having no result."""
    engine: Literal["vllm", "native"] | Plug = "vllm"
    """`vllm`; `native`, which is ptf's own decoder and needs no further package; or `use: pkg.mod:Engine`
    (ptf.rl.engines.protocol), which `ptf check-engine` tests."""
    prompts: Positive = 64
    """Prompts in each step."""
    group_size: Positive = 8
    """Answers sampled for each prompt. GRPO compares them, so it needs at least two."""
    max_new_tokens: Positive = 256
    """Most tokens of an answer, with its end-of-turn token."""
    zero_variance_groups: Literal["keep", "replace"] = "keep"
    """What to do with groups whose answers all have the same reward, from which nothing is learned. `replace`: draw
    other prompts in their place, in at most `max_rounds` rounds."""
    max_rounds: Positive = 8
    """Most rounds in which prompts are drawn for one step (`zero_variance_groups: replace`); the step then trains on
    the groups that it has."""
    temperature: Temperature = 1.0
    """Sampling temperature; the trainer computes log-probs at the same one."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: draw from the likeliest tokens that together have this probability. The trainer computes
    log-probs over the same tokens. Below 1, a step makes one update from its rollouts and has no KL term, because
    another policy would have another nucleus."""
    allowed: AllowedConfig | None = None
    """Restrict answers to these, in training and in evaluation; log-probs are computed among the tokens that may
    follow."""
    workers: Positive = free(1)
    """Engine replicas."""
    tensor: Positive = free(1)
    """Devices that hold one vLLM engine together, each a part of every layer; the engines then take `workers` ×
    `tensor` devices of their pool."""
    lora: Literal["merged", "adapter"] = "merged"
    """What is sent of a policy with `model.lora`: the merged model, or the adapter alone, which the engine applies to
    the base model."""
    transport: Literal["object_store", "path", "ipc", "nccl"] = free("object_store")
    """How new weights reach the engines. `object_store`: as a whole model, through host memory. The other three send
    them in buckets, so that neither the policy nor vLLM holds a second copy of the model (the native engine does).
    `path`: through files in the run's directory, which engines on other machines must be able to read. `ipc`: through
    memory of the GPU that policy and engine share. `nccl`: from GPU to GPU."""
    max_logprob_diff: PositiveFloat | None = None
    """Largest permitted difference between the engine's and the trainer's log-prob of a sampled token; above it the run
    stops. Default: 1e-3 in fp32, 0.2 in bf16."""
    max_no_result: Fraction = 0.1
    """Largest permitted share of answers without a reward in a step; above it the run stops."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = free(0.7)
    """Share of a GPU's memory that one vLLM engine uses for weights and cache. With `transport: ipc` its weights must
    fit beside the policy's, which is not offloaded then."""
    kv_cache_gib: PositiveFloat = free(0.25)
    """Key-value cache of one vLLM engine on a CPU, in GiB; on a GPU vLLM determines its own."""


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
    min_lr: Fraction = 0.0
    """Learning rate at the end of the decay, as a share of `lr`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of matrices; norms and biases have none."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's averages of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    clip: PositiveFloat = 1.0
    """Largest global norm of the gradient."""
    on_nonfinite: Literal["stop", "skip"] = free("stop")
    """What to do if the loss or the gradient is not finite: end the run, or skip the step (at most 10 in a row). The
    rows of the step are written to `RUN/nonfinite/`."""
    early_stopping: StopConfig | None = None
    """Offline recipes: end the run when a held-out metric no longer improves."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """`bf16` computes in bfloat16 over fp32 master weights, optimizer and reductions."""
    activation_checkpointing: Literal["none", "block", "selective"] = free("none")
    """What the backward pass recomputes instead of keeping it in memory. `block`: everything inside a layer.
    `selective`: only cheap operations, that is all but matrix products and attention."""
    deterministic: bool = False
    """Compute the same bits for any `micro_sequences` and any number of workers, by adding the gradients of sequences
    in a fixed order. For small models in fp32 on a CPU."""
    compile: bool = free(False)
    """Compile norms and gates (torch.compile, for any shape). It takes half a minute at the start and saves memory
    traffic in every step."""
    validate_every: Count = free(0)
    """Steps between held-out losses, or (online) between greedy passes over `evaluate.sources`; 0: never."""


class MeshConfig(Section):
    """How the workers divide the model: replicate × shard × tensor = workers."""

    replicate: Positive = free(1)
    """Copies of the sharded model; each reduces its gradients with the others."""
    tensor: Positive = free(1)
    """Workers that hold every layer together (heads, MLP, experts and vocabulary are cut) and see the same rows;
    it must divide the heads."""


class PoolConfig(Section):
    """Devices that some roles of an online job share in turns, and no other role uses."""

    roles: Annotated[list[str], Field(min_length=1)]
    """Any of `policy`, `rollout`, `critic`, `reference`, `teacher` and `reward` (the reward model) that the recipe has.
    The pool has as many devices as its largest role needs."""
    offload: Literal["auto", "disk"] = free("auto")
    """Where the weights and the optimizer of a role are while another role uses the devices. `auto`: in host memory;
    without a GPU they stay in place. `disk`: in files under the run's directory, also on a CPU, for models that do not
    fit into memory together."""


class ComputeConfig(Section):
    """Where the run runs, and on how many devices."""

    launcher: Literal["ray", "torchrun", "local"] = free("ray")
    """`ray`: Ray actors; an offline recipe with one worker and no `address` runs in this process without Ray.
    `torchrun`: subprocesses on this machine. `local`: this process, one worker."""
    workers: Positive = free(1)
    """Training processes; one per GPU."""
    mesh: MeshConfig = MeshConfig()
    """How the workers divide the model."""
    pools: dict[str, PoolConfig] = free({})
    """Online recipes: which roles share devices (colocated), and which have their own. Default: one pool of all
    roles."""
    device: Literal["auto", "cpu", "cuda"] = free("auto")
    """`auto` uses the GPU if there is one, and prints which device it uses."""
    threads: Positive | None = free(None)
    """CPU threads of each worker; default: the machine's cores divided by the workers."""
    address: str | None = free(None)
    """A running Ray cluster: `host:port` to join it from here (`auto`: the one in RAY_ADDRESS), or `http://host:8265`
    to submit the run as a job of the cluster. Such a job continues if this process dies, and is found again by the
    run's lineage. By default a cluster is started for the run and stopped after it. A cluster that requires a token
    gets the one of RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH."""
    timeout_s: PositiveFloat = free(1800.0)
    """Deadline of every single wait: a collective, a phase of a step, the start of a worker. A Ray that does not start
    or answer is tried again until then."""
    restarts: Count = free(2)
    """Online recipes on Ray: number of restarts after failures before the run ends. A rollout engine that failed is
    replaced; its successor gets the newest weights and only the requests that were not answered. If another role fails,
    all of them restart from the newest checkpoint; the count begins again with each new checkpoint."""


class BestConfig(Section):
    """By which metric one checkpoint is better than another."""

    metric: str
    """A metric of the step that the checkpoint was written after (`loss/NAME` of `data.validation`)."""
    mode: Literal["min", "max"] = "min"
    """Whether lower (`min`) or higher (`max`) is better."""


class CheckpointConfig(Section):
    """Checkpoints from which training continues exactly."""

    to: str | None = None
    """Directory or URI (`s3://…`) in which each run has a directory of checkpoints; default: the run's own."""
    every: Positive = free(100)
    """Steps between checkpoints; one is always written after the last step. Training continues while they are
    written."""
    keep: Positive = free(2)
    """Number of newest checkpoints that are kept."""
    best: BestConfig | None = None
    """Offline recipes: also keep the best checkpoint, and export its weights at the end."""
    verify_gib: PositiveFloat = free(64.0)
    """Checkpoints, tokenized and prepared data, published models and copies of remote ones are compared with their
    SHA-256 when they are read again; a file that has not changed since it was last hashed is not hashed again. If a
    directory has more GiB to hash than this, only sizes are compared, and the run says so."""
    accept_changes: bool = free(False)
    """Continue although ptf or its packages have changed since the checkpoint. The run may then differ in its bits from
    one that was never interrupted."""


class TrackConfig(Section):
    """Where metrics are written, in addition to metrics.jsonl, which always is."""

    tensorboard: bool = free(True)
    """Write TensorBoard event files beside metrics.jsonl."""
    wandb: str | None = free(None)
    """A project of Weights & Biases; the package must be installed and logged in. Runs are named by their lineage."""
    samples_every: Count = free(20)
    """Online recipes: every so many steps, write answers token by token to `RUN/samples.jsonl`, with log-probs and
    advantages; 0: never."""
    samples: Positive = free(2)
    """Number of prompts in such a step; all answers to each of them are written."""
    print_every: Positive = free(10)
    """Steps between lines on the console."""


class RankingConfig(Section):
    """Rank a catalogue (ptf.events.prepare) after each held-out history, and compare the list with what followed:
    `SOURCE/all/ndcg@10`, `SOURCE/new/…`, …. The metrics of each user are written to `RUN/ranked`."""

    sources: dict[str, Source] = Field(min_length=1)
    """Histories by name: prompts with `history` and `future`."""
    catalogue: str = "prepare:catalogue.json"
    """The catalogue of items; `vectors.npy` is read from the same directory."""
    k: Positive = 10
    """Length of the list."""
    beam: Positive = 100
    """Number of beginnings that are kept on each level, for ids of several tokens."""


class EvaluateConfig(Section):
    """The evaluate stage: generate on held-out prompts and score with the reward."""

    sources: dict[str, Source] = free({})
    """Held-out prompts by name; without any, only the held-out loss is measured."""
    reward: Plug | None = free(None)
    """Score of an answer, where 1 is a pass; default: `rollout.reward`."""
    metrics: dict[str, Plug] = free({})
    """More metrics by name: a function of all greedy answers to a source, each with `prompt` (its row), `answer` and
    `outcome`, that returns a number."""
    ranking: RankingConfig | None = free(None)
    """Rank a catalogue and compare it with what users did next."""
    engine: Literal["vllm", "native"] | Plug = free("native")
    """What generates the answers, with the values of `rollout.engine`."""
    start: bool = free(True)
    """Also measure the model that training started from; its metrics begin with `start/`."""
    limit: Positive = free(512)
    """Most prompts of each source; the first ones are used."""
    samples: Positive = free(8)
    """k of pass@k, whose answers are sampled at `temperature`; the answer of pass@1 is greedy."""
    temperature: Temperature = free(1.0)
    """Sampling temperature of pass@k."""
    max_new_tokens: Positive = free(256)
    """Most tokens of an answer."""


class PublishConfig(Section):
    """The publish stage."""

    to: str | None = free(None)
    """Directory or URI of the versions and of the pointer to the current one; default `{output}/published`."""
    what: Literal["merged", "adapter", "both"] = free("merged")
    """What a version holds: the `merged` model; the `adapter` of `model.lora` alone, in PEFT format with the tokenizer;
    or `both`, the merged model with the adapter in `adapter/` beside it."""
    gate: Literal["start", "off"] = free("start")
    """`start`: refuse to publish a model that is worse than the one that training started from. It is worse if the
    whole 95 % interval of the difference on the same held-out rows lies below 0 (below -`max_drop`). Compared is
    `metric` or, without it, the first that the job has of greedy answers, rankings and held-out losses. `off`: publish
    without this comparison."""
    metric: str | None = free(None)
    """A metric of the evaluate stage that may not be worse than the published version's by more than `max_drop`."""
    mode: Literal["min", "max"] = free("max")
    """Whether lower (`min`) or higher (`max`) is better."""
    max_drop: Annotated[float, Field(ge=0)] = free(0.0)
    """By how much `metric` may be worse and still be published."""
    hub: str | None = free(None)
    """Repository of the Hugging Face Hub (`team/name`) that each version is also pushed to. It is created, as a private
    one, if it does not exist. The token is the Hub's own (`HF_TOKEN`)."""
    license: str | None = free(None)
    """For the model card: the model's licence, by its SPDX name (`apache-2.0`)."""


class StepConfig(Section):
    """Resources and limits of one step of a flow."""

    cpu: Positive | None = None
    """CPUs."""
    gpu: Count | None = None
    """GPUs."""
    memory: Positive | None = None
    """MiB of memory."""
    retries: Count = 0
    """Automatic retries after a failure; the train step continues from its last checkpoint."""
    minutes: Positive | None = None
    """Time limit."""
    environment: dict[str, str] = {}
    """Environment variables. A secret is written as `env:NAME`: its value is read from that variable where the step
    runs, and is not stored."""


class FlowConfig(Section):
    """Settings of the orchestrator, which training does not read."""

    steps: dict[Literal["prepare", "tokenize", "train", "evaluate", "publish"], StepConfig] = free({})
    """Resources, retries and limits by step."""
    cron: str | None = free(None)
    """Schedule of a deployed flow: minute, hour, day of the month, month, day of the week (`0 3 * * 1`: Mondays at
    three)."""
    event: str | None = free(None)
    """Name of the event that starts a deployed flow."""
    sweep: list[dict[str, Any]] = free([])
    """Trials of the sweep flow: for each, the keys that differ from this job (`{train.lr: 1e-4, train.sequences:
    8}`)."""


class Job(Section):
    """One run, from data to a published model. `job_class` picks the subclass that types `algo` by `recipe`."""

    recipe: str | Plug
    """Name of a recipe of ptf, or `use: pkg.mod:MyRecipe`."""
    output: str = free("runs")
    """Directory under which each run gets one of its own, named by its lineage."""
    seed: Count = 0
    """Seed of everything random."""
    model: ModelConfig
    data: DataConfig
    algo: Knobs | dict[str, Any] = {}
    """Settings of the recipe, which its `knobs.py` declares; with `recipe: {use: …}`, its keyword arguments."""
    rollout: RolloutConfig | None = None
    train: TrainConfig
    compute: ComputeConfig = ComputeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    publish: PublishConfig = PublishConfig()
    flow: FlowConfig = FlowConfig()

    @property
    def versions(self) -> str:
        """Directory or URI below which its models are published."""
        return (self.publish.to or f"{self.output}/published").rstrip("/")

    @property
    def verify_bytes(self) -> float:
        """How much is hashed of one directory before it is used."""
        return self.checkpoint.verify_gib * 2**30

    @model_validator(mode="after")
    def _agrees(self) -> "Job":
        from ptf.config.rules import broken  # which reads these classes

        if faults := broken(self):
            raise ValueError("\n".join(faults))
        return self


class PlugJob(Job):
    """A job whose recipe is a plugin."""

    recipe: Plug  # type: ignore[assignment]
    algo: dict[str, Any] = {}  # type: ignore[assignment]


@cache
def job_of(recipe: str) -> type[Job]:
    """Return the `Job` whose `algo` and `rollout` are typed as the algorithm's `knobs.py` says."""
    from ptf.recipes.registry import RECIPES, knobs_of  # whose knobs are made of the classes of ptf.config.section

    knobs = knobs_of(recipe)
    required = any(field.is_required() for field in knobs.model_fields.values())
    fields: dict[str, Any] = {
        "recipe": (Literal[recipe], ...),
        "algo": (knobs, ... if required else knobs()),
        "rollout": (RolloutConfig, ...) if knobs.on_policy else (None, None),
    }
    return create_model(f"{RECIPES[recipe].name}Job", __base__=Job, __module__=__name__, **fields)


def jobs() -> dict[str, type[Job]]:
    """Name of each algorithm of ptf → its Job."""
    from ptf.recipes.registry import RECIPES

    return {recipe: job_of(recipe) for recipe in RECIPES}


def job_class(recipe: object) -> type[Job] | None:
    """Return the Job subclass for a raw `recipe` value, or None if there is no such recipe."""
    return PlugJob if isinstance(recipe, dict | Plug) else jobs().get(recipe) if isinstance(recipe, str) else None
