"""Rules between keys of a job: what goes with what. The one idea: each gives one line that begins with the key to change."""

from ptf.config.schema import DPOAlgo, GRPOAlgo, Job, KDAlgo, OPDAlgo, PolicyAlgo, PPOAlgo, RewardedAlgo, RMAlgo

SMALLER = ("loss/", "kl/", "ce/", "divergence/", "calibration_error/")  # metrics of which less is better
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
CRON_NAMES = ((), (), (), MONTHS, ("sun", "mon", "tue", "wed", "thu", "fri", "sat"))


def schedule(text: str) -> bool:
    """Whether this is five fields of numbers, ranges, steps and lists, each within its bounds; months and days of the week may be names."""
    fields, ranges = text.split(), ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
    return len(fields) == len(ranges) and all(_times(field, *bounds, names) for field, bounds, names in zip(fields, ranges, CRON_NAMES, strict=True))


def _times(field: str, low: int, high: int, names: tuple[str, ...]) -> bool:
    number = lambda word: names.index(word.lower()) + low if word.lower() in names else int(word) if word.isascii() and word.isdigit() else -1  # noqa: E731
    for part in field.split(","):
        span, slash, step = part.partition("/")
        first, dash, last = span.partition("-")
        if slash and not (step.isascii() and step.isdigit() and int(step) > 0):
            return False
        if span != "*" and not low <= number(first) <= (number(last) if dash else number(first)) <= high:
            return False
    return True


