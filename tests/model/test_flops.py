"""FLOPs against PyTorch's own counter, which sees every matrix product that a real step makes."""

import random
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ptf.data.batch import Batch
from ptf.model import moe
from ptf.model.attention import Attention
from ptf.model.chunked import cross_entropy
from ptf.model.decoder import Decoder
from ptf.model.families import MODULES, family_of
from ptf.model.flops import Flops, pairs
from ptf.model.gated_delta import GatedDeltaNet
from ptf.model.kernels.attention import sdpa
from ptf.model.kernels.delta_rule import convolve
from ptf.model.layers import LayerFactory
from ptf.model.lora import Lora, adapter_names
from tests.tiny import packed

ROWS, WIDTH = [[9, 2, 5], [16]], 16  # full rows: the counter sees padding, which is no work of ours
BOUND = 0.005


@pytest.fixture(autouse=True)
def only_real_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    # what a CPU's expert products are filled up with is no work of ours either, nor are products with ones
    monkeypatch.setattr(moe, "ROW_MULTIPLE", 1)
    monkeypatch.setattr(moe._BiasOfRows, "apply", staticmethod(lambda bias, expert, ends: bias[expert]))


def product(a: Any, b: Any, *more: Any, out_shape: Any = None, **named: Any) -> int:
    return 2 * prod(a) * b[-1]


def accumulated(total: Any, a: Any, b: Any, *more: Any, out_shape: Any = None, **named: Any) -> int:
    return 2 * prod(a) * b[-1]


# each row of a meets one of b's matrices; torch has no formula
COUNTED = {torch.ops.aten._grouped_mm: product, torch.ops.aten.addmm_: accumulated}


