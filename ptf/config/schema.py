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
    """Register them as special tokens, which decoders may leave out of a text."""
    init: Literal["mean", "description", "vectors"] = "mean"
    """How their rows begin: the mean of the rows in use, the mean of the rows of their description's tokens,
    or `vectors`."""
    vectors: str | None = None
    """safetensors with `embed` [tokens, width], in the order of the tokens, and `head` where the head is not tied (else
    it takes the mean); `prepare:NAME`."""


class LoraConfig(Section):
    """Low-rank adapters: the model's own weights stay as they are, unless `model.train` says otherwise."""

    rank: Positive = 16
    """Inner width of each adapter."""
    alpha: PositiveFloat = 32.0
    """An adapter's output counts alpha / rank."""
    rslora: bool = False
    """It counts alpha / √rank, so that its size does not depend on the rank."""
    targets: Patterns = ["layers.*_proj"]
    """Patterns of unified names of the projections that get one (`layers.*.attn.q_proj`, `layers.*.moe.experts.*`);
    by default all but routers."""


class ModelConfig(Section):
    """The model that is trained."""

    path: str
    """Hugging Face id, directory or URI of a checkpoint; `prepare:NAME`; `job:CONFIG`."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id."""
    tokenizer: str | None = None
    """Tokenizer directory, where it is not beside the model."""
    chat_template: str | None = None
    """File of a chat template (Jinja) in the place of the tokenizer's own; it is published with the model."""
    template_args: dict[str, Any] = {}
    """Arguments of the chat template (`enable_thinking: false`): defaults wherever it renders, also in what is
    published. A row's own (`template_args` or `chat_template_kwargs`) come before them."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` reads only config.json and draws the weights from `seed`."""
    backend: Literal["ptf", "hf"] = "ptf"
    """`ptf`: our own decoder. `hf`: any causal language model of transformers,
    slower and with fewer features (ptf.model.hf_backend)."""
    tokens: TokensConfig | None = None
    """Tokens to add."""
    replace: dict[str, Plug] = {}
    """Components of your own, by a pattern of unified names (`layers.*.mlp`, `layers.0.attn`): made instead of the
    class there, with its arguments."""
    head: Plug | None = None
    """An output head of your own, with its loss (ptf.model.custom_head);
    its tensors are exported to `head.safetensors`."""
    lora: LoraConfig | None = None
    """Train adapters (LoRA); the run leaves them in `adapter` (PEFT) and merged in `model`."""
    train: Patterns | None = None
    """Patterns of unified names of what trains (`embed`, `layers.*.attn`); default: everything, or with `lora` the
    adapters, which these come on top of."""


class Source(Section):
    """One dataset: jsonl (plain, `.gz`, `.zst`), json, csv, parquet, arrow or feather files,
    or what `datasets` saved to disk."""

    path: str
    """File, directory, glob or URI; `prepare:NAME`; or a dataset of the Hugging Face Hub: `owner/name`,
    `owner/name:config:split`, or `hf://datasets/owner/name` where a directory of that name is here too."""
    config: str | None = None
    """Config of a dataset that has several: a name in the header of its README, else a folder."""
    split: str | None = None
    """Split of a dataset that has several (`train`, `test`, …); `a+b` takes two."""
    revision: str | None = None
    """Branch, tag or commit of a dataset of the Hub. A run keeps the commit that it began with."""
    kind: Literal["auto", "chat", "completion", "scored", "text", "events", "preference", "prompt", "tokenized"] = (
        "auto"
    )
    """What the rows are. `auto`: what the columns of the first one say; in online recipes, prompts. `chat`: `messages`,
    and `tools`. `completion`: `prompt` and `completion`. `scored`: those and a number `reward` (or a `label`), or
    `messages` of which some of the assistant's have a `reward`. `text`. `events`: a list of strings and of baskets
    (lists of strings), the first `context` given. `preference`: `chosen` and `rejected`. `prompt`: `messages` that end
    before the answer, or `prompt`; other columns go to the reward. `tokenized`: written by the tokenize stage. A row's
    `weight` counts its tokens, its pair or its score more or less."""
    columns: dict[str, str | None] = {}
    """ptf's name of a column → its name in the files (`{messages: dialogue}`), or null:
    the column of that name is not used (`{label: null}`)."""
    weight: PositiveFloat | None = None
    """Share in the mixture, relative to the other sources (1 for those that have none). Where no source has a weight,
    every row comes once an epoch: sources are interleaved by their numbers of rows, and each ends when it is done."""
    rows: Positive | None = None
    """How many rows its files have, about, where they do not tell without being read (compressed files,
    lines in an object store) and it matters."""
    limit: Positive | None = None
    """Rows of it that count, the first ones in the order of the files."""
    epochs: Positive | None = None
    """Passes over it after which it is exhausted; default: `train.epochs`, without which it goes on forever."""


