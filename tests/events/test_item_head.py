"""The head over a catalogue: its losses and gradients against float64 written out, packed and with baskets;
what it asks for and what it refuses."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from ptf.data.batch import Batch
from ptf.data.document import Document
from ptf.data.encode import VALUE
from ptf.errors import UserError
from ptf.events.item_head import NextItem, basket_starts
from ptf.events.own_items import own_after
from ptf.model.config import DecoderConfig, Layer, Rope
from ptf.model.layers import LayerFactory
from ptf.model.lora import Lora
from tests.bounds import ROUNDINGS, excess, traced

VOCAB, ITEMS, D = 40, 24, 16
IDS = torch.arange(10, 10 + ITEMS)
GAPS = torch.tensor([[2, 0.5], [3, 6.0]])


def stored(width: int) -> dict[str, Tensor]:
    return {
        "ids": IDS,
        "rows": torch.randn(ITEMS, width),
        "sold": torch.arange(ITEMS),
        "gaps": GAPS,
        "request_time": torch.tensor(False),
    }


def head(place: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> NextItem:
    torch.manual_seed(0)
    save_file(stored(D), place / "items.safetensors")
    made = NextItem(config(), LayerFactory(), "head", items=str(place / "items.safetensors"), **settings)
    return made.to(dtype)


def config() -> DecoderConfig:
    return DecoderConfig(VOCAB, D, 2, 2, 8, 32, 1e-6, 64, True, (Layer(Rope(1e4)),))


def history(rng: np.random.Generator, baskets: int) -> Document:
    """`<start> basket gap basket gap …`, the first basket as context."""
    tokens, weights, where, days = [1], [0.0], [(0, 0)], [np.nan]
    for basket in range(1, baskets + 1):
        size = int(rng.integers(1, 5))
        tokens += [*rng.choice(IDS.numpy()[:8], size, replace=False).tolist(), int(rng.integers(2, 4))]
        weights += [float(basket > 1) * (3.0 if n == 0 else 1.0) for n in range(size + 1)]
        where += [*((basket, n) for n in range(size)), (0, 0)]
        days += [float(rng.integers(0, 50)) if basket != 3 else np.nan] * size + [np.nan]
    known = np.stack([np.nan_to_num(days), ~np.isnan(days)], 1).astype(np.float32)
    token_columns = {"baskets": np.array(where, np.int32), VALUE + "days": known}
    return Document(np.array(tokens, np.int32), np.array(weights, np.float32), "h", token_columns)


def packed(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch.of([[(history(rng, 3),), (history(rng, 4),)], [(history(rng, 5),)]], 48)


def copied(of: NextItem, x: Tensor, scores: Tensor, context: np.ndarray) -> Tensor:
    """Scores [items + 1] with the copy term of one state, item by item, in float64."""
    assert of.copy is not None
    term = of.copy
    hidden, out, gate = (layer.weight.double() for layer in (term.hidden, term.out, term.gate))
    own = own_after(context, of.meaning)
    gains = torch.zeros_like(scores)
    for item, features in zip(own.items, torch.from_numpy(own.features).double(), strict=True):
        c = out[0] @ F.gelu(hidden @ features + term.hidden.bias.double())  # type: ignore[union-attr]
        c = c + term.again[item].double() + gate[0] @ x + term.gate.bias.double()[0]  # type: ignore[union-attr]
        gains[item] = c + (term.share.double()[0] - 1) * scores[item]
    return scores + gains


def dense(weight: Tensor, x: Tensor, batch: Batch, set_wise: bool, of: NextItem | None = None) -> Tensor:
    """Place by place; `of` has the copy term."""
    total = torch.zeros((), dtype=torch.float64)
    baskets = batch.token_columns["baskets"]
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            if not batch.loss_weights[b, t]:
                continue
            rest = [t]
            while (
                set_wise
                and baskets[b, t, 0]
                and rest[-1] + 1 < x.shape[1]
                and (
                    batch.segments[b, rest[-1] + 1] == batch.segments[b, t]
                    and baskets[b, rest[-1] + 1, 0] == baskets[b, t, 0]
                )
            ):
                rest.append(rest[-1] + 1)
            classes = [int(token) - 10 if 10 <= int(token) < 10 + ITEMS else ITEMS for token in batch.targets[b, rest]]
            scores = weight @ x[b, t]
            if of is not None:
                assert of.often is not None
                scores = scores + of.often.double()
                start = t - int(batch.positions[b, t])
                scores = copied(of, x[b, t], scores, batch.tokens[b, start : t + 1].numpy())
            logprobs = scores.log_softmax(0)
            total = total - batch.loss_weights[b, t] * logprobs[classes].mean()
    return total


@pytest.mark.parametrize("set_wise", [False, True])
def test_loss_and_gradient_are_those_of_the_definition(tmp_path: Path, set_wise: bool) -> None:
    batch = packed()
    ours = head(tmp_path, set_wise=set_wise)
    x = torch.randn(2, 48, D, generator=torch.Generator().manual_seed(1), requires_grad=True)
    exact, weight = traced(x), traced(ours.items.weight)
    loss, expected = ours.loss(x, batch), dense(weight, exact, batch, set_wise)
    found = [loss, *torch.autograd.grad(loss, [x, ours.items.weight])]
    wanted = [expected, *torch.autograd.grad(expected, [exact, weight])]
    assert excess(found, wanted) <= ROUNDINGS
    assert excess([g * (1 + 1e-4) for g in found], wanted) > ROUNDINGS
    # the control: the two are not the same
    assert excess([loss], [dense(weight, exact, batch, not set_wise)]) > ROUNDINGS


def learned(of: NextItem) -> NextItem:
    """With a copy term that says something."""
    assert of.copy is not None
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in of.copy.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return of


@pytest.mark.parametrize("chunk", [1 << 26, 4 * (ITEMS + 1) * 5])
@pytest.mark.parametrize("set_wise", [False, True])
def test_loss_with_the_copy_term_is_that_of_the_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_wise: bool, chunk: int
) -> None:
    monkeypatch.setattr("ptf.events.item_head.CHUNK_BYTES", chunk)
    batch, ours = packed(), learned(head(tmp_path, torch.float64, set_wise=set_wise, copy=True))
    x = torch.randn(2, 48, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    loss, expected = ours.loss(x, batch), dense(ours.items.weight, x, batch, set_wise, ours)
    inputs = [x, ours.items.weight]
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-5)
    for found, wanted in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert abs(float(loss) - float(dense(ours.items.weight, x, batch, set_wise))) > 1  # the control: without it


def test_own_items_are_always_candidates(tmp_path: Path) -> None:
    """Of few drawn items none need be an own item; with all of them drawn the normaliser is exact."""
    batch, x = packed(), torch.randn(2, 48, D, generator=torch.Generator().manual_seed(1)) / 4
    exact, most, few = (learned(head(tmp_path, copy=True, set_wise=True, sampled=n)) for n in (None, ITEMS - 1, 4))
    losses = [float(of.loss(x, batch).detach()) for of in (exact, most, few)]
    with torch.no_grad():
        assert float(few.loss(x, batch)) == losses[0]  # held-out losses are exact
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[2] == pytest.approx(losses[0], rel=0.2)
    assert losses[1] != losses[0]


def test_an_item_that_a_basket_has_twice_is_owned_until_the_first(tmp_path: Path) -> None:
    tokens = np.array([1, 10, 2, 10, 11, 10, 2], np.int32)
    batch = Batch.of([[(Document(tokens, np.ones(7, np.float32)),)]], 7)
    ours = learned(head(tmp_path, torch.float64, copy=True))
    x = torch.randn(1, 7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert float(ours.loss(x, batch)) == pytest.approx(
        float(dense(ours.items.weight, x, batch_with_baskets(batch), False, ours)), rel=1e-5
    )


def batch_with_baskets(batch: Batch) -> Batch:
    return Batch(**{**vars_of(batch), "token_columns": {"baskets": torch.zeros(1, 7, 2)}})


def test_logits_have_the_copy_term_of_the_loss(tmp_path: Path) -> None:
    batch, ours = packed(), learned(head(tmp_path, torch.float64, copy=True))
    x = torch.randn(2, 48, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    total = 0.0
    for b, t in torch.nonzero(batch.loss_weights).tolist():
        context = batch.tokens[b, t - int(batch.positions[b, t]) : t + 1].numpy().astype(np.int32)
        logprobs = ours(x[b, t][None], [context])[0]
        target = int(ours.place[batch.targets[b, t]])  # type: ignore[index]
        total -= float(batch.loss_weights[b, t] * logprobs[target])
        items = ours.logits(x[b, t][None], [context])[0, IDS].log_softmax(0)
        torch.testing.assert_close(items, logprobs[:-1].log_softmax(0))
    assert float(ours.loss(x, batch)) == pytest.approx(total, rel=1e-6)
    assert not torch.equal(ours.logits(x[0, :1], [batch.tokens[0, :1].numpy()]), ours.logits(x[0, :1], [context]))


def test_some_items_stand_for_all(tmp_path: Path) -> None:
    """The normaliser that is found from a few, over many draws, is that of all; the same batch draws the same ones."""
    exact, sampled = head(tmp_path), head(tmp_path, sampled=6)
    batch, x = packed(), torch.randn(2, 48, D, generator=torch.Generator().manual_seed(1)) / 4
    only = torch.zeros_like(batch.loss_weights)
    at = tuple(torch.nonzero(batch.loss_weights)[0])
    only[at] = 1.0

    def of(which: NextItem, shift: int) -> float:
        tokens = batch.tokens.clone()
        tokens[0, -1] += shift  # padding: another draw
        return float(which.loss(x, Batch(**{**vars_of(batch), "tokens": tokens, "loss_weights": only})))

    assert of(sampled, 3) == of(sampled, 3)
    assert len({of(sampled, shift) for shift in range(20)}) > 10
    assert np.mean([math.exp(of(sampled, shift)) for shift in range(2000)]) == pytest.approx(
        math.exp(of(exact, 0)), rel=0.03
    )


def vars_of(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in batch.__dataclass_fields__}


def test_values_are_said_where_a_basket_begins(tmp_path: Path) -> None:
    plain, both = head(tmp_path), head(tmp_path, values={"days": 0.5})
    batch, x = packed(), torch.randn(2, 48, D, generator=torch.Generator().manual_seed(1))
    said, expected = both.numbers(x)[..., 0], 0.0  # type: ignore[misc]
    for b, t in torch.nonzero(batch.loss_weights == 3.0).tolist():
        days, there = batch.token_columns[VALUE + "days"][b, t].tolist()
        if there:
            expected += 0.5 / 2 * 3.0 * (float(said[b, t]) - math.log1p(days)) ** 2
    assert expected > 1
    assert float(both.loss(x, batch)) - float(plain.loss(x, batch)) == pytest.approx(expected, rel=1e-4)
    assert both(x).shape == (2, 48, ITEMS + 2)
    torch.testing.assert_close(both(x)[..., : ITEMS + 1].exp().sum(-1), torch.ones(2, 48))
    assert torch.equal(both.logits(x)[..., IDS], both.items(x)[..., :-1])
    others = {name: stream for name, stream in batch.token_columns.items() if name == "baskets"}
    # rows of another source
    assert both.loss(x, Batch(**{**vars_of(batch), "token_columns": others})).item() == pytest.approx(
        plain.loss(x, batch).item()
    )
    with pytest.raises(UserError, match=r"rows have no value 'spend' for their baskets; they have days$"):
        head(tmp_path, values={"spend": 1.0}).loss(x, batch)


@pytest.mark.parametrize("copy", [False, True])
def test_a_rank_without_rows_has_a_loss_with_a_gradient(tmp_path: Path, copy: bool) -> None:
    made = head(tmp_path, set_wise=True, values={"days": 0.5}, copy=copy)
    x = torch.randn(2, 16, D, requires_grad=True)
    loss = made.loss(x, Batch.of([[], []], 16))
    assert float(loss.detach()) == 0
    assert all(g is not None for g in torch.autograd.grad(loss, [x, *made.parameters()]))
    batch, x = packed(), torch.randn(2, 48, D, requires_grad=True)
    # of a source that says no values
    without = Batch(**{**vars_of(batch), "token_columns": {"baskets": batch.token_columns["baskets"]}})
    assert all(g is not None for g in torch.autograd.grad(made.loss(x, without), [x, *made.parameters()]))


@pytest.mark.parametrize("settings", [{"sampled": ITEMS}, {"sampled": 0}])
def test_what_cannot_be_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="sampled must be between 1 and 23"):
        head(tmp_path, **settings)
    with pytest.raises(UserError, match="dropout must be a share of at least 0 and below 1"):
        head(tmp_path, dropout=1.0)
    save_file(stored(D + 1), tmp_path / "wide.safetensors")
    with pytest.raises(
        UserError, match=r"rows of width 17 and tokens up to 33, but the model has width 16 and a vocabulary of 40"
    ):
        NextItem(config(), LayerFactory(), "head", items=str(tmp_path / "wide.safetensors"))
    batch = packed()
    without = Batch(**{**vars_of(batch), "token_columns": {}})
    with pytest.raises(UserError, match="set_wise needs baskets"):
        head(tmp_path, set_wise=True).loss(torch.randn(2, 48, D), without)
    with pytest.raises(UserError, match=r"nowhere.* is not what ptf.events.prepare writes"):
        NextItem(config(), LayerFactory(), "head", items=str(tmp_path / "nowhere.safetensors"))
    without_sales = {name: tensor for name, tensor in stored(D).items() if name != "sold"}
    save_file(without_sales, tmp_path / "items.safetensors")
    NextItem(config(), LayerFactory(), "head", items=str(tmp_path / "items.safetensors"))  # only a bias needs sales
    with pytest.raises(UserError, match="prepare the data again"):
        NextItem(config(), LayerFactory(), "head", items=str(tmp_path / "items.safetensors"), copy=True)
    adapted = LayerFactory(lora=Lora(4, 8.0, ("*",)))
    with pytest.raises(UserError, match="has no effect"):
        NextItem(config(), adapted, "head", items=str(tmp_path / "items.safetensors"))


def test_held_out_losses_are_exact_and_a_cut_basket_opens_nothing(tmp_path: Path) -> None:
    exact, sampled = head(tmp_path), head(tmp_path, sampled=6)
    batch, x = packed(), torch.randn(2, 48, D)
    with torch.no_grad():
        assert sampled.loss(x, batch).item() == pytest.approx(exact.loss(x, batch).item(), rel=1e-6)
    assert sampled.loss(x, batch).item() != pytest.approx(exact.loss(x, batch).item(), rel=1e-3)
    dropping = head(tmp_path, dropout=0.2)
    with torch.no_grad():
        assert dropping.loss(x, batch).item() == exact.loss(x, batch).item()
    assert dropping.loss(x, batch).item() != pytest.approx(exact.loss(x, batch).item(), rel=1e-3)
    where = np.array([(2, 3), (2, 4), (0, 0), (3, 0), (3, 1), (0, 0)], np.int32)
    cut = Document(np.array([10, 11, 2, 12, 13, 2], np.int32), np.ones(6, np.float32), "h", {"baskets": where})
    assert basket_starts(Batch.of([[(cut,)]], 8)).nonzero().tolist() == [[0, 2]]
