"""A training step of a model on the pretend GPU: the real Trainer and recipes, at published sizes, in bf16."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.published_shapes import write_config
from ptf.compute.world import World
from ptf.config.sections.compute import MeshSizes
from ptf.config.sections.train import TrainConfig
from ptf.data.batch import Batch
from ptf.data.document import Document, PackUnit
from ptf.data.packing import pack_all
from ptf.model import bridge
from ptf.model.decoder import Decoder
from ptf.model.kernels import attention
from ptf.model.kernels.choice import Kernels
from ptf.model.kernels.document_mask import DocumentMasks
from ptf.model.layers import LayerFactory
from ptf.model.recompute import Recompute
from ptf.model.sharding import parallelize
from ptf.recipes.dpo.recipe import DPO
from ptf.recipes.grpo.recipe import GRPO
from ptf.recipes.kd.config import TeacherConfig
from ptf.recipes.kd.recipe import KD
from ptf.recipes.protocol import Recipe
from ptf.recipes.rm.recipe import RM
from ptf.recipes.sft.recipe import SFT
from ptf.train.budget import fake_meshes
from ptf.train.trainer import Trainer
from ptf.train.warm_up import warm_up
from tests.gpu_rehearsal.host_syncs import HostSyncs, UnorderedSums
from tests.recipes.of_keys import of_keys
from tests.tiny import sample

GPU = torch.device("cuda", 0)
SEQ_LEN = 2048
SEARCH = "_compute_coordinate_on_dim"


def rollout(length: int, seed: int) -> Document:
    """An answer with the columns that GRPO reads."""
    s = sample(length, seed)
    columns = {name: s.loss_weights * 0.5 for name in ("advantages", "rollout_logprobs", "old_logprobs")}
    return Document(s.tokens, s.loss_weights, s.source, columns)


def micro(recipe: Recipe) -> list[Batch]:
    """Two micro-batches of a packed sequence of documents, or of pairs."""
    make = rollout if isinstance(recipe, GRPO) else sample
    lengths = [300, 180, 700, 90, 410, 220]
    samples = [make(n, i) for i, n in enumerate(lengths)]
    units: list[PackUnit] = [(s,) for s in samples]
    if isinstance(recipe, DPO | RM):
        units = [tuple(samples[i : i + 2]) for i in range(0, len(samples), 2)]
    sequences = pack_all(units, SEQ_LEN)
    return [Batch.of([sequence], SEQ_LEN) for sequence in sequences for _ in range(2)]


RECIPES: Mapping[str, Recipe] = {
    "sft": of_keys(SFT),
    "dpo": of_keys(DPO),
    "rm": of_keys(RM),
    "kd": of_keys(KD, teachers={"teacher": TeacherConfig(path="-")}),
    "grpo": of_keys(GRPO),
    "grpo, old log-probs": of_keys(GRPO, update_epochs=2),
}


class FusedAttention(torch.autograd.Function):
    """What a fused kernel does as far as the host and the memory see it; there is no Triton here to make one."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: object, scale: float) -> tuple[Tensor, Tensor]:
    """Stand in for the compiled FlexAttention."""
    result: Any = FusedAttention.apply(q, k, v)
    return result


