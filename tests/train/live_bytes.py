"""The most bytes that a training step holds at once, counted by storage on fake tensors: any size and number of ranks.

It shares no code with the plan of `ptf.train.budget`: the real Trainer runs the real model under FSDP, and every
storage that an operation makes is counted until it is freed or resized. What a GPU does otherwise than this CPU is put
in its place: attention that keeps what a fused kernel keeps, the chunks of its head, and norms, gates and rotary
embeddings that torch.compile traces and divides between the passes as it does on a GPU.
"""

import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.published_shapes import write_config
from ptf.compute.world import World
from ptf.config import Job
from ptf.data.batch import Batch
from ptf.data.document import Document, PackUnit
from ptf.data.packing import pack_all
from ptf.meshes import Meshes
from ptf.model import bridge, chunked, decoder, loss_workspace, moe, recompute
from ptf.model.kernels import attention
from ptf.model.kernels.choice import Kernels
from ptf.model.layers import LayerFactory
from ptf.model.sharding import parallelize
from ptf.recipes import registry
from ptf.train.components import layer_factory_of
from ptf.train.model_source import needs_weights
from ptf.train.trainable import freeze, frozen_dtype, hold_frozen
from ptf.train.trainer import Trainer
from tests.gpu_rehearsal.host_syncs import HostSyncs
from tests.gpu_rehearsal.step import fused_attention