def broken(job: Job) -> list[str]:
    """One line for each rule that is broken, beginning with the key to change."""
    workers = job.compute.workers
    mesh = job.compute.mesh
    data_ranks, of = (workers // mesh.tensor or 1), f"compute.workers ({workers})" + (f" / compute.mesh.tensor ({mesh.tensor})" if mesh.tensor > 1 else "")
    dealt = {} if job.rollout else {"data.lanes": job.data.lanes, "train.rows": job.train.rows}
    faults = [f"{key} ({value}) must be a multiple of {of}" for key, value in dealt.items() if value % data_ranks]
    if "://" in job.output:
        faults.append("output must be a directory on this machine; publish.to may be a URI")
    if workers % (mesh.replicate * mesh.tensor):
        faults.append(f"compute.mesh: replicate ({mesh.replicate}) × tensor ({mesh.tensor}) must divide compute.workers ({workers})")
    if job.compute.launcher == "local" and workers > 1:
        faults.append("compute.launcher: local is one process; use ray or torchrun for compute.workers > 1")
    faults += length(job)
    faults += places(job)
    if job.train.steps and job.train.warmup + (job.train.decay or 0) > job.train.steps:
        faults.append("train.warmup and train.decay together are longer than train.steps")
    if job.train.decay_at and not (job.train.decay and job.train.validate_every and job.data.validation):
        faults.append("train.decay_at needs train.decay, train.validate_every and data.validation")
    if job.train.deterministic:
        faults += deterministic(job)
    if job.train.stop or job.checkpoint.best:
        faults += watched(job)
    faults += own_components(job)
    faults += preferences(job)
    faults += companions(job)
    faults += policies(job)
    faults += foreign_model(job)
    faults += pools(job)
    if job.evaluate.sources and not (job.evaluate.reward or job.rollout):
        faults.append("evaluate.sources needs evaluate.reward to score the answers")
    if job.evaluate.metrics and not job.evaluate.sources:
        faults.append("evaluate.metrics needs evaluate.sources: they are found from the answers to held-out prompts")
    taken = {"pass@1", f"pass@{job.evaluate.samples}", "reward", "no_result"}
    faults += [f"evaluate.metrics.{name}: that name is taken; give it another" for name in job.evaluate.metrics if name in taken or "/" in name]
    faults += [f"data.validation.{name} has the name of one of data.sources" for name in job.data.validation if name in job.data.sources]
    if job.flow.cron is not None and not schedule(job.flow.cron):
        faults.append(f"flow.cron: {job.flow.cron!r} is no schedule: minute, hour, day of the month, month and day of the week, like '0 3 * * 1'")
    if job.publish.mode == "max" and (job.publish.metric or "").startswith(SMALLER):
        faults.append(f"publish.mode: {job.publish.metric} is better the smaller it is; give min")
    wants_prompts = {f"evaluate.sources.{n}": s for n, s in job.evaluate.sources.items()}
    if job.rollout:
        faults += rewarded(job)
        if job.rollout.environment and job.evaluate.reward:
            faults.append("evaluate.reward: rollout.environment plays held-out episodes too, and gives their rewards")
        wants_prompts |= {f"data.sources.{n}": s for n, s in job.data.sources.items()}
        if job.data.validation:
            faults.append("data.validation is for recipes without rollouts; held-out prompts are evaluate.sources")
        if job.data.too_long in ("truncate", "split"):
            faults.append("data.too_long: a prompt cannot be cut; use error or drop")
        if job.rollout.top_p < 1 and mesh.tensor > 1:
            faults.append("rollout.top_p: a nucleus cannot be cut with compute.mesh.tensor above 1, where no process has the whole distribution")
        if job.rollout.allowed and job.rollout.allowed.distinct and job.rollout.allowed.repeat == 1:
            faults.append("rollout.allowed.distinct: with repeat 1 there is nothing that could be there twice; give repeat")
        if job.rollout.lora == "adapter" and job.model.lora is None:
            faults.append("rollout.lora: adapter needs model.lora")
        if job.rollout.lora == "adapter" and job.rollout.engine not in ("native", "vllm"):
            faults.append("rollout.lora: adapter is for the engines native and vllm; give merged")
        if job.rollout.tensor > 1 and (job.rollout.engine != "vllm" or job.compute.launcher != "ray"):
            faults.append("rollout.tensor: above 1 it is for rollout.engine: vllm and compute.launcher: ray")
        faults += streamed(job)
        if job.compute.launcher == "local" and job.rollout.workers > 1:
            faults.append("rollout.workers: compute.launcher: local has one process")
        if job.compute.launcher == "torchrun":
            faults.append("compute.launcher: torchrun has no rollouts; use ray, or local with rollout.engine: native")
        if job.rollout.max_new_tokens >= job.data.seq_len:
            faults.append(f"rollout.max_new_tokens ({job.rollout.max_new_tokens}) leaves no room for a prompt in data.seq_len ({job.data.seq_len})")
    elif isinstance(job.recipe, str):
        faults += [f"data.sources.{n}.kind: prompt is for recipes with rollouts" for n, s in job.data.sources.items() if s.kind == "prompt"]
    faults += [f"{key}.kind must be prompt, not {s.kind}" for key, s in wants_prompts.items() if s.kind not in ("auto", "prompt")]
    if job.compute.launcher != "ray":
        engines = {
            "rollout.engine": job.rollout.engine if job.rollout and job.compute.launcher == "local" else None,
            "evaluate.engine": job.evaluate.engine,
        }
        faults += [
            f"{key}: vllm needs a process of its own, which compute.launcher: {job.compute.launcher} does not give; use native"
            for key, e in engines.items()
            if e == "vllm"
        ]
    return faults


def places(job: Job) -> list[str]:
    """What goes with the path of a source. (Whether it is a dataset of the Hub, where a directory may have its name, is known when it is read.)"""
    sections = {"data.sources": job.data.sources, "data.validation": job.data.validation, "evaluate.sources": job.evaluate.sources}
    faults = []
    for key, source in ((f"{section}.{name}", source) for section, sources in sections.items() for name, source in sources.items()):
        chosen = [name for name in ("config", "split", "revision") if getattr(source, name) is not None]
        if source.kind == "tokenized" and chosen:
            faults.append(f"{key}.{chosen[0]} is of data that are not tokenized yet; remove it")
        elsewhere = "://" in source.path and not source.path.startswith("hf://")
        if source.revision is not None and (elsewhere or source.path.startswith(("/", ".", "~", "prepare:"))):
            faults.append(f"{key}.revision is for a dataset of the Hugging Face Hub, which {source.path} is not; remove it")
    return faults


def streamed(job: Job) -> list[str]:
    """Weights that go from device to device."""
    assert job.rollout is not None
    how = job.rollout.transport
    if how not in ("ipc", "nccl"):
        return []
    shared = not job.compute.pools or any({"policy", "rollout"} <= set(pool.roles) for pool in job.compute.pools.values())
    wrong = {
        "policy and rollout need processes of their own: compute.launcher: ray": job.compute.launcher != "ray",
        "rollout.engine must be native or vllm": job.rollout.engine not in ("native", "vllm"),
        "an adapter alone is small; give object_store or path": job.rollout.lora == "adapter",
        "model.backend: hf has no names to announce; give object_store or path": job.model.backend == "hf",
        "policy and rollout must be in one pool, with as many rollout.workers × rollout.tensor as compute.workers": how == "ipc"
        and (not shared or job.rollout.workers * job.rollout.tensor != job.compute.workers),
        "policy and rollout must be in different compute.pools": how == "nccl" and shared,
    }
    return [f"rollout.transport: {how}: {what}" for what, is_so in wrong.items() if is_so]


def rewarded(job: Job) -> list[str]:
    """Something must say how good an answer is."""
    knobs = job.rollout
    assert knobs is not None
    of_answers = [f"rollout.{name}" for name in ("reward", "reward_model") if getattr(knobs, name) is not None]
    if not of_answers and not knobs.environment:
        return ["rollout.reward: it, or reward_model or environment, must say how good an answer is"]
    if of_answers and knobs.environment:
        return [f"{of_answers[0]}: rollout.environment gives the rewards of its episodes; give one, not both"]
    if knobs.reward_model and not knobs.reward and job.evaluate.sources and not job.evaluate.reward:
        return ["evaluate.sources needs evaluate.reward: held-out answers are not scored by rollout.reward_model, which they may have learned to please"]
    return []


def length(job: Job) -> list[str]:
    """When the run ends, and what its data must be for that."""
    faults = []
    if (job.train.steps is None) == (job.train.epochs is None):
        faults.append("train.steps or train.epochs says how long to train: " + ("give one" if job.train.steps is None else "not both"))
    if job.rollout:
        faults += [f"{key} is for recipes without rollouts; use train.steps" for key, there in {
            "train.epochs": job.train.epochs, "data.on_bad_row": job.data.on_bad_row != "error", "data.mix.by": job.data.mix.by != "samples",
            **{f"data.sources.{n}.epochs": s.epochs for n, s in job.data.sources.items()}}.items() if there]  # fmt: skip
    bounded = job.train.epochs or any(s.epochs for s in job.data.sources.values())
    if job.data.mix.exhausted != "repeat" and not bounded:
        faults.append(f"data.mix.exhausted: {job.data.mix.exhausted} needs train.epochs or a source's epochs")
    if len(job.data.sources) > 1 and all(source.weight is None for source in job.data.sources.values()):
        without = "without a `weight` of some source every row comes once an epoch, and each source ends when it is done"
        if job.data.mix.exhausted == "stop":
            faults.append(f"data.mix.exhausted: stop needs weights: {without}")
        if job.data.mix.by == "tokens":
            faults.append(f"data.mix.by: tokens needs weights, which are then shares of tokens: {without}")
    return faults


def pools(job: Job) -> list[str]:
    """Every role sits in one pool. (Which roles there are beside these two, the recipe knows.)"""
    given = job.compute.pools
    if not given:
        return []
    if not job.rollout:
        return ["compute.pools is for recipes with rollouts; others have one gang, of compute.workers"]
    seats = [role for pool in given.values() for role in set(pool.roles)]
    faults = [f"compute.pools: role {role} is in more than one" for role in sorted({role for role in seats if seats.count(role) > 1})]
    faults += [f"compute.pools: no pool has the role {role}" for role in ("policy", "rollout") if role not in seats]
    faults += [
        f"compute.pools.{name}.park: vllm does not park on disk; give rollout a pool of its own, or the pool park: auto"
        for name, pool in given.items()
        if pool.park == "disk" and "rollout" in pool.roles and job.rollout.engine == "vllm"
    ]
    return faults


def foreign_model(job: Job) -> list[str]:
    """What `model.backend: hf` does not have."""
    if job.model.backend != "hf":
        return []
    asked = {
        "model.tokens": job.model.tokens is not None,
        "model.replace": bool(job.model.replace),
        "model.head": job.model.head is not None,
        "model.lora": job.model.lora is not None,
        "compute.mesh.tensor": job.compute.mesh.tensor > 1,
        "rollout.engine: native": job.rollout is not None and job.rollout.engine == "native",
        "evaluate.engine: native": bool(job.evaluate.sources) and job.evaluate.engine == "native",
    }
    return [f"{key} is not there with model.backend: hf" for key, there in asked.items() if there]


def preferences(job: Job) -> list[str]:
    """What goes with the recipes that learn from whole answers."""
    algo, faults = job.algo, []
    if isinstance(algo, DPOAlgo):
        if algo.loss == "simpo" and algo.reference:
            faults.append("algo.reference: simpo has no reference")
        if algo.loss != "sigmoid" and algo.label_smoothing:
            faults.append(f"algo.label_smoothing belongs to algo.loss: sigmoid, not to {algo.loss}")
    if isinstance(algo, RMAlgo):
        if algo.loss != "pair" and (algo.margin or algo.centring):
            faults.append(f"algo.margin belongs to algo.loss: pair, like algo.centring, not to {algo.loss}")
        if job.evaluate.sources:
            faults.append("evaluate.sources needs a model that generates text; a reward model is evaluated on data.validation")
        if job.model.head is not None or "head" in job.model.replace:
            faults.append("model.head: a reward model's head is a scalar one")
    if isinstance(algo, DPOAlgo | RMAlgo):
        if job.data.train_on != "assistant":
            faults.append(f"data.train_on is of chats; recipe {job.recipe} compares or scores the last answer")
        if job.data.too_long in ("truncate", "split"):
            faults.append(f"data.too_long: recipe {job.recipe} looks at whole answers; use error or drop")
    if isinstance(algo, DPOAlgo | KDAlgo | RMAlgo) and job.model.backend == "hf":
        faults.append(f"model.backend: hf has no recipe {job.recipe}")
    return faults


def companions(job: Job) -> list[str]:
    """What goes with recipes that look at other models."""
    algo, faults = job.algo, []
    if not isinstance(algo, DPOAlgo | KDAlgo):
        return faults
    if job.model.head is not None or "head" in job.model.replace:
        faults.append(f"model.head: {job.recipe} compares log-probs over the vocabulary")
    if isinstance(algo, DPOAlgo) and algo.precomputed and algo.loss == "simpo":
        faults.append("algo.precomputed: simpo has no reference")
    if algo.precomputed and job.train.deterministic:
        faults.append("algo.precomputed: what is found ahead depends, in its last bits, on how rows were dealt; not with train.deterministic")
    if isinstance(algo, KDAlgo) and algo.loss != "js" and algo.beta != KDAlgo.model_fields["beta"].default:
        faults.append(f"algo.beta belongs to algo.loss: js, not to {algo.loss}")
    if isinstance(algo, KDAlgo) and algo.precomputed and algo.top_k is None:
        faults.append("algo.precomputed needs algo.top_k: whole distributions are too large to be kept")
    return faults


def nucleus(job: Job) -> list[str]:
    """What cannot be with `rollout.top_p` below 1, because another policy has another nucleus, in which what was drawn need not be."""
    algo, what = job.algo, "rollout.top_p: a nucleus is taken of one policy's distribution, so it cannot be with"
    assert isinstance(algo, PolicyAlgo)
    others = {
        "several updates from the same rollouts; give algo.epochs: 1 and algo.minibatches: 1": algo.epochs * algo.minibatches > 1,
        "algo.kl; give 0": isinstance(algo, RewardedAlgo) and algo.kl > 0,
        "recipe opd: the teacher has another": isinstance(algo, OPDAlgo),
        "algo.critic_warmup; give 0": isinstance(algo, PPOAlgo) and algo.critic_warmup > 0,
    }
    return [f"{what} {other}" for other, there in others.items() if there]


def policies(job: Job) -> list[str]:
    """What goes with PPO, GRPO and its family."""
    algo, faults = job.algo, []
    if not isinstance(algo, PolicyAlgo) or job.rollout is None:
        return faults
    if isinstance(algo, GRPOAlgo) and job.rollout.group < 2:
        faults.append("rollout.group must be at least 2: GRPO compares the answers to one prompt with each other")
    if job.rollout.top_p < 1:
        faults += nucleus(job)
    if isinstance(algo, OPDAlgo) and job.rollout.equal == "replace":
        faults.append("rollout.equal: replace is for recipes that learn from rewards")
    if not isinstance(algo, RewardedAlgo):
        return faults
    if algo.kl and algo.kl_estimator == "k1" and algo.kl_in == "loss":
        faults.append("algo.kl_estimator: the gradient of k1 is 0 on average, so in the loss it holds the policy to nothing; use k2 or k3, or kl_in: reward")
    if isinstance(algo, GRPOAlgo) and algo.baseline == "leave_one_out" and algo.scale_by_std:
        faults.append("algo.scale_by_std belongs to algo.baseline: mean; give false")
    if isinstance(algo, PPOAlgo) and job.model.backend == "hf":
        faults.append("model.backend: hf has no recipe ppo: a critic has a scalar head")
    if algo.overlong and job.rollout.environment:
        faults.append("algo.overlong is about single answers; an environment gives the rewards of its episodes")
    if algo.overlong > job.rollout.max_new_tokens:
        faults.append(f"algo.overlong ({algo.overlong}) is more than rollout.max_new_tokens ({job.rollout.max_new_tokens})")
    return faults


def deterministic(job: Job) -> list[str]:
    rules = {
        "train.deterministic needs train.precision: fp32": job.train.precision == "fp32",
        "train.deterministic needs compute.device: cpu (a GPU's kernels add in an order of their own)": job.compute.device == "cpu",
        "train.deterministic needs rollout.engine: native (vllm's bits depend on its batches)": job.rollout is None or job.rollout.engine != "vllm",
        "train.deterministic needs compute.threads: 1 in every role": job.rollout is None or job.compute.threads == 1,
        "train.deterministic needs a whole model on every worker: compute.mesh.tensor: 1": job.compute.mesh.tensor == 1,
    }
    return [fault for fault, kept in rules.items() if not kept]


def watched(job: Job) -> list[str]:
    """What train.stop and checkpoint.best look at has to be measured."""
    if job.rollout:
        return ["train.stop and checkpoint.best are for recipes without rollouts"]
    faults, known = [], [f"loss/{name}" for name in job.data.validation]
    if not (job.train.validate_every and known):
        faults.append("train.stop and checkpoint.best need data.validation and train.validate_every")
    asked = {"train.stop.metric": job.train.stop, "checkpoint.best.metric": job.checkpoint.best}
    faults += [f"{key} is {of.metric}, but what is measured is {', '.join(known)}" for key, of in asked.items() if of and known and of.metric not in known]
    if job.checkpoint.best and job.train.validate_every and job.checkpoint.every % job.train.validate_every:
        faults.append("checkpoint.every must be a multiple of train.validate_every, so that every checkpoint has the metric of checkpoint.best")
    return faults


def own_components(job: Job) -> list[str]:
    """What goes with components and tokens of the user's own, and what does not."""
    model, tokens, faults = job.model, job.model.tokens, []
    if tokens and not (tokens.added or tokens.file or tokens.semantic_ids):
        faults.append("model.tokens adds none: give added, file or semantic_ids")
    if tokens and (tokens.init == "vectors") != (tokens.vectors is not None):
        faults.append("model.tokens.vectors and model.tokens.init: vectors need each other")
    if tokens and tokens.init == "description" and not tokens.file:
        faults.append("model.tokens.init: description needs model.tokens.file, whose rows have a description")
    if job.data.share_beginnings and (job.recipe != "sft" or model.backend != "ptf" or model.replace):
        faults.append("data.share_beginnings is for recipe sft with model.backend: ptf and without model.replace")
    declared = model.head or "head" in model.replace
    if declared and job.rollout:
        faults.append("model.head: rollouts are sampled from logits over the vocabulary; a declared head trains with offline recipes")
    if declared and job.evaluate.sources:
        faults.append("model.head: evaluate.sources needs a model that generates text")
    engines = {"rollout.engine": job.rollout.engine if job.rollout else None, "evaluate.engine": job.evaluate.engine if job.evaluate.sources else None}
    if model.replace:
        faults += [f"{key}: vllm does not know the components of model.replace; use native" for key, engine in engines.items() if engine == "vllm"]
    return faults
