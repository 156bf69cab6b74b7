"""Kernels of other packages beside ptf's own, where they are installed (`pip install flash-attn-4 liger-kernel`).

The reference is ptf's own function on the CPU in float64. A kernel in bf16 may be as far from it as rounding of the
inputs' products allows (2e-2 of the largest value), and not much further than ptf's own on the same GPU.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ptf.compute.world import World, joined
from ptf.config.sections.model import ModelConfig
from ptf.model.chunked import cross_entropy
from ptf.model.kernels.attention import Flex, PerDocument
from ptf.model.kernels.delta_rule import Chunks, chunked
from ptf.model.kernels.elementwise import gated, gelu_tanh
from ptf.model.kernels.fused import (
    AFTER_BLACKWELL,
    HOPPER,
    Flash,
    Flash4,
    capability,
    fla_rule,
    installed,
    liger_gate,
    packages_of,
    varlen_of,
)
from ptf.train.trainer import load_model
from tests.gpu.test_attention import ROWS, attention
from tests.model.parallel import checkpoint
from tests.tiny import packed

BOUND = 2e-2  # of the largest value, in bf16
GPU = torch.device("cuda")


def needs(package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    assert len(found) == len(expected)
    away = [(a.double().cpu() - b).abs().max() / b.abs().max() for a, b in zip(found, expected, strict=True)]
    return float(torch.stack(away).max())  # NaN if there is one


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("head_dim", [32, 128, 256])
@pytest.mark.parametrize("window", [None, 2, 24])
@pytest.mark.parametrize(("package", "kind"), [("flash_attn", Flash), ("flash_attn_4", Flash4)])
def test_flash_attn_is_attention_per_document(package, kind, window, head_dim, kv_heads):
    if installed(package) is None:
        pytest.skip(f"{package} is not installed")
    if package == "flash_attn_4" and not HOPPER <= capability(GPU) < AFTER_BLACKWELL:
        pytest.skip("this GPU is not one of those that flash_attn_4 trains on")
    batch, layer = packed(ROWS, 256), attention(window, False)
    layer.scale = head_dim**-0.5
    real = (batch.segments >= 0)[..., None, None]
    g = torch.Generator().manual_seed(0)
    upstream = torch.randn(3, 256, 4, head_dim, generator=g).bfloat16() * real
    drawn = [torch.randn(3, 256, n, head_dim, generator=g).bfloat16() for n in (4, kv_heads, kv_heads)]

    def results(attend, device: str, dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (t.to(device, dtype, copy=True).requires_grad_() for t in drawn)
        out = attend(layer, q, k, v)
        assert not out.isnan().any()
        out = out * real.to(device)
        (out * upstream.to(device, dtype)).sum().backward()
        return [out.detach(), *(t.grad for t in (q, k, v) if t.grad is not None)]

    device_batch = batch.to(GPU)
    places = device_batch.segments, device_batch.positions
    expected = results(PerDocument(batch.segments, batch.positions), "cpu", torch.float64)
    flash = results(kind(*places, device_batch.varlen), "cuda", torch.bfloat16)
    flex = results(Flex(*places), "cuda", torch.bfloat16)
    assert worst(flash, expected) <= BOUND
    assert worst(flash, expected) <= 2 * worst(flex, expected) + 2e-3
    again = results(kind(*places, varlen_of(*places)), "cuda", torch.bfloat16)
    assert all(map(torch.equal, again, flash))  # the backward pass, too, is the same to the bit


@pytest.mark.parametrize("activate", [F.silu, gelu_tanh])
def test_ligers_gates_are_ours(activate):
    needs("liger_kernel")
    g = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, 70, 3072, generator=g).bfloat16() for _ in range(3)]

    def results(compute, device: str, dtype: torch.dtype) -> list[Tensor]:
        a, b, upstream = (t.to(device, dtype, copy=True) for t in drawn)
        a.requires_grad_(), b.requires_grad_()
        out = compute(a * 1, b * 1)  # copies, which the backward pass overwrites
        out.backward(upstream)
        return [out.detach(), *(t.grad for t in (a, b) if t.grad is not None)]

    expected = results(partial(gated, activate), "cpu", torch.float64)
    assert worst(results(partial(liger_gate, activate), "cuda", torch.bfloat16), expected) <= BOUND


@pytest.mark.parametrize("rows", [[[100, 28, 1, 127], [256]], [[17, 200], [3, 3, 250]]])
def test_flas_rule_is_ours(rows):
    needs("fla")
    segments = packed(rows, 256).segments
    g, n = torch.Generator().manual_seed(0), segments.numel()
    q, k, v = (torch.randn(n, 4, size, generator=g) for size in (128, 128, 128))
    drawn = [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, -torch.rand(n, 4, generator=g) * 0.2]
    drawn.append(torch.rand(n, 4, generator=g))
    upstream = torch.randn(n, 4, 128, generator=g)
    real = segments.reshape(-1) >= 0

    def results(rule, device: str, dtype: torch.dtype) -> list[Tensor]:
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        values = [t.to(device, dtype if i < 3 else wide).requires_grad_() for i, t in enumerate(drawn)]
        out, states = rule(*values, Chunks.of(segments.to(device), 64))
        kept = out[real.to(device)]
        gradients = torch.autograd.grad((kept * upstream.to(device, kept.dtype)[real.to(device)]).sum(), values)
        return [kept.detach(), states.detach(), *gradients]

    expected = results(chunked, "cpu", torch.float64)
    assert worst(results(fla_rule, "cuda", torch.bfloat16), expected) <= 2 * BOUND


@pytest.mark.parametrize("recomputed", ["none", "block", "selective"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3_text", "qwen3_5_text"])
def test_a_model_learns_the_same_with_what_is_installed(tmp_path: Path, family, recomputed):
    if not packages_of("auto", GPU, "bf16"):
        pytest.skip("neither flash_attn nor liger_kernel is installed")
    directory = checkpoint(tmp_path / "m", family)

    def found(world: World, fused) -> tuple[float, dict[str, Tensor]]:
        model = load_model(
            Path(directory),
            world,
            ModelConfig(path=str(directory)),
            seed=0,
            precision="bf16",
            recomputed=recomputed,
            compiled="auto",
            fused=fused,
        )
        batch = packed(ROWS, 256).to(world.device)
        head_fn = partial(
            cross_entropy, targets=batch.targets, weights=batch.loss_weights, selected=batch.trained_positions
        )
        loss = model(batch.tokens, batch.positions, batch.segments, head_fn, varlen=batch.varlen)
        loss.backward()
        grads = {n: p.grad.full_tensor().float().cpu() for n, p in model.named_parameters() if p.grad is not None}
        return float(loss.detach()), grads

    with joined("cuda", 60) as world:
        ours, theirs = found(world, []), found(world, "auto")
    assert theirs[0] == pytest.approx(ours[0], rel=2e-2)
    away = torch.cat([(theirs[1][n] - g).flatten() for n, g in ours[1].items()]).norm()
    # experts in bf16: rounding sends a token to another expert
    assert away <= (5e-1 if family == "qwen3_moe" else 1e-1) * torch.cat([g.flatten() for g in ours[1].values()]).norm()