def inductor_backend(run: Callable[..., Any] | None = None) -> Any:
    """Return a backend of torch.compile whose graphs are those of Inductor, forward and backward, and run as they are,
    by `run(graph, *inputs)`."""

    def compiler(graph: Any, inputs: Any) -> Any:
        return make_boxed_func(graph if run is None else partial(run, graph))

    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that exist: `now`, and the most at once, `peak`."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.in_kernel = False
        self.sizes: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def see(self, tensor: Any) -> None:
        """Count the storage of a tensor, or of its shard."""
        storage = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()
        key = id(storage)
        if key not in self.sizes or self.sizes[key][0]() is not storage:
            self.sizes[key] = weakref.ref(storage, lambda _, key=key: self.forget(key)), 0
        self.resize(key, storage.nbytes())

    def resize(self, key: int, size: int) -> None:
        """Set the size of a storage that is counted."""
        ref, before = self.sizes[key]
        self.sizes[key] = ref, size
        self.now += size - before
        self.peak = max(self.peak, self.now)

    def forget(self, key: int) -> None:
        """Count a storage no longer: it was freed."""
        self.now -= self.sizes.pop(key)[1]

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let torch.compile work inside this mode."""
        return True

    def kernel(self, graph: Any, *inputs: Any) -> Any:
        """Run a compiled graph as one kernel, and count what it returns, but nothing in between."""
        self.in_kernel = True
        try:
            out = graph(*inputs)
        finally:
            self.in_kernel = False
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        return out

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in a block; FSDP resizes storages, which no operation does."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            key = id(storage)
            if key in self.sizes and self.sizes[key][0]() is storage:
                self.resize(key, size)
            return result

        with pytest.MonkeyPatch.context() as patch, self:
            patch.setattr(torch.UntypedStorage, "resize_", resize_)
            yield

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in () if self.in_kernel else tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        return out


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Give the model the attention and the head's chunks of a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_compiled_flex", lambda: fused_attention)
        # on a GPU the host's copy is elsewhere: here it is nowhere
        patch.setattr(recompute, "to_host", lambda x: partial(torch.empty, x.shape, dtype=x.dtype))
        patch.setattr(decoder, "inside_documents", lambda s, p, v=None: attention.Flex(s, p))
        patch.setattr(chunked, "CHUNK_BYTES", chunked.CUDA_CHUNK_BYTES)
        patch.setattr(chunked, "logit_bytes", lambda head: 4)
        patch.setattr(chunked, "rows_of_a_block", lambda columns: 1 << 40)  # a chunk is one block
        # a CPU pads the rows of experts, whose number it must know
        patch.setattr(moe, "_filled_up", lambda x, ends, expert: (x, ends, expert, None))
        patch.setattr(loss_workspace, "BLOCK_BYTES", loss_workspace.CUDA_BLOCK_BYTES)
        yield


def peak_of_a_step(job: Job, directory: Path, ranks: int) -> int:
    """Return the most bytes that rank 0 holds in the second step of a job whose sequences are one document each."""
    config, recipe = job.train, registry.build(job)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        meshes = Meshes.of("cpu", job.compute.mesh.sizes(ranks))
        with as_on_a_gpu(), FakeTensorMode(allow_non_fake_inputs=True):
            live = LiveBytes()

            def kernels() -> Kernels:
                backend = inductor_backend(live.kernel)
                compiler = partial(torch.compile, dynamic=True, backend=backend)
                return Kernels() if config.compile is False else Kernels().compile(compiler)

            torch._dynamo.reset()
            factory = layer_factory_of(job.model, adapted=True, kernels=kernels())
            model = bridge.build(directory, head=recipe.head, factory=factory)
            freeze(model, job.model.trainable)
            hold_frozen(model, frozen_dtype(directory, config.precision, exported=True))
            parallelize(model, meshes, config.precision, recomputed=config.activation_checkpointing)
            model.to_empty(device=torch.device("cpu"))
            frozen_models = {
                role: _frozen(directory, meshes, config.precision, kernels()) if needs_weights(of, job.model) else model
                for role, of in recipe.frozen_models.items()
            }
            trainer = Trainer(model, World(0, meshes), config, frozen_models)
            units = _units(job)
            passes = config.global_batch_sequences // meshes.sizes.data // config.micro_batch_sequences
            batches = [Batch.of(pack_all(units, job.data.seq_len), job.data.seq_len) for _ in range(passes)]
            held = [model, *frozen_models.values()]
            for tensor in (t for m in held for t in (*m.parameters(), *m.buffers())):
                live.see(tensor)
            with HostSyncs(), live.counting():
                trainer.step(batches[:1], recipe, 0)
                live.peak = live.now
                trainer.step(batches, recipe, 1)
    finally:
        dist.destroy_process_group()
    return live.peak


def _units(job: Job) -> list[PackUnit]:
    """Return as many units as a pass has sequences, each of which fills one and is trained whole, as planned."""
    each = 2 if job.recipe in ("dpo", "rm") else 1
    length = job.data.seq_len // each
    whole = [Document(np.ones(length, np.int32), np.ones(length, np.float32)) for _ in range(each)]
    return [tuple(whole)] * job.train.micro_batch_sequences


def _frozen(directory: Path, meshes: Meshes, precision: str, kernels: Kernels) -> Any:
    model = bridge.build(directory, factory=LayerFactory(kernels=kernels))
    model.requires_grad_(False)
    hold_frozen(model, frozen_dtype(directory, precision, exported=False))
    parallelize(model, meshes, precision)
    return model.to_empty(device=torch.device("cpu"))


@contextmanager
def published(shape: str, **changes: Any) -> Iterator[Path]:
    """Give a directory with the config.json of a published model, with these changes."""
    with tempfile.TemporaryDirectory() as directory:
        yield write_config(shape, Path(directory), **changes)


def raw_job(directory: Path, ranks: int, *, seq_len: int, sequences: int, **sections: Mapping[str, Any]) -> dict:
    """Return a job of two passes a step, with `sequences` a pass."""
    train = {
        "steps": 1,
        "lr": 1e-5,
        "precision": "bf16",
        "global_batch_sequences": 2 * ranks * sequences,
        "micro_batch_sequences": sequences,
    }
    return {
        "recipe": "sft",
        "output": "runs",
        "data": {"seq_len": seq_len, "partitions": ranks, "sources": {"a": {"path": "a.jsonl"}}},
        **sections,
        "compute": {"workers": ranks, **sections.get("compute", {})},
        "model": {"path": str(directory), **sections.get("model", {})},
        "train": {**train, **sections.get("train", {})},
    }
