"""What a rollout engine is started with, and the start of the one that `rollout.engine` names."""

from dataclasses import dataclass

import torch

from ptf.compute.offload import own_file
from ptf.compute.world import World
from ptf.config import Plugin, plugin
from ptf.config.backends import BACKENDS
from ptf.config.sections.model import ModelConfig
from ptf.errors import UserError
from ptf.rl.engines.protocol import RolloutEngine
from ptf.train.components import layer_factory_of

WIDTH = {"fp32": 4, "bf16": 2}  # bytes of a weight, by the precision of the engine


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What an engine is started with; each engine takes what it has a use for."""

    kind: str | Plugin  # as in `rollout.engine`
    directory: str
    version: int  # of the weights in the directory
    seed: int
    precision: str
    max_length: int  # tokens of a context with its response
    model: ModelConfig | None = None  # None: without components and adapters
    adapter: bool = False  # whether the policy sends its adapter alone
    continuous: bool = False  # whether the native engine takes requests at any time, and not in batches
    constrained_decoding: bool = False
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.7
    cpu_kv_cache_gib: float = 0.25
    offload_path: str | None = None

    def start(self, world: World) -> RolloutEngine:
        """Start the engine with the weights of the directory. Raises UserError if a plugin lacks a method."""
        dtype = "bfloat16" if self.precision == "bf16" else "float32"
        if isinstance(self.kind, Plugin):
            made = plugin.bind(self.kind)(
                self.directory,
                device=str(world.device),
                dtype=dtype,
                version=self.version,
                seed=self.seed,
                max_length=self.max_length,
            )
            if not hasattr(made, "prompt_logprobs"):
                raise UserError(f"the rollout engine {self.kind.use} has no method `prompt_logprobs(tokens)`")
            return made
        if self.kind == "native":
            from ptf.rl.engines.native import PREFILL_TOKENS

            return plugin.resolve(BACKENDS[self.model.backend if self.model else "ptf"].engine)(
                self.directory,
                device=world.device,
                dtype=getattr(torch, dtype),
                version=self.version,
                factory=layer_factory_of(self.model, adapted=self.adapter) if self.model else None,
                seed=self.seed,
                offload_file=own_file(self.offload_path, world.rank),
                continuous=self.continuous,
                prefill_tokens=max(PREFILL_TOKENS, self.max_length) if world.device.type == "cuda" else None,
            )
        from ptf.rl.engines.vllm_engine import VLLMEngine

        return VLLMEngine(
            self.directory,
            seed=self.seed,
            dtype=dtype,
            max_model_len=self.max_length,
            version=self.version,
            cpu_kv_cache_gib=self.cpu_kv_cache_gib,
            gpu_share=self.gpu_memory_utilization,
            lora_rank=self.model.lora.rank if self.adapter and self.model and self.model.lora else None,
            constrained_decoding=self.constrained_decoding,
            tensor=self.tensor_parallel_size,
            backend=self.model.backend if self.model else "ptf",
        )
