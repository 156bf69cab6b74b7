"""A whole model with ptf's kernels for CPUs: the same as with PyTorch's functions, under recomputation too."""

from copy import deepcopy
from functools import cache

import pytest
import torch
from torch import Tensor

from ptf.model.chunked import cross_entropy
from ptf.model.cpu_kernels import layers
from ptf.model.cpu_kernels.library import library
from ptf.model.decoder import Decoder
from ptf.model.fused import attention_of, kernels
from ptf.model.sharding import parallelize
from tests.model.published import SIZES
from tests.model.test_attention import model_from, model_of
from tests.tiny import packed

CPU = torch.device("cpu")
never_run = cache(model_of.__wrapped__)  # models to copy; the routing that a forward pass leaves cannot be copied
FAMILIES = ["qwen3", "llama", "gpt_oss", "gemma2", "glm4_moe", "deepseek_v3", "qwen3_next"]


def gradients(model: Decoder, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The loss, and the gradient of every parameter."""
    batch = packed([[40, 17], [57]], 60)
    model = model.to(dtype)
    loss = model(
        batch.tokens % model.config.vocab,
        batch.positions,
        batch.segments,
        lambda x, head: cross_entropy(x, head, batch.targets % model.config.vocab, batch.loss_weights),
    )
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def made(name: str, **settings) -> Decoder:
    return parallelize(deepcopy(never_run(name)), None, "fp32", **settings)


@pytest.mark.parametrize("name", FAMILIES)
def test_losses_and_gradients_are_those_of_pytorch(name) -> None:
    own = gradients(made(name, kernels=kernels("auto", CPU, "fp32")))
    theirs = gradients(made(name))
    assert len(own) == len(theirs)
    same = all(map(torch.equal, own, theirs))
    if name != "gemma2":
        assert not same, "the kernels compute something"
    elif made(name).config.head_dim // 2 % library().width:
        assert same, "soft-capped scores, norms with an offset, GELU and short rotations are all left to PyTorch"
    for mine, other in zip(own, theirs, strict=True):
        assert (mine - other).abs().max() <= 5e-5 * max(float(other.abs().max()), 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["block", "selective", "offload"])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_recomputation_changes_no_bit(name, mode, dtype) -> None:
    found = kernels("auto", CPU, "fp32")
    plain, again = (gradients(made(name, kernels=found, recomputed=kind), dtype) for kind in ("none", mode))
    assert all(map(torch.equal, plain, again))


def test_attention_is_among_what_the_kernels_compute() -> None:
    for name in ("qwen3", "gpt_oss", "qwen3_next"):
        assert attention_of(made(name, kernels=kernels("auto", CPU, "fp32")), CPU).startswith("cpu_kernels (")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_in_a_weight_reaches_the_loss(dtype) -> None:
    for part in ("layers.0.attn.q_proj", "layers.0.attn.v_proj", "layers.0.mlp.up_proj"):
        model = made("qwen3", kernels=kernels("auto", CPU, "fp32"))
        weight = model.get_submodule(part).weight
        assert isinstance(weight, Tensor)
        weight.data[0, 0] = float("nan")
        assert gradients(model, dtype)[0].isnan()


@cache
def wide() -> Decoder:
    """A model to copy, whose projections and head are as wide as products of bf16 need."""
    return model_from({"model_type": "qwen3", **SIZES, "tie_word_embeddings": True})


def test_products_of_bf16_are_as_near_to_fp32_as_those_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    if not library().multiplies_pairs:
        pytest.skip("this CPU has no AVX512-BF16, or multiplies matrices of bf16 (AMX)")
    calls, compute = [], layers.gradient_of_weight
    monkeypatch.setattr(layers, "gradient_of_weight", lambda *given: calls.append(given) or compute(*given))
    found = kernels("auto", CPU, "bf16")
    exact, theirs, own, again = (
        gradients(parallelize(deepcopy(wide()), None, "fp32", **settings), dtype)
        for settings, dtype in (
            ({}, torch.float32),
            ({}, torch.bfloat16),
            ({"kernels": found}, torch.bfloat16),
            ({"kernels": found, "recomputed": "block"}, torch.bfloat16),
        )
    )
    assert len(calls) == 2 * 7 * len(wide().layers), "of every projection"
    assert all(map(torch.equal, own, again)), "recomputation changes no bit"
    assert not all(map(torch.equal, own, theirs))
    far, as_far = (
        sum(float((a.float() - b).square().sum()) for a, b in zip(of, exact, strict=True)) for of in (own, theirs)
    )
    assert far <= 1.5 * as_far