class MixConfig(Section):
    """How several sources make one stream."""

    by: Literal["samples", "tokens"] = "samples"
    """What the sources' weights are shares of."""
    temperature: PositiveFloat = 1.0
    """Shares are proportional to weight^(1 / temperature), without weights to rows^(1 / temperature):
    above 1 they come nearer to each other."""
    exhausted: Literal["repeat", "drop", "stop"] = "repeat"
    """With weights: what happens when a source has had its epochs. `repeat`: it begins anew, until all have had theirs.
    `drop`: the others go on without it. `stop`: the run ends with the first. Without weights it is `drop`."""


class DataConfig(Section):
    """What is read, and how it becomes rows of tokens."""

    sources: dict[str, Source] = Field(min_length=1)
    """Training data by name."""
    validation: dict[str, Source] = {}
    """Held-out data: its loss is reported every `train.validate_every` steps."""
    prepare: Plug | None = None
    """Makes data (or a tokenizer, or a model config) before anything else: called as `f(directory, **args)`."""
    partitions: Positive = 8
    """Logical slices of the data; the number of workers must divide it. Batches depend on it,
    not on the number of workers."""
    seq_len: Positive = 2048
    """Tokens in one packed sequence; no sample may be longer."""
    shuffle: Count = 1024
    """Samples in each partition's shuffle window. What enters it is read from blocks (row groups of parquet, 1 MiB of
    lines) that are permuted each epoch; compressed files are permuted whole. 0 keeps the order of the files."""
    baskets: Literal["shuffle", "keep"] = "shuffle"
    """The order of the events inside a basket (`kind: events`), which means nothing:
    drawn anew each time they are read, or kept."""
    lookahead: Positive = 64
    """Samples that the packer may choose from to fill a sequence."""
    mix: MixConfig = MixConfig()
    """How several sources make one stream."""
    too_long: Literal["error", "drop", "truncate", "split"] = "error"
    """What to do with a sample longer than `seq_len`; what was dropped or cut is counted.
    `split` makes documents of its pieces."""
    train_on: Annotated[str, Field(pattern=r"^(assistant|last|all|field:.+)$")] = "assistant"
    """What of a chat is trained: `assistant`, all of its turns; `last` of them; `all` tokens; `field:NAME`, each of the
    assistant's turns as much as its key NAME says (true, false, or a number)."""
    share_prefixes: bool = False
    """Read once what the samples of a conversation begin with alike, as rollouts do for the answers to a prompt (recipe
    sft). For templates that make every turn a sample of its own (`ptf inspect` says so: *expansion*);
    losses are the same but for rounding."""
    render: Literal["template", "served"] = "template"
    """`template`: an answer is trained as the chat template writes it, and refused where it does not write it behind
    the served prompt. `served`: there the answer and its thinking are put behind that prompt,
    as a server's model would say them."""
    unseen_context: Literal["error", "allow"] = "error"
    """Whether a chat template may leave out context: tools, their results, developer and system messages,
    earlier answers."""
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")] | None = None
    """The day (YYYY-MM-DD) that chat templates which render today's date are given. Default:
    the day on which the run began."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with a row that cannot be encoded. `skip` sets it aside in `quarantine`, with its reason,
    and counts it."""
    max_bad: Fraction = 0.01
    """Largest share of a source's rows that may be skipped (of fewer than 1,000 rows: of 1,000)
    before the run stops."""
    pretokenize: bool = True
    """In a flow: tokenize once to parquet, or on the fly while training."""
    prefetch: Positive = free(4)
    """Global steps packed ahead in the background."""


