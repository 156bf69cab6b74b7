"""Routing, experts and the load-balancing loss, against transformers and against a plain loop."""

import random

import pytest
import torch
import torch.nn.functional as F

from ptf.model.config import DecoderConfig, Layer, MoE, Rope
from ptf.model.families import family_of
from ptf.model.layers import LayerFactory
from ptf.model.moe import MixtureOfExperts, load_balancing_loss
from ptf.model.reference import random_reference


def mixture(**more: object) -> MixtureOfExperts:
    moe = MoE(**{"experts": 5, "top_k": 2, "intermediate_size": 16, **more})
    rope = Rope(10_000.0)
    config = DecoderConfig(16, 8, 1, 1, 8, 12, 1e-6, 64, True, (Layer(rope, moe=True),), moe=moe)
    layer = MixtureOfExperts(config, LayerFactory(), "moe")
    g = torch.Generator().manual_seed(0)
    for p in layer.parameters():
        if p.is_floating_point():
            p.data.normal_(0, 0.5, generator=g)
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_experts_equal_a_loop(bias: bool, dtype: torch.dtype) -> None:
    layer = mixture(bias=bias).to(dtype)
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    found = layer(x, torch.ones(2, 9, dtype=torch.bool))
    e = layer.experts
    share, chosen = layer.router(x).softmax(-1, dtype=torch.float32).topk(2, -1)
    share = share / share.sum(-1, keepdim=True)
    expected = torch.zeros_like(x)
    for b, t, k in [(b, t, k) for b in range(2) for t in range(9) for k in range(2)]:
        i = chosen[b, t, k]
        gate, up = (
            F.linear(x[b, t], getattr(e, f"{n}_proj")[i], getattr(e, f"{n}_bias")[i] if bias else None)
            for n in ("gate", "up")
        )
        y = F.linear(F.silu(gate) * up, e.down_proj[i], e.down_bias[i] if bias else None)
        expected[b, t] += share[b, t, k].to(dtype) * y
    bound = 1e-5 if dtype == torch.float32 else 5e-2
    assert (found - expected).abs().max() <= bound * expected.abs().max()
    names, tensors = zip(("x", x), *layer.named_parameters(), strict=True)
    upstream = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    gradients = [torch.autograd.grad((y * upstream).sum(), tensors, retain_graph=True) for y in (found, expected)]
    for name, ours, theirs in zip(names, *gradients, strict=True):
        assert (ours - theirs).abs().max() <= bound * theirs.abs().max(), name


def test_balance_equals_transformers() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    config = family_of({"model_type": "qwen3_moe"}).random_config(random.Random(3)) | {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    hf = random_reference(config, 0)
    ids = torch.randint(0, config["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(0))
    logits = hf(input_ids=ids, output_router_logits=True).router_logits
    theirs = load_balancing_loss_func(logits, config["num_experts"], config["num_experts_per_tok"])
    layers = [mixture(experts=config["num_experts"], top_k=config["num_experts_per_tok"]) for _ in logits]
    ours = []
    for layer, router in zip(layers, logits, strict=True):
        probability = router.softmax(-1)
        chosen = probability.topk(config["num_experts_per_tok"], -1).indices
        ours.append(layer._routing(probability, chosen, torch.ones(len(router), dtype=torch.bool)))
    assert float(load_balancing_loss(ours).detach()) == pytest.approx(float(theirs), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_router_of_deepseek_scores_in_fp32_and_its_even_load_is_the_least(dtype: torch.dtype) -> None:
    settings = {"experts": 6, "scores": "sigmoid", "correction": True, "groups": 3, "top_groups": 2, "scaling": 2.5}
    layer = mixture(**settings).to(dtype)
    x = torch.randn(1, 12, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    real = torch.ones(1, 12, dtype=torch.bool)
    layer.correction_bias.data.copy_(torch.tensor([0.0, 0.0, 9.001, 9.0, 9.0, 9.002]).view(torch.int32))
    _, share, chosen = layer._sigmoid_choice(x[0])
    assert share.dtype == torch.float32
    assert set(chosen.flatten().tolist()) <= {2, 3, 4, 5}, "the first group is never among the best"
    assert share.sum(-1).allclose(torch.tensor(2.5))
    layer.router.weight.data.zero_()
    assert layer._sigmoid_choice(x[0])[2].unique().tolist() == [2, 5], "bf16 holds no 9.001"
    layer(x, real)
    uneven = float(load_balancing_loss([layer.routing]))
    assert uneven == pytest.approx(2.0), "the scores are equal: where tokens go has no gradient"
    layer.router.weight.data[2] = 5 * x[0, 0]
    layer(x[:, :1], real[:, :1])
    assert float(load_balancing_loss([layer.routing]).detach()) > 2.0


def test_padding_does_not_count_and_an_even_load_is_the_least() -> None:
    layer = mixture()
    x = torch.randn(1, 12, 8, generator=torch.Generator().manual_seed(2))
    real = torch.arange(12)[None] < 7
    layer(x, real)
    first = load_balancing_loss([layer.routing])
    layer(torch.where(real[..., None], x, 99.0), real)
    assert torch.equal(first, load_balancing_loss([layer.routing]))
    layer.router.weight.data.zero_()  # every probability is equal
    layer(x, real)
    assert float(load_balancing_loss([layer.routing])) == pytest.approx(2.0)
    layer.router.weight.data[0] = 5 * x[0, 0]
    layer(x[:, :1], real[:, :1])
    assert float(load_balancing_loss([layer.routing]).detach()) > 2.5