def loss_kernel(logits: Tensor, targets: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Stand in for the compiled loss of a chunk, which makes nothing of the size of its logits."""
    return logits.new_empty(len(logits))


def built(shape: str, head: Any = "lm", layers: int = 2) -> Decoder:
    """A model of a published shape with few layers, without memory."""
    with tempfile.TemporaryDirectory() as directory:
        factory = LayerFactory(kernels=Kernels(loss_of_rows=loss_kernel))
        return bridge.build(write_config(shape, Path(directory), num_hidden_layers=layers), head=head, factory=factory)


def decoder(shape: str, head: Any = "lm") -> Decoder:
    """A model of a published shape with few layers, in bf16, without values."""
    model = built(shape, head)
    for module in model.modules():
        for key, old in module._parameters.items():
            if old is not None:
                new = torch.empty(old.shape, device=GPU, dtype=torch.bfloat16)
                module._parameters[key] = torch.nn.Parameter(new, old.requires_grad)
    if model.config.tied:
        model.head._parameters["weight"] = model.embed._parameters["weight"]
    return model


def trainer_of(shape: str, recipe: Recipe) -> tuple[Trainer, World]:
    """The real Trainer of a model of this shape, beside the frozen models that the recipe needs."""
    frozen_models = {role: decoder(shape, "lm").requires_grad_(False) for role in recipe.frozen_models}
    world = World(device=GPU)
    return Trainer(decoder(shape, recipe.head), world, TrainConfig(steps=1, lr=1e-3), frozen_models), world


def variants(shape: str, name: str) -> list[list[str]]:
    """The kinds of calls of FlexAttention that a run's warm-up makes, and those of a step and a validation after it."""
    recipe, kinds, windows = RECIPES[name], set[str](), dict[int, int | None]()
    made = DocumentMasks.mask

    def noted(self: DocumentMasks, window: int | None) -> object:
        mask = made(self, window)
        windows[id(mask)] = window
        return mask

    def recorded(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> tuple[Tensor, Tensor]:
        grads = [torch.is_grad_enabled() and t.requires_grad for t in (q, k, v)]
        strides, window = [t.stride() for t in (q, k, v)], windows[id(mask)]
        kinds.add(f"{tuple(q.shape)} {strides} {q.dtype} {grads} {mask.shape} {window} {scale}")
        return fused_attention(q, k, v, mask, scale)

    with FakeTensorMode(allow_non_fake_inputs=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_compiled_flex", lambda: recorded)
        patch.setattr(DocumentMasks, "mask", noted)
        trainer, world = trainer_of(shape, recipe)
        model, frozen_models = trainer.model, trainer.frozen_models
        warm_up(model, world, SEQ_LEN, trained={1}, scored={1})
        for frozen_model in frozen_models.values():
            warm_up(frozen_model, world, SEQ_LEN, scored={1})
        assert all(parameter.grad is None for parameter in model.parameters())
        warmed = sorted(kinds)
        kinds.clear()
        batches = micro(recipe)
        with HostSyncs():
            trainer.step(batches, recipe, 0)
        with torch.no_grad():
            recipe.loss(model, batches[0].to(GPU), frozen_models)
    return [warmed, sorted(kinds)]


def on_ranks(sizes: MeshSizes, recomputed: Recompute) -> tuple[dict[str, int], dict[str, int]]:
    """How often a step of Qwen3-0.6B waits for the GPU on the first of these ranks, and its sums in no fixed order."""
    attention._compiled_flex = lambda: fused_attention
    recipe = RECIPES["sft"]
    with (
        fake_meshes(sizes, GPU.type) as meshes,
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.MonkeyPatch.context() as patch,
    ):
        # a mesh looks for its rank among numbers of the host, which are no fake ones
        patch.setattr(DeviceMesh, SEARCH, unset_fake_temporarily()(getattr(DeviceMesh, SEARCH)))
        model = parallelize(built("Qwen3-0.6B"), meshes, "bf16", recomputed=recomputed)
        model.to_empty(device=GPU)
        trainer = Trainer(model, World(meshes=meshes, device=GPU), TrainConfig(steps=1, lr=1e-3))
        with HostSyncs() as syncs, UnorderedSums() as sums:
            trainer.step(micro(recipe), recipe, 0)
    return dict(+syncs.counts), dict(sums.counts)


def host_syncs(shape: str, name: str) -> dict[str, int]:
    """How often a step of this recipe waits for the GPU, by operation."""
    recipe = RECIPES[name]
    attention._compiled_flex = lambda: fused_attention
    with FakeTensorMode(allow_non_fake_inputs=True):
        trainer, _ = trainer_of(shape, recipe)
        with HostSyncs() as syncs:
            trainer.step(micro(recipe), recipe, 0)
    return dict(+syncs.counts)