class OnlyWhatIsSeen:
    """Attention that multiplies exactly the pairs that a query may attend to, because torch's counter counts whole
    squares."""

    def __init__(self, batch: Batch) -> None:
        self.starts = [
            (row, int(at)) for row in range(len(batch.tokens)) for at in (batch.positions[row] == 0).nonzero()
        ]
        self.lengths = batch.lengths

    def __call__(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows: list[list[Tensor]] = [[] for _ in q]
        group = q.shape[2] // k.shape[2]
        for (row, start), n in zip(self.starts, self.lengths, strict=True):
            for i in range(n):
                first = start + (0 if layer.window is None else max(0, i + 1 - layer.window))
                query = q[row, start + i].unflatten(0, (-1, group))  # [kv_heads, group, D]
                keys, values = (t[row, first : start + i + 1].transpose(0, 1) for t in (k, v))
                scores = query @ keys.transpose(1, 2) * layer.scale
                if layer.sinks is None:
                    share = scores.softmax(-1)
                else:
                    share = torch.cat((scores, layer.sinks.view(-1, group, 1)), -1).softmax(-1)[..., :-1]
                rows[row].append((share @ values).flatten(0, 1))
        return torch.stack([torch.stack(outs) for outs in rows])

    def delta(self, layer: GatedDeltaNet, qkv: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Apply the rule token by token, with a product for each use of the state."""
        positions = torch.zeros(qkv.shape[:2], dtype=torch.long)
        for (row, start), n in zip(self.starts, self.lengths, strict=True):
            positions[row, start : start + n] = torch.arange(n)
        q, k, v = layer.heads(convolve(qkv, positions, layer.conv.weight))
        rows: list[list[Tensor]] = [[] for _ in qkv]
        for (row, start), n in zip(self.starts, self.lengths, strict=True):
            state = torch.zeros(*k.shape[2:], v.shape[-1], requires_grad=True)
            for at in range(start, start + n):
                state = decay[row, at].exp()[:, None, None] * state
                change = beta[row, at, :, None] * (v[row, at] - (k[row, at, :, None] @ state)[:, 0])
                state = state + k[row, at, :, :, None] @ change[:, None]
                rows[row].append((q[row, at, :, None] @ state)[:, 0])
        return torch.stack([torch.stack(outs) for outs in rows])


class Deep(nn.Module):
    """A custom head of two layers that drops what is not trained."""

    def __init__(self, c: Any, factory: LayerFactory, path: str) -> None:
        super().__init__()
        self.inner, self.out = factory.linear(f"{path}.inner", c.dim, 24), factory.linear(f"{path}.out", 24, 7)

    def loss(self, x: Tensor, batch: Batch) -> Tensor:
        return self.out(self.inner(x[batch.loss_weights != 0]).relu()).square().sum()


def rows(documents: list[list[int]] = ROWS, width: int = WIDTH) -> Batch:
    """Return rows of tokens that every vocabulary has."""
    batch = packed(documents, width)
    return replace(batch, tokens=batch.tokens % 61, targets=batch.targets % 61)


def counted(model: Decoder, batch: Batch, attend: Any = None) -> float:
    """Return the operations that torch counts in a forward and a backward pass."""
    head_fn = partial(cross_entropy, targets=batch.targets, weights=batch.loss_weights)
    if model.config.head == "custom":

        def head_fn(x, head):
            return head.loss(x, batch)

    with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
        model(batch.tokens, batch.positions, batch.segments, head_fn, attend or OnlyWhatIsSeen(batch)).backward()
    return counter.get_total_flops()


def made(model_type: str, factory: LayerFactory | None = None, number: int = 0) -> Decoder:
    torch.manual_seed(0)
    family = family_of({"model_type": model_type})
    config = family.config(family.random_config(random.Random(f"flops/{model_type}/{number}")))
    model = Decoder(config, factory or LayerFactory())
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.normal_(0, 0.1)
    return model


def expected(model: Decoder, batch: Batch) -> float:
    return Flops.of(model).step(batch.lengths, int((batch.loss_weights != 0).sum()))


def train_adapters(model: Decoder) -> Decoder:
    names = adapter_names(model)
    for name, p in model.named_parameters():
        p.requires_grad_(name in names)
    return model


LORAS = {
    "all": Lora(rank=4),
    "q": Lora(rank=4, targets=("layers.*.attn.q_*proj",)),
    "second": Lora(rank=4, targets=("layers.1.*_proj",)),
}


@pytest.mark.parametrize("model_type", MODULES)
def test_a_step_is_what_torch_counts(model_type: str) -> None:
    batch = rows()
    model = made(model_type)
    assert expected(model, batch) == pytest.approx(counted(model, batch), rel=BOUND)


@pytest.mark.long
@pytest.mark.parametrize("which", LORAS)
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_frozen_weights_have_no_gradient_to_count(model_type: str, which: str) -> None:
    batch = rows()
    model = train_adapters(made(model_type, LayerFactory(lora=LORAS[which])))
    assert expected(model, batch) == pytest.approx(counted(model, batch), rel=BOUND)
    whole = made(model_type, LayerFactory(lora=LORAS[which]))
    assert expected(model, batch) < 0.8 * expected(whole, batch)


def test_a_declared_head_counts_its_own_projections() -> None:
    batch = rows()
    model = made("qwen3", LayerFactory({"head": Deep}))
    assert expected(model, batch) == pytest.approx(counted(model, batch), rel=BOUND)


def test_attention_over_squares_is_not_what_is_counted() -> None:
    """Negative control: with torch's own attention, whose formula counts a document's whole square and ignores windows,
    the counts part."""

    class Squares(OnlyWhatIsSeen):
        def __call__(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return sdpa(layer, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None).transpose(1, 2)

    batch, model = rows([[40]], 40), made("mistral")
    assert counted(model, batch, Squares(batch)) > 1.02 * expected(model, batch)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 20])
def test_pairs_are_those_of_the_mask(window: int | None) -> None:
    at = torch.arange(12)
    seen = (at[:, None] >= at) & (at[:, None] - at < (window or 12))
    assert pairs(12, window) == int(seen.sum())


@pytest.mark.parametrize("window", [None, 7])
def test_attention_of_what_goes_on_from_another_document_is_counted(window: int | None) -> None:
    flops = Flops(0.0, {window: 1.0}, 0.0)

    def seen(start, end):
        return sum(p + 1 if window is None else min(p + 1, window) for p in range(start, end))

    assert flops.step([30, 4, 9], 0, [0, 20, 3]) == seen(0, 30) + seen(20, 24) + seen(3, 12)
    assert flops.step([30, 4, 9], 0) < flops.step([30, 4, 9], 0, [0, 20, 3])


def test_a_token_of_a_dense_decoder_costs_six_operations_a_weight_of_its_products() -> None:
    """To the last operation: two forward, twice that backward (Kaplan et al. 2020, table 1)."""
    model = made("llama")
    weights = sum(module.weight.numel() for module in model.layers.modules() if isinstance(module, nn.Linear))
    assert Flops.of(model).per_token == 6 * weights
