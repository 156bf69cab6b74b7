"""vLLM as a rollout engine, inside this process and stepped in a thread of its own: each call of `generate` or `stream`
is one request, and the requests of all callers are batched continuously.

Every sampled request has its own seed, so a response depends on what else is in the batch only through rounding. Greedy
requests never share a batch with sampled ones (vLLM on a CPU ignores all seeds of a mixed batch).
"""

import contextlib
import itertools
import json
import os
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ptf.config.backends import BackendName
from ptf.data.trie import Trie
from ptf.errors import UserError
from ptf.model import model_files
from ptf.model.backends import backend_of
from ptf.model.model import Model
from ptf.model.peft_format import save
from ptf.model.tensor_files import TensorFiles
from ptf.rl.engines.protocol import NOTHING, Progress, Request
from ptf.rl.engines.response import ResponseInProgress
from ptf.rl.engines.shared_memory import nothing_outlives_it
from ptf.rl.engines.stepper import Stepper
from ptf.rl.engines.vllm_support import hf_overrides, installed_build, rotates_in_part
from ptf.rl.weights.verification import Buckets, Manifest, Receipt, SyncError, check
from ptf.workspace import scratch

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # tensors cannot be sent to vLLM's own engine process
ALWAYS = {
    # for the parts of a tensor-parallel engine: a forked process has its parent's locks, and not the threads that
    # hold them
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
CPU = {
    "TORCH_COMPILE_DISABLE": "1",  # compiling two sampler helpers takes 13 s, saves nothing at this speed
    "OMP_NUM_THREADS": "1",  # 4 ms a step against 100 ms on a busy box, where threads spin for their turn
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_MLA_DISABLE": "1",  # its kernel of latent attention has one size of heads; without it, keys are expanded
}
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM makes room for
TRIE = "ptf_trie"  # in a request's extra arguments: the file of its trie
CACHES = (
    "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
)


def on_cpu() -> bool:
    """Return whether the installed vLLM is the CPU build."""
    build = installed_build()
    return build is not None and build.cpu


def engine_env(workdir: Path) -> dict[str, str]:
    """Return the environment variables that a process must have before it imports vLLM.

    All caches of vLLM are under `workdir`.
    """
    caches = {name: str(Path(workdir).absolute() / name.lower()) for name in CACHES}
    return {**IN_PROCESS, **ALWAYS, **caches, **(CPU if on_cpu() else {})}


class VLLMEngine:
    """RolloutEngine on vLLM.

    `path` is a Hugging Face directory with config.json and safetensors; its tokenizer is not read. `version` is the
    policy step of those weights. `cpu_kv_cache_gib` is the size of the key-value cache on a CPU; on a GPU the cache
    gets what the weights leave of `gpu_share` of its memory. `backend` is that of the policy, which sends weights.
    """

    name = "vllm"
    in_batches = False

    def __init__(
        self,
        path: str,
        *,
        seed: int,
        dtype: str,
        max_model_len: int,
        cpu_kv_cache_gib: float = 0.25,
        version: int = 0,
        gpu_share: float = 0.7,
        lora_rank: int | None = None,
        constrained_decoding: bool = False,
        tensor: int = 1,
        backend: BackendName = "ptf",
    ) -> None:
        needed = {**IN_PROCESS, **(CPU if on_cpu() else {})}
        if missing := [f"{name}={value}" for name, value in needed.items() if os.environ.get(name) != value]:
            raise RuntimeError(f"vLLM needs a process of its own with {' '.join(missing)} (see engine_env)")
        from vllm import EngineArgs, LLMEngine  # here: it takes 6-8 s and reads the environment variables

        directory = Path(path)
        arguments = {
            **_model_arguments(directory, seed, dtype, max_model_len),
            **_device_arguments(directory, max_model_len, cpu_kv_cache_gib, gpu_share),
        }
        if tensor > 1:  # each part in a process of its own
            arguments |= {"tensor_parallel_size": tensor, "distributed_executor_backend": "mp"}
        if constrained_decoding:  # not always, because on a GPU vLLM then uses its older model runner
            arguments["logits_processors"] = ["ptf.rl.engines.vllm_tries:OnlyAllowed"]
        if lora_rank is not None:
            arguments |= {
                "enable_lora": True,
                "max_loras": 1,
                "max_cpu_loras": 2,
                "max_lora_rank": max_lora_rank(lora_rank, directory, dtype),
            }
        import_model(directory)
        contexts = contextlib.ExitStack()
        # in the run's directory
        self._directory = contexts.enter_context(scratch.directory(Path(os.environ[CACHES[0]]) / "tries"))
        weakref.finalize(self, contexts.close)  # when the process ends, at the latest
        model = backend_of(backend).build(directory, head="lm")
        self.names = model.hf_names()
        self.carried = never_sent(model, directory)
        if version < 0 and "quantization_config" in model_files.read_config(directory):
            arguments |= unquantised(directory, self._directory / "model")
        with nothing_outlives_it() if tensor > 1 else contextlib.nullcontext():
            self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.version, self.max_model_len, self.constrained_decoding = version, max_model_len, constrained_decoding
        self.vocab = self.engine.model_config.get_vocab_size()
        self.unusable: str | None = None
        self._asleep, self._weights_follow, self.adapted = set[str](), False, lora_rank is not None
        self._ids, self._queue = itertools.count(), deque[ResponseInProgress]()
        self._running: dict[str, ResponseInProgress] = {}
        self.stepper = Stepper(self)
        self.generate, self.stream = self.stepper.generate, self.stepper.stream
        self._tries: dict[Trie, str] = {}  # each trie's file, for the process that samples
        self._adapted: set[str] | None = None  # the adapter's tensors
        self._adapter: Any = None  # the LoRARequest with which requests are answered

    def add(self, requests: Sequence[Request], streamed: Sequence[bool]) -> list[int]:
        """See SteppingEngine. Raises SyncError after a weight sync that failed."""
        self._raise_if_unusable()
        numbers = [next(self._ids) for _ in requests]
        self._queue += map(ResponseInProgress, numbers, requests, streamed)
        return numbers

    def step(self) -> list[Progress]:
        """See SteppingEngine."""
        try:
            news = self._admit()
            outputs: list[Any] = self.engine.step() if self._running else []
            return news + [self._progress(output) for output in outputs]
        except Exception as error:
            self.unusable = f"it failed while generating: {error!r}"
            raise

    def abort(self, numbers: Sequence[int]) -> None:
        """See SteppingEngine."""
        self._queue = deque(one for one in self._queue if one.number not in numbers)
        if names := [name for name, one in self._running.items() if one.number in numbers]:
            self.engine.abort_request(names)
        for name in names:
            del self._running[name]

    def _admit(self) -> list[Progress]:
        """Submit waiting requests to vLLM, oldest first, as long as they are of the kind that is running: greedy or
        sampled. Returns those that vLLM refuses, with the reason."""
        refused = list[Progress]()
        greedy = next((one.greedy for one in self._running.values()), None)
        while self._queue and greedy in (None, self._queue[0].greedy):
            one = self._queue.popleft()
            try:
                name = self._submit(one.request.context, one.streamed, **self._parameters(one.request))
                self._running[name] = one
                greedy = one.greedy
            except ValueError as error:  # the others continue
                refused.append(Progress(one.number, *NOTHING, error=error))
        return refused

    def _submit(self, tokens: np.ndarray, streamed: bool = False, **parameters: Any) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._wake("weights", "kv_cache")
        sampling = SamplingParams(
            **parameters,
            ignore_eos=True,
            detokenize=False,
            flat_logprobs=True,
            skip_clone=True,
            output_kind=RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY,
        )
        name = str(next(self._ids))
        self.engine.add_request(
            name, {"type": "token", "prompt_token_ids": tokens.tolist()}, sampling, lora_request=self._adapter
        )
        return name

    def _parameters(self, request: Request) -> dict[str, Any]:
        """Return the parameters of a request. Raises ValueError for one that cannot be served."""
        self._raise_if_unusable(request.context)
        sampling, seed = request.sampling, request.seed
        if not (sampling.temperature == 0 or 0.01 <= sampling.temperature <= 2):
            # below 0.01, vLLM would sample at 0.01
            raise ValueError(f"vLLM samples at a temperature of 0 or 0.01…2, not {sampling.temperature}")
        if request.offset:  # the later parts of a response cannot go on with its draws
            seed = int(np.random.SeedSequence([seed, request.offset]).generate_state(1, np.uint32)[0])
        return {
            "temperature": sampling.temperature,
            "stop_token_ids": list(sampling.stop),
            "logprobs": 0,
            "seed": seed if sampling.temperature else None,
            "max_tokens": min(sampling.max_new_tokens, self.max_model_len - len(request.context)),
            "top_p": sampling.top_p if sampling.temperature else 1.0,
            **self._trie_parameters(sampling.trie),
        }

    def _trie_parameters(self, trie: Trie | None) -> dict[str, Any]:
        if trie is None:
            return {}
        if not self.constrained_decoding:
            raise ValueError(
                "this engine was started without rollout.constrained_decoding, so it cannot restrict responses"
            )
        if trie not in self._tries:
            self._tries[trie] = str(self._directory / f"{len(self._tries)}.npz")
            trie.save(self._tries[trie])
        return {"extra_args": {TRIE: self._tries[trie]}}

    def _progress(self, output: Any) -> Progress:
        """Return what vLLM reports about a request: its new tokens, of one that is not streamed all of them."""
        one, (completion,) = self._running[output.request_id], output.outputs
        sampled, logprobs = completion.token_ids, completion.logprobs.logprobs
        if len(logprobs) != len(sampled):
            raise RuntimeError(f"vLLM returned {len(sampled)} tokens and {len(logprobs)} log-probs of a request")
        one.sampled += sampled
        one.logprobs += logprobs
        news = Progress(one.number, np.array(sampled, np.int32), np.array(logprobs, np.float32))
        if not output.finished:
            return news
        if completion.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a request with {completion.finish_reason!r}")
        del self._running[output.request_id]
        return replace(news, generation=one.generation(self.version))

    def prompt_logprobs(self, tokens: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See RolloutEngine."""
        self._raise_if_unusable(*tokens)
        # one at a time: vLLM looks up the head's adapter once for each request, not for each token of the prompts
        with self.stepper.exclusively("compute prompt log-probs"):
            groups = [[context] for context in tokens] if self._adapter else [tokens]
            return [logprobs for group in groups for logprobs in self._prompt_logprobs(group)]

    def _prompt_logprobs(self, tokens: Sequence[np.ndarray]) -> list[np.ndarray]:
        names = [self._submit(context, temperature=0.0, max_tokens=1, prompt_logprobs=0) for context in tokens]
        logprobs: dict[str, np.ndarray] = {}
        while self.engine.has_unfinished_requests():
            outputs: list[Any] = self.engine.step()
            logprobs |= {one.request_id: np.array(one.prompt_logprobs.logprobs, np.float32) for one in outputs}
        return [logprobs[name] for name in names]

    def load_weights(self, buckets: Buckets, manifest: Manifest) -> Receipt:
        """See RolloutEngine."""
        with self.stepper.exclusively("load weights"):
            receipt = check(buckets, manifest, self.version)
            sent = manifest.digests.keys()
            if different := sent ^ (self.names if manifest.adapter is None else self._adapted or sent):
                raise SyncError(
                    f"weight sync {manifest.version} refused: the model has other tensors than were sent, "
                    f"they differ in {sorted(different)[:5]}"
                )
            self.unusable = f"weight sync {manifest.version} did not complete"
            try:
                if manifest.adapter is None:
                    self.engine.collective_rpc("ptf_load", args=(buckets,))
                else:
                    self._adapt(buckets, manifest)
            except Exception as error:
                self.unusable = f"weight sync {manifest.version} failed half way: {error!r}"
                raise SyncError(f"{self.unusable}; this engine cannot be used any more, start a new one") from error
            self._forget_prefixes()
            self.version, self.unusable, self._weights_follow = manifest.version, None, False
            return receipt

    def _adapt(self, buckets: Buckets, manifest: Manifest) -> None:
        """Replace the adapter beside the base model; vLLM reads it from a directory and identifies it by a number."""
        from vllm.lora.request import LoRARequest

        directory, previous = self._directory / "adapter", self._adapter
        save((pair for bucket in buckets for pair in bucket), manifest.adapter or {}, directory, writes=True)
        self._adapter = LoRARequest(f"version {manifest.version}", manifest.version + 1, str(directory))
        self._adapted = set(manifest.digests)
        if not self.engine.add_lora(self._adapter) or (previous and not self.engine.remove_lora(previous.lora_int_id)):
            raise RuntimeError("vLLM did not take the adapter")

    def sleep(self) -> None:
        """See RolloutEngine."""
        with self.stepper.exclusively("sleep"):
            if on_cpu():
                return
            self._forget_prefixes()
            # Level 1 keeps the weights in host memory; level 2 discards them, where a sync replaces all of them before
            # they are used again. An adapter replaces none, and tensors beside the language model are never sent.
            level = 2 if self._weights_follow and not self.adapted and not self.carried else 1
            self.engine.sleep(level=level)
            self._asleep = {"weights", "kv_cache"}
            if level == 2:
                self.unusable = "it discarded its weights when it slept, and no new ones have come"

    def expect_weights(self) -> None:
        """Note that new weights come before anything else is generated, so that `sleep` need not keep these."""
        self._weights_follow = True

    def wake(self) -> None:
        """Load the weights; the cache follows with the first request, because the policy, which sends new weights, may
        still use the device until then."""
        self._wake("weights")

    def _wake(self, *what: str) -> None:
        if waking := [one for one in what if one in self._asleep]:
            self.engine.wake_up(waking)
            self._asleep.difference_update(waking)

    def _forget_prefixes(self) -> None:
        if not self.engine.reset_prefix_cache():
            raise SyncError("vLLM did not drop its cached prefixes, which belong to the previous weights")

    def _raise_if_unusable(self, *contexts: np.ndarray) -> None:
        """Raise SyncError if the engine generates nothing, ValueError if a context cannot be served."""
        if self.unusable:
            raise SyncError(f"this engine generates nothing: {self.unusable}")
        limit = self.max_model_len - 1  # vLLM gives log-probs only if it may add a token
        for tokens in contexts:
            if not 1 <= len(tokens) <= limit:
                raise ValueError(
                    f"{len(tokens)} tokens cannot be served: between 1 and {limit} fit max_model_len "
                    f"{self.max_model_len}"
                )
            if tokens.min() < 0 or tokens.max() >= self.vocab:
                raise ValueError(f"token ids must be in 0…{self.vocab - 1}; found {tokens.min()}…{tokens.max()}")


def _model_arguments(directory: Path, seed: int, dtype: str, max_model_len: int) -> dict[str, Any]:
    """Return the arguments of vLLM that name the model, and those that are always the same."""
    config = model_files.read_config(directory)
    overrides = hf_overrides(config)
    if model_files.unties(directory):
        untied = {"tie_word_embeddings": False}
        text = {"text_config": overrides.get("text_config", {}) | untied} if "text_config" in config else {}
        overrides |= untied | text
    return {
        "model": str(directory),
        "seed": seed,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "trust_remote_code": False,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": "ptf.rl.engines.vllm_extension.WeightLoader",
        # prompts are texts: of a multimodal model, only its language model is used
        **({"language_model_only": True} if {"text_config", "vision_config"} & config.keys() else {}),
        **({"hf_overrides": overrides} if overrides else {}),
    }


def _device_arguments(directory: Path, max_model_len: int, cpu_kv_cache_gib: float, gpu_share: float) -> dict[str, Any]:
    """Return the engine arguments that differ between a CPU and a GPU."""
    if not on_cpu():
        return {"gpu_memory_utilization": gpu_share, "enable_sleep_mode": True}
    config = model_files.read_config(directory)
    # layers that keep a state in place of keys and values
    has_states = "linear_num_value_heads" in (config.get("text_config") or config)
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": int(cpu_kv_cache_gib * 2**30),
        "max_num_seqs": 512,
        # seeds have no effect where a prompt is divided
        "max_num_batched_tokens": max(16384, max_model_len),
        "enable_chunked_prefill": False,
        # its blocks have 128 tokens; it costs 10% of the time of short requests
        "enable_prefix_caching": max_model_len >= 256,
        # the CPU build's kernel rotates wrongly, or ends the process, where only a part of a head is rotated
        **({"compilation_config": {"custom_ops": ["-rotary_embedding"]}} if rotates_in_part(config) else {}),
        # states in fp32, as in ptf's decoder, and as the kernels on a CPU need them
        **({"mamba_ssm_cache_dtype": "float32"} if has_states else {}),
    }


def max_lora_rank(rank: int, directory: Path, dtype: str) -> int:
    """Return the adapter rank for which vLLM reserves memory. Raises UserError for adapters that it cannot serve."""
    config = model_files.read_config(directory)
    experts = any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    if experts:
        rank *= 2  # where gate and up share an adapter (ptf.model.peft_format)
    faults = {
        f"adapters of rank {rank}; its largest is {LORA_RANKS[-1]}": rank > LORA_RANKS[-1],
        "adapters of fp32 on a GPU": not on_cpu() and dtype == "float32",
        "adapters of experts on a CPU": on_cpu() and experts,
    }
    if found := [fault for fault, present in faults.items() if present]:
        raise UserError(f"rollout.lora_sync: vllm cannot serve {found[0]}; use merged")
    return next(supported for supported in LORA_RANKS if supported >= rank)


def never_sent(model: Model, directory: Path) -> set[str]:
    """Return the tensors that vLLM loads and no sync replaces, such as those of a vision tower."""
    with TensorFiles(directory, model.aliases) as files:
        return {name for name in model.carried_names(files) if not name.endswith("rotary_emb.inv_freq")}


def import_model(directory: Path) -> None:
    """Import the model's class in this process.

    Otherwise vLLM first inspects it in another process, which takes 7 s for every new cache directory.
    """
    from vllm import ModelRegistry

    for architecture in json.loads((directory / "config.json").read_text())["architectures"]:
        if architecture in ModelRegistry.models:
            ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def unquantised(directory: Path, without: Path) -> dict[str, Any]:
    """Return vLLM's arguments for a quantised checkpoint whose weights are replaced before anything is generated.

    A policy sends values and not packed blocks, which a quantised layer could not take. The model is made by a copy of
    config.json without the quantisation, in the directory `without`, and with random weights.
    """
    without.mkdir(parents=True)
    kept = {key: value for key, value in model_files.read_config(directory).items() if key != "quantization_config"}
    (without / "config.json").write_text(json.dumps(kept))
    return {"model": str(without), "load_format": "dummy"}