class RewardModelConfig(Section):
    """A model that scores answers, as recipe rm makes them; it has a tokenizer and template of its own."""

    path: str
    """What `model.path` may be; a directory or id whose head is one score (`…ForSequenceClassification` with one
    label)."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id."""
    weight: float = 1.0
    """What its score is multiplied with."""


class AllowedConfig(Section):
    """The answers that there may be: nothing else can be said."""

    path: str
    """A text file with an answer a line."""
    repeat: Positive = 1
    """How many of them an answer is made of, one right after the other."""
    distinct: bool = False
    """None of them twice in an answer; what was said is taken out of what may follow."""


class RolloutConfig(Section):
    """How the policy generates (online recipes)."""

    reward: Plug | None = None
    """`f(row, text, **args) -> float`; an exception counts as no result, never as 0."""
    reward_model: RewardModelConfig | None = None
    """Instead of `reward`, or added to it: a role of its own."""
    environment: Plug | None = None
    """Instead of `reward`, for conversations with turns: `make(row, seed, **args) -> Environment`
    (ptf.rl.environments.protocol), which gives the rewards."""
    max_turns: Positive = 8
    """Turns of the policy in one episode (`environment`); `max_new_tokens` is of each,
    `data.seq_len` of all with what they are shown."""
    processes: Positive = free(1)
    """Processes in which rewards are found; of environments, of each engine replica."""
    reward_timeout_s: PositiveFloat = free(10.0)
    """Deadline of one reward, or of one answer of an environment. What misses it is killed."""
    retries: Count = free(1)
    """How often a reward or an environment that failed is asked again before its answer has no result."""
    engine: Literal["vllm", "native"] | Plug = "vllm"
    """`vllm`, our own decoder (`native`, no further package), or `use: pkg.mod:Engine` (ptf.rl.engines.protocol; `ptf
    check-engine` says whether it will do)."""
    prompts: Positive = 64
    """Prompts in each step."""
    group_size: Positive = 8
    """Answers sampled for each prompt; GRPO compares them, so it needs two at least."""
    max_new_tokens: Positive = 256
    """Longest answer, end-of-turn included."""
    zero_variance_groups: Literal["keep", "replace"] = "keep"
    """Groups whose answers all have the same reward teach nothing. `replace`: draw other prompts in their place, at
    most `max_rounds` times in all."""
    max_rounds: Positive = 8
    """How often prompts are drawn for one step (`zero_variance_groups: replace`); what has been found by then is
    trained on."""
    temperature: Temperature = 1.0
    """Sampling temperature; the trainer's log-probs are taken at the same."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that together have this probability; the trainer's log-probs are those of the same
    nucleus. Below 1 there is one update from a step's rollouts, and no KL: how another policy would have cut its own
    nucleus says nothing of this one's."""
    allowed: AllowedConfig | None = None
    """Only these answers, in training and in evaluation; log-probs are those among the tokens that might follow."""
    workers: Positive = free(1)
    """Engine replicas."""
    tensor: Positive = free(1)
    """Devices that hold one vLLM engine together, each a part of every layer;
    rollout then takes `workers` × `tensor` of its pool."""
    lora: Literal["merged", "adapter"] = "merged"
    """How a policy with `model.lora` is sent: as a whole model, or its adapter alone,
    which the engine keeps beside the base model."""
    transport: Literal["object_store", "path", "ipc", "nccl"] = free("object_store")
    """How new weights reach the engines: through host memory; or bucket by bucket, so that neither policy nor vLLM
    holds another whole model for it (the native engine does), through files in the run's directory, which engines on
    other machines must see (`path`), through memory of the device that policy and engine share (`ipc`),
    or from device to device (`nccl`)."""
    max_logprob_diff: PositiveFloat | None = None
    """Largest difference between the engine's and the trainer's log-prob of a sampled token before the run stops;
    default 1e-3 in fp32, 0.2 in bf16."""
    max_no_result: Fraction = 0.1
    """Largest share of answers in a step that may have no reward before the run stops."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = free(0.7)
    """How much of a GPU's memory one vLLM engine takes, weights and cache; with `transport:
    ipc` its weights must fit beside the awake policy."""
    kv_cache_gib: PositiveFloat = free(0.25)
    """Key-value cache of one vLLM engine on a CPU; on a GPU vLLM sizes its own."""


class StopConfig(Section):
    """When a run ends early."""

    metric: str
    """`loss/NAME` of one of `data.validation`."""
    mode: Literal["min", "max"] = "min"
    """Which is better, less or more."""
    patience: Positive = 3
    """How many times in a row it is seen (every `train.validate_every` steps) without having got better."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """By how much it must change to count as better."""


class TrainConfig(Section):
    """The optimizer and the loop."""

    steps: Positive | None = None
    """Global steps (of rollout and update, in online recipes)."""
    epochs: Positive | None = None
    """Instead of `steps`: passes over the data (offline recipes). The steps that they take are counted at the start,
    in a pass over the data."""
    lr: PositiveFloat
    """Peak learning rate of AdamW."""
    lr_groups: dict[str, PositiveFloat] = {}
    """Factors on `lr` by pattern of unified names (`{embed: 10, "*.lora_b": 16}`); the first that fits counts,
    1 for the rest."""
    sequences: Positive = 8
    """Packed sequences in a global step (offline recipes), over all workers."""
    micro_sequences: Positive = free(8)
    """Packed sequences in one forward and backward pass of a worker."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the decay after warm-up."""
    warmup: Steps = 0
    """Steps of linear warm-up, or, below 1, the share of the run that it is (`0.03`)."""
    decay: Steps | None = None
    """Steps of decay at the end, or their share of the run; by default all that follow the warm-up."""
    decay_at_loss: PositiveFloat | None = None
    """Held-out loss (of the first of `data.validation`) at which the decay begins early; the run then ends `decay`
    steps later, at `steps` at the latest."""
    min_lr: Fraction = 0.0
    """Where the decay ends, as a share of `lr`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of matrices; never of norms and biases."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's averages of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    clip: PositiveFloat = 1.0
    """Largest global norm of the gradient."""
    on_nonfinite: Literal["stop", "skip"] = free("stop")
    """When the loss or the gradient is not finite: end the run, or leave the step out (at most 10 in a row).
    Its rows are kept in `RUN/nonfinite/`."""
    early_stopping: StopConfig | None = None
    """Offline recipes: end early when a held-out metric no longer gets better."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """`bf16` computes in bfloat16 over fp32 master weights, optimizer and reductions."""
    activation_checkpointing: Literal["none", "block", "selective"] = free("none")
    """What the backward finds again instead of keeping it. `block`: everything inside a layer. `selective`: what is
    cheap, that is all but matrix products and attention."""
    deterministic: bool = False
    """CPU, fp32, small models: the same bits for any `micro_sequences` and any number of
    workers, by adding sequences in a fixed order."""
    compile: bool = free(False)
    """Compile norms and gates (torch.compile, any shape): half a minute at the start,
    fewer passes over memory after it."""
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
    """Devices of their own for some roles of an online job, which share them by turns."""

    roles: Annotated[list[str], Field(min_length=1)]
    """`policy`, `rollout`, `critic`, `reference`, `teacher`, `reward` (its model): those that the recipe has.
    As wide as the widest of them."""
    offload: Literal["auto", "disk"] = free("auto")
    """Where a role's weights and optimizer are while another has the devices. `auto`: in host memory; without a GPU
    they stay where they are. `disk`: in files under the run's directory, on a CPU too,
    for models that do not fit beside each other."""


class ComputeConfig(Section):
    """Where it runs."""

    launcher: Literal["ray", "torchrun", "local"] = free("ray")
    """`ray`: Ray actors; one worker of an offline recipe needs none without an `address`, and is this process.
    `torchrun`: subprocesses on this machine. `local`: this process, one worker."""
    workers: Positive = free(1)
    """Training processes; one per GPU."""
    mesh: MeshConfig = MeshConfig()
    """How the workers divide the model."""
    pools: dict[str, PoolConfig] = free({})
    """Online recipes: which roles share devices (colocated), and which have their own. Default:
    one pool of all roles."""
    device: Literal["auto", "cpu", "cuda"] = free("auto")
    """`auto` takes the GPU if there is one, and says which it took."""
    threads: Positive | None = free(None)
    """CPU threads of each worker; default: the machine's cores divided by the workers."""
    address: str | None = free(None)
    """A running Ray cluster: `host:port` to join it from here (`auto`: the one in RAY_ADDRESS), or `http://host:8265`
    to submit the run as a job of its own, which goes on when this process dies and is found again by the run's lineage.
    By default one is started for the run and stopped after it. A cluster that wants a token is given that of
    RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH."""
    timeout_s: PositiveFloat = free(1800.0)
    """Deadline of any one wait: a collective, a phase of a step, a worker's start;
    a Ray that does not start or answer is tried again until then."""
    restarts: Count = free(2)
    """Online recipes on Ray: how often what failed is started again before the run ends. A rollout engine is replaced,
    with the newest weights, and asked for what it has not given; the others start together from the newest checkpoint,
    so often without a newer one."""


class BestConfig(Section):
    """By which metric one checkpoint is better than another."""

    metric: str
    """A metric of the step that the checkpoint was written after (`loss/NAME` of `data.validation`)."""
    mode: Literal["min", "max"] = "min"
    """Which is better, less or more."""


class CheckpointConfig(Section):
    """Checkpoints from which training continues exactly."""

    to: str | None = None
    """Directory or URI (`s3://…`) in which each run has a directory of checkpoints; default: the run's own."""
    every: Positive = free(100)
    """Steps between checkpoints; the last step always has one. They are written while training goes on."""
    keep: Positive = free(2)
    """Newest checkpoints kept."""
    best: BestConfig | None = None
    """Offline recipes: keep the best checkpoint too, and export its weights at the end."""
    verify_gib: PositiveFloat = free(64.0)
    """Checkpoints, tokenized and prepared data, published models and copies of remote ones are compared with their
    SHA-256 when they are read again (once: a file that has not changed since is not hashed again). Of what has more to
    hash than this, sizes are compared, and the run says so."""
    accept_changes: bool = free(False)
    """Continue although ptf or its packages have changed since the checkpoint;
    the run may then differ in its bits from one that never stopped."""


