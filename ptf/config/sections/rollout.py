"""The section `rollout`: how the policy of an online recipe generates, and what its responses are worth."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, WrapSerializer

from ptf.config.section import Count, Fraction, Plugin, Positive, PositiveFloat, Section, Temperature, changeable
from ptf.config.transports import TransportName


class RewardModelConfig(Section):
    """A model that scores responses, such as one that recipe rm has trained; it uses its own tokenizer and chat
    template."""

    path: str
    """As `model.path`; the head of the model must be one score (`…ForSequenceClassification` with one label)."""
    weight: float = 1.0
    """Factor on its score."""


class ConstrainedDecodingConfig(Section):
    """The permitted responses: the policy can generate nothing else."""

    path: str
    """A text file with one permitted response, or part of a response, per line."""
    lines_per_response: Positive = 1
    """How many lines of the file make up one response, directly one after the other."""
    distinct: bool = False
    """A response contains no line twice: lines that the response already has are no longer allowed."""


class SourcePlugin(Plugin):
    """A reward or an environment, of all sources or of one."""

    weight: float = 1.0
    """Factor on its rewards."""

    @property
    def plugin(self) -> Plugin:
        """Return it without its weight, as a process of its own gets it."""
        return Plugin(use=self.use, args=self.args)


def _by_source(value: Any) -> Any:
    """Return a plugin for all sources as that of the source "", and plugins by source as they are."""
    if value is None:
        return {}
    if isinstance(value, Plugin):
        value = value.model_dump()
    if not isinstance(value, dict):
        return value
    named = all(isinstance(inner, dict | Plugin) for inner in value.values())
    return value if named and not value.keys() & {"use", "args"} else {"": value}


def _as_written(value: Any, dump: SerializerFunctionWrapHandler) -> Any:
    """Return the plugin for all sources as a config has it."""
    dumped = dump(value)
    return dumped[""] if dumped.keys() == {""} else dumped


# a plugin for all sources, which has the name "", or one for each of several
BySource = Annotated[dict[str, SourcePlugin], BeforeValidator(_by_source), WrapSerializer(_as_written)]


class HarnessConfig(Section):
    """An agent in its own code that calls the policy at an OpenAI-compatible address, in place of `environment`."""

    command: list[str] = []
    """A program with its arguments, started for each episode. It finds the address in `OPENAI_BASE_URL`, its key in
    `OPENAI_API_KEY`, and one line of JSON on its standard input: the row's `messages`, `columns` and `seed`. It ends
    with status 0, and may write a result for `reward` into the file that `PTF_RESULT` names."""
    agent: Plugin | None = None
    """In place of `command`, a function: `agent(row, base_url, api_key, seed, **args) -> float | None`, plain (in a
    thread) or `async def`. A number is the reward; None leaves it to `reward`. It runs in the rollout's process, or
    with `python`."""
    python: str | None = None
    """An interpreter that runs `agent` in processes of its own, for packages that do not fit into ptf's environment:
    `/opt/agent/.venv/bin/python`, with which ptf need not be installed. The processes are started once."""
    processes: Positive = 1
    """Number of processes of `python`; each plays many episodes at once."""
    columns: list[str] = []
    """Columns of the row that `command` gets beside `messages`. List no columns with reference answers: the policy can
    read whatever the program gets."""
    env_vars: list[str] = []
    """Names of further environment variables that `command` and `python` get. Without them, both get only PATH, LANG,
    LC_ALL, TZ and VIRTUAL_ENV, if they are set, and HOME and TMPDIR, which name a directory of their own; `command`
    also gets OPENAI_BASE_URL, OPENAI_API_KEY and PTF_RESULT."""
    models: dict[str, Literal["policy", "policy:no_loss"]] = {}
    """Names of models that the agent asks for, and what serves them: `policy`, or `policy:no_loss`, which is the same
    current weights, but its responses have no loss."""
    tool_format: str | None = None
    """How the model writes tool calls, such as `hermes`. Default: what its chat template asks for."""


class RolloutConfig(Section):
    """How the policy generates (online recipes)."""

    reward: BySource = {}
    """`f(row, text, **args) -> float`, or a reward of groups or batches (ptf.rl.rewards); an exception counts as no
    result, never as 0. For several sources with a reward each: the rewards by the sources' names (`{sums: {use: …},
    tickets: {use: …}}`)."""
    reward_model: RewardModelConfig | None = None
    """A reward model, which is a role of its own. The reward is its score × `weight`, plus that of `reward` if both are
    given."""
    environment: BySource = {}
    """For conversations with several turns, in place of `reward`: `make(row, seed, **args) -> Environment`
    (ptf.rl.environments.protocol), which returns the rewards. Or environments by the sources' names, as for `reward`;
    rows of other sources are answered once and scored by `reward`."""
    play: Plugin | None = None
    """The rollout function: `async def f(prompt, policy, **args) -> Trajectory` (ptf.rl.policy), which asks the policy
    as often as it likes, in place of `environment`. It gives the reward, or leaves that to `reward`."""
    harness: HarnessConfig | None = None
    """For an agent in its own code, in place of `environment` and `play`; `reward` scores what it does."""
    episode_timeout_s: PositiveFloat | None = changeable(None)
    """Time limit of an episode, which has no result if it takes longer. Default: 600 with `harness`; otherwise none but
    `compute.timeout_s`, which ends the whole run."""
    max_turns: Positive = 8
    """Maximum number of turns of the policy in one episode (`environment`). `max_new_tokens` limits each turn,
    `data.seq_len` the whole episode with the messages of the environment."""
    reward_processes: Positive = changeable(1)
    """Number of processes that call `reward`; of several, for each of them. Beside each engine replica as many hold
    the environments."""
    reward_timeout_s: PositiveFloat = changeable(10.0)
    """Time limit of one call of `reward`, with all requests that it makes, or of one `reset` or `step` of an
    environment. Many calls are in flight in a process; each has its own limit."""
    reward_retries: Count = changeable(1)
    """Maximum number of times that a failed call of `reward` is repeated, or an episode replayed after a call of its
    environment failed, before the response counts as having no result."""
    max_staleness: Count = 0
    """Asynchronous rollouts: maximum number of steps between the weights that sampled a group's oldest token and the
    weights that are trained on the group. A step takes the groups that have ended; unfinished responses continue under
    the next weights. 0: each step waits for all its responses."""
    slice_tokens: Positive = 256
    """With `max_staleness`, generation proceeds in slices (partial rollouts): in one slice every unfinished response
    gets at most this many tokens. Weights change only between slices. A response that continues in the next slice is
    prefilled again."""
    in_flight: Positive | None = None
    """The largest number of groups (prompts) in flight, with `max_staleness`: being generated, or waiting to be
    trained. From `prompts_per_step` to `prompts_per_step` × (1 + `max_staleness`). Default: halfway."""
    generation_batches: Positive = 1
    """With `max_staleness`: number of batches into which the responses of a slice are divided (group index modulo this
    number); the `replicas` take batches from a queue. It must be at least `replicas` and cannot change on resume, while
    `replicas` can: the same value gives the same bits with any number of replicas. So set it to the largest number of
    `replicas` that the run may have; a larger one only makes the batches smaller."""
    clock: Literal["virtual", "wall"] = "virtual"
    """With `max_staleness`. `virtual`: a slice waits for every environment whose reply is due, so that the run repeats
    to the bit, however fast engines and environments are. `wall`: a slice generates the responses that have been
    requested when it begins, and engines do not wait for environments; which responses these were is written to the
    run's `flight.jsonl`, from which `ptf replay` repeats the run."""
    update_slices: Count | None = changeable(None)
    """With `max_staleness`: how many slices the engines generate with the old weights while a step is trained: in
    parallel if the engines have a pool of their own (`compute.pools`), otherwise after the update. Default: 1 with a
    pool of their own, otherwise 0. The metric `update_slices_suggested` is the number with which neither side waits."""
    environment_slices: Count = 0
    """With `max_staleness`: the slices that an environment has for a reply, while the other responses go on. The reply
    is used after exactly this many slices, even if it is there earlier, and the engines wait if it is not there by
    then. 0: it is used in the next slice, and the engines wait for each reply."""
    engine: Literal["auto", "vllm", "native"] | Plugin = "auto"
    """`auto`: vllm on GPUs, native on a CPU, where it is faster, or the other one if the first does not support the
    job's keys; a run keeps what it began with. `vllm`; `native`, which is ptf's own decoder, or with
    `model.backend: hf` transformers' model (slower; where its cache cannot be used, each token costs a whole forward
    pass), and needs no further package; or `use: pkg.mod:Engine` (ptf.rl.engines.protocol), which `ptf check-engine`
    tests."""
    prompts_per_step: Positive = 64
    """Number of prompts that are answered in each step."""
    group_size: Positive = 8
    """Responses sampled for each prompt. GRPO compares them, so it needs at least two."""
    max_new_tokens: Positive = changeable(256)
    """Maximum length of a response in tokens, with its end-of-turn token."""
    max_resampling_rounds: Count = 0
    """Dynamic sampling (DAPO): draw other prompts in place of groups whose responses all have the same reward (before
    length penalties and a KL reward), from which GRPO learns nothing. At most this many rounds of prompts are drawn for
    one step, which then trains on the groups that it has; 8 is usual. 0: such groups are kept."""
    temperature: Temperature = 1.0
    """Sampling temperature; the trainer computes log-probs at the same one."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: draw from the likeliest tokens that together have this probability. The trainer computes
    log-probs over the same tokens. Another policy has another nucleus; therefore values below 1 are refused unless
    `algo.update_epochs` and `algo.num_minibatches` are 1 and `algo.kl_coef` and `algo.critic_warmup` are 0; with recipe
    `opd`, and with `compute.mesh.tensor_parallel_size` or `compute.mesh.context_parallel_size` above 1, they are always
    refused."""
    constrained_decoding: ConstrainedDecodingConfig | None = None
    """Restrict responses to the lines of a file, in training and in evaluation; log-probs are computed among the tokens
    that may follow."""
    replicas: Positive = changeable(1)
    """Number of rollout engines; each uses `tensor_parallel_size` devices. Other devices of their pool are idle while
    responses are generated, so on GPUs that the policy shares give `compute.workers` / `tensor_parallel_size`."""
    tensor_parallel_size: Positive = changeable(1)
    """Number of devices that hold one vLLM engine together, each a part of every layer. The rollout role takes
    `replicas` × `tensor_parallel_size` devices of its pool."""
    lora_sync: Literal["auto", "merged", "adapter"] = changeable("auto")
    """What is sent to the engines if the policy has `model.lora`: the merged model, or the adapter alone, which the
    engine applies to the base model. `auto`: the adapter alone on GPUs with vLLM and `compute.launcher: ray`, in bf16,
    if nothing but adapters of a dense model's projections trains, of a rank of at
    most 128 and without `quantization: nf4`; otherwise the merged model."""
    transport: TransportName = changeable("auto")
    """How new weights reach the engines (the table in docs/rl.md has what each needs): `object_store` through host
    memory, `files` through files in the run's directory, `ipc` through memory of the GPU that policy and engine share,
    `nccl` from GPU to GPU. `auto`: on GPUs with `compute.launcher: ray` the first of `ipc`, `nccl` and `files` that the
    job can use; `object_store` otherwise, and where only the adapter is sent (`lora_sync`)."""
    logprob_tolerance: PositiveFloat = changeable(1.0)
    """Factor on how far the engine's and the trainer's log-probs of the sampled tokens may differ before the run stops,
    ahead of the update. At 1: by 1e-4 on average in fp32 (1e-3 for models with experts) and by 0.2 in bf16; and no
    token in fp32 by more than 1e-3 (with experts 1 %), and 5 % of them in bf16 by more than 0.5. The factor is on these
    differences, not on the shares."""
    max_no_result_share: Fraction = changeable(0.1)
    """Largest permitted share of responses without a result (a reward) in a step; above it the run stops."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = changeable(0.7)
    """Share of a GPU's memory that one vLLM engine uses for weights and cache while it generates. During a sync with
    `transport: ipc`, the weights of the engine and those of the policy must fit on the GPU together (without the
    cache)."""

    @property
    def is_multi_turn(self) -> bool:
        """Return whether a response may have several turns."""
        return bool(self.environment or self.play or self.harness)
