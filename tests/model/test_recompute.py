"""Activation checkpointing: how often attention runs, what stays the same, and what is freed."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.utils._python_dispatch import TorchDispatchMode

from ptf.meshes import Meshes
from ptf.model import recompute as recompute_module
from ptf.model.activation_memory import CountedAttend, _attended
from ptf.model.decoder import Decoder
from ptf.model.kernels import attention
from ptf.model.kernels.attention import Flex, PerDocument
from ptf.model.layers import LayerFactory
from ptf.model.lora import Lora
from ptf.model.recompute import SAVED, Recompute
from ptf.model.rope import rotary
from ptf.model.sharding import parallelize
from tests.model.test_attention import model_of
from tests.tiny import packed

MODES: list[Recompute] = ["none", "block", "offload", "selective"]
FAMILIES = ["qwen3", "gpt_oss"]
never_run = cache(model_of.__wrapped__)  # models to copy; the routing that a forward pass leaves cannot be copied


class Counting:
    """A function, and how often it was called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.function(*args)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """What FlexAttention computes; torch has no backward of that on a CPU."""
    rows, heads, width, _ = q.shape
    seen = create_mask(mask.mask_mod, rows, 1, width, width, device="cpu")
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.transpose(-2, -1) * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def gradients(model_type: str, mode: Recompute, attend: Callable[..., Any], frozen: bool = False) -> list[Tensor]:
    model = parallelize(deepcopy(never_run(model_type)), Meshes(), "fp32", recomputed=mode)
    for name, p in model.named_parameters():
        p.requires_grad_(p.is_floating_point() and (not frozen or "mlp_norm" in name))
    batch = packed([[10, 20, 18], [30, 1]], 48)
    tokens = batch.tokens % model.config.vocab
    logits = model(tokens, batch.positions, batch.segments, lambda x, head: head.logits(x), attend)
    return list(torch.autograd.grad(logits.square().mean(), [p for p in model.parameters() if p.requires_grad]))


def made_of(kind: type[Flex] | type[PerDocument]) -> Any:
    batch = packed([[10, 20, 18], [30, 1]], 48)
    return kind(batch.segments, batch.positions)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("kind", [Flex, PerDocument])
def test_attention_runs_once_unless_the_whole_block_is_recomputed(model_type, kind, monkeypatch) -> None:
    flex = Counting(dense)
    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex)
    found = {}
    for mode in MODES:
        flex.calls, attend = 0, Counting(made_of(kind))
        found[mode] = gradients(model_type, mode, attend)
        layers = len(model_of(model_type).config.layers)
        assert attend.calls == (2 if mode in ("block", "offload") else 1) * layers
        assert flex.calls == (attend.calls if kind is Flex else 0)
    for mode in MODES[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found["none"], found[mode], strict=True))


def test_inputs_of_layers_that_are_offloaded_stay_nowhere_else() -> None:
    alive = {}
    for mode in ("block", "offload"):
        model = parallelize(deepcopy(never_run("qwen3")), Meshes(), "fp32", recomputed=mode)
        inputs: list[weakref.ref[Any]] = []
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda _, args, seen=inputs: seen.append(weakref.ref(args[0])))
        batch = packed([[10, 20, 18], [30, 1]], 48)
        tokens = batch.tokens % model.config.vocab
        out = model(tokens, batch.positions, batch.segments, lambda x, head: head.logits(x), made_of(PerDocument))
        gc.collect()
        alive[mode] = [ref() is not None for ref in inputs]
        out.sum().backward()
    assert not any(alive["offload"])
    assert all(alive["block"]), "negative control: autograd holds them"


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_block_whose_attention_does_not_train_is_recomputed_too(mode) -> None:
    plain, again = (gradients("qwen3", m, made_of(PerDocument), frozen=True) for m in ("none", mode))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


class Keeping(Function):
    """Attention that saves its output; whoever has its context can see whether that is alive."""

    contexts: list[weakref.ref[Any]] = []

    @staticmethod
    def forward(ctx: Any, q: Tensor) -> Tensor:
        out = q.clone()
        ctx.save_for_backward(out)
        Keeping.contexts.append(weakref.ref(ctx))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.saved_tensors[0]


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "deepseek_v3"])
def test_recomputation_gives_the_same_bits_with_linear_and_latent_attention(model_type, mode) -> None:
    plain, again = (gradients(model_type, how, made_of(PerDocument)) for how in ("none", mode))
    assert all(map(torch.equal, plain, again))


def test_what_is_kept_goes_with_the_graph() -> None:
    def step() -> None:
        gradients("qwen3", "selective", lambda layer, q, k, v: Keeping.apply(q) + k.mean() + v.mean())

    step()  # what torch does only once
    gc.collect()
    gc.disable()
    Keeping.contexts.clear()
    try:
        step()
        assert [ref() for ref in Keeping.contexts] == [None] * len(model_of("qwen3").config.layers)
    finally:
        gc.enable()


class Products(TorchDispatchMode):
    """The storages that matrix products put out."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[int, Tensor] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function in SAVED:
            self.outputs[out.untyped_storage()._cdata] = out
        return out


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("adapted", [False, True])
def test_the_plan_counts_what_attention_keeps_beside_products(model_type, adapted) -> None:
    config, tokens = model_of(model_type).config, 32
    attn = Decoder(config, LayerFactory(lora=Lora(rank=4) if adapted else None)).layers[0].attn
    kept: dict[int, Tensor] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage()._cdata] = t
        return t

    def attend(*inputs: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            return CountedAttend(0)(*inputs)

    with Products() as products:
        attn(
            torch.randn(1, tokens, config.dim),
            rotary(torch.arange(tokens)[None], config.head_dim, config.layers[0].rope),
            attend,
        )
    found = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in products.outputs)
    assert _attended(attn, config, 4) == found / tokens


def test_a_copy_to_the_host_waits_for_what_computes_and_the_way_back_for_the_copy(monkeypatch) -> None:
    """The order of a GPU's calls, on a pretended one."""
    called: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            called.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: str) -> None:
            called.append(f"{self.name} waits for {event}")

        def record_event(self) -> str:
            return "the copy"

    class Pinned:
        def copy_(self, x: object, non_blocking: bool) -> None:
            called.append(f"copied on {on[-1]}, non_blocking={non_blocking}")

        def to(self, device: object, non_blocking: bool) -> str:
            called.append("copied back")
            return "x"

    @contextlib.contextmanager
    def stream(of: Stream):
        on.append(of.name)
        yield
        on.pop()

    on, copies, computing = ["computing"], Stream("copies"), Stream("computing")
    monkeypatch.setattr(recompute_module, "_copies", lambda device: copies)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: Pinned())
    x = SimpleNamespace(
        device=SimpleNamespace(type="cuda"),
        shape=(2,),
        dtype=torch.float32,
        detach=lambda: None,
        record_stream=lambda of: called.append(f"kept for {of.name}"),
    )
    back = recompute_module.to_host(x)  # type: ignore[arg-type]
    assert called == ["copies waits for computing", "copied on copies, non_blocking=True", "kept for copies"]
    called.clear()
    assert back() == "x"
    assert called == ["computing waits for the copy", "copied back"]