class TrackConfig(Section):
    """Where metrics are written: always to metrics.jsonl, and to what is named here."""

    tensorboard: bool = free(True)
    """TensorBoard event files beside it."""
    wandb: str | None = free(None)
    """A project of Weights & Biases, where the package is installed and logged in; runs are named by their lineage."""
    samples_every: Count = free(20)
    """Online recipes: steps between answers kept token by token in `RUN/samples.jsonl`,
    with log-probs and advantages; 0: never."""
    samples: Positive = free(2)
    """Prompts of such a step whose answers are kept."""
    print_every: Positive = free(10)
    """Steps between lines on the console."""


class RankingConfig(Section):
    """Rank a catalogue (ptf.events.prepare) after each held-out history, and compare with what followed:
    `SOURCE/all/ndcg@10`, `SOURCE/new/…`, …. Each user's measures are left in `RUN/ranked`."""

    sources: dict[str, Source] = Field(min_length=1)
    """Histories by name: prompts with `history` and `future`."""
    catalogue: str = "prepare:catalogue.json"
    """The items, and beside it their `vectors.npy`."""
    k: Positive = 10
    """Items that count of each list."""
    beam: Positive = 100
    """Beginnings kept on each level of ids that have several tokens."""


class EvaluateConfig(Section):
    """The evaluate stage: generate on held-out prompts and score with the reward."""

    sources: dict[str, Source] = free({})
    """Held-out prompts by name; empty: only held-out loss."""
    reward: Plug | None = free(None)
    """Score of an answer, 1 is a pass; default: `rollout.reward`."""
    metrics: dict[str, Plug] = free({})
    """More metrics by name: a function of all greedy answers to a source, each with `prompt` (its row), `answer` and
    `outcome`, that returns a number."""
    ranking: RankingConfig | None = free(None)
    """Lists of a catalogue's items beside what users then did."""
    engine: Literal["vllm", "native"] | Plug = free("native")
    """What generates, as `rollout.engine`."""
    start: bool = free(True)
    """Evaluate the model that training started from too, as `start/…`."""
    limit: Positive = free(512)
    """Prompts taken from each source, the first ones."""
    samples: Positive = free(8)
    """k of pass@k, sampled at `temperature`; pass@1 is greedy."""
    temperature: Temperature = free(1.0)
    """Sampling temperature of pass@k."""
    max_new_tokens: Positive = free(256)
    """Longest answer."""


class PublishConfig(Section):
    """The publish stage."""

    to: str | None = free(None)
    """Directory or URI of versions and their pointer; default `{output}/published`."""
    what: Literal["merged", "adapter", "both"] = free("merged")
    """What a version holds: the `merged` model; the `adapter` of `model.lora` alone, in PEFT format with the tokenizer;
    or `both`, the merged model with the adapter in `adapter/` beside it."""
    gate: Literal["start", "off"] = free("start")
    """`start`: what is worse than what training started from is not published. Worse: the 95 % interval of the
    difference on the same held-out rows, of `metric` or else of greedy answers, of rankings, or of held-out losses,
    whichever there is first, lies below 0 (below -`max_drop`). `off`: publish."""
    metric: str | None = free(None)
    """A metric of the evaluate stage that may not be worse than the published version's by more than `max_drop`."""
    mode: Literal["min", "max"] = free("max")
    """Which is better, less or more."""
    max_drop: Annotated[float, Field(ge=0)] = free(0.0)
    """By how much `metric` may be worse and still be published."""
    hub: str | None = free(None)
    """Repository of the Hugging Face hub (`team/name`) that each version is pushed to as well; made, and private, if it
    is not there. The token is the hub's own (`HF_TOKEN`)."""
    license: str | None = free(None)
    """For the model card: the model's licence, by its SPDX name (`apache-2.0`)."""


class StepConfig(Section):
    """What the orchestrator gives one step."""

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
    """Environment variables. A secret is written as `env:NAME`: the variable of that name where the step runs,
    which nothing stores."""


class FlowConfig(Section):
    """What the orchestrator needs; training does not read it."""

    steps: dict[Literal["prepare", "tokenize", "train", "evaluate", "publish"], StepConfig] = free({})
    """Resources, retries and limits by step."""
    cron: str | None = free(None)
    """When a deployed flow runs: minute, hour, day of the month, month, day of the week (`0 3 * * 1`:
    Mondays at three)."""
    event: str | None = free(None)
    """Name of the event that starts a deployed flow."""
    sweep: list[dict[str, Any]] = free([])
    """Trials of the sweep flow: what each has otherwise, by dotted key (`{train.lr: 1e-4, train.sequences: 8}`)."""


class Job(Section):
    """One run, from data to a published model. `job_class` picks the subclass that types `algo` by `recipe`."""

    recipe: str | Plug
    """The algorithm, or `use: pkg.mod:MyRecipe`."""
    output: str = free("runs")
    """Directory under which each run gets one of its own, named by its lineage."""
    seed: Count = 0
    """Of everything random."""
    model: ModelConfig
    data: DataConfig
    algo: Knobs | dict[str, Any] = {}
    """Knobs of the recipe; of a plugged recipe: its keyword arguments."""
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
