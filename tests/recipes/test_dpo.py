"""DPO, IPO and SimPO against the papers' equations, their pairs packed, weighted and dealt to ranks."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptf.compute.world import World
from ptf.config.sections.model import LoraConfig, ModelConfig
from ptf.data.batch import Batch
from ptf.data.document import Document, PackUnit
from ptf.data.packing import idle, pack_all
from ptf.model.decoder import Decoder
from ptf.recipes.documents import document_weights, ends, pairs, sums
from ptf.recipes.dpo.recipe import DPO
from ptf.recipes.protocol import Recipe
from ptf.train.trainer import load_model
from tests.model.test_components import checkpoint as moe_checkpoint
from tests.recipes import dense
from tests.recipes.of_keys import of_keys
from tests.tiny import checkpoint, sample

FORMS = {
    "dpo": of_keys(DPO, beta=0.3),
    "conservative": of_keys(DPO, beta=0.3, label_smoothing=0.1),
    "means": of_keys(DPO, beta=2.0, length_normalised=True),
    "ipo": of_keys(DPO, loss_type="ipo", beta=0.2),
    "ipo of means": of_keys(DPO, loss_type="ipo", beta=0.2, length_normalised=True),
    "simpo": of_keys(DPO, loss_type="simpo", beta=2.0, gamma=0.7),
}


def units(count: int, seed: int = 0, weight: float = 1.0) -> list[PackUnit]:
    rng = np.random.default_rng(seed)
    made = [tuple(sample(int(rng.integers(4, 14)), 100 * seed + 2 * i + k) for k in range(2)) for i in range(count)]
    if weight == 1:
        return made
    return [
        tuple(Document(s.tokens, s.loss_weights * np.float32(weight + i), s.source) for s in unit)
        for i, unit in enumerate(made)
    ]


def batches(made: list[PackUnit], width: int = 40) -> list[Batch]:
    sequences = pack_all(made, width)
    sequences.append([idle(sequences)])  # as ranks get that have fewer sequences
    return [Batch.of(sequences[i : i + 2], width) for i in range(0, len(sequences), 2)]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("dpo")
    return checkpoint(root / "policy", seed=1), checkpoint(root / "reference", seed=2)


def load(place: Path, **spec: object) -> Decoder:
    return load_model(place, World(), ModelConfig(path=str(place), **spec), seed=0, precision="fp32")


def expected(recipe: DPO, policy, reference, made: list[PackUnit]) -> torch.Tensor:
    """Return the mean loss over pairs, weighted by the weights of the pairs."""
    total, units = torch.zeros((), dtype=torch.float64), 0.0
    for chosen, rejected in made:
        weight = float(chosen.loss_weights.max())
        (w, n_w), (v, n_v) = dense.answer(policy, chosen), dense.answer(policy, rejected)
        if recipe.config.loss_type == "simpo":
            loss = -torch.log(
                torch.sigmoid(recipe.config.beta / n_w * w - recipe.config.beta / n_v * v - recipe.config.gamma)
            )
        else:
            with torch.no_grad():
                (rw, _), (rv, _) = dense.answer(reference, chosen), dense.answer(reference, rejected)
            by = (n_w, n_v) if recipe.config.length_normalised else (1, 1)
            gap = (w - rw) / by[0] - (v - rv) / by[1]
            if recipe.config.loss_type == "ipo":
                loss = (gap - 1 / (2 * recipe.config.beta)) ** 2
            else:
                assert recipe.config.loss_type == "sigmoid"
                e = recipe.config.label_smoothing
                loss = -(1 - e) * torch.log(torch.sigmoid(recipe.config.beta * gap)) - e * torch.log(
                    torch.sigmoid(-recipe.config.beta * gap)
                )
        total, units = total + weight * loss, units + weight
    return total / units


def ours(recipe: Recipe, policy: Decoder, frozen_models: dict[str, Decoder], made: list[PackUnit]) -> float:
    """Return the loss of ptf's recipe; its gradient is left in the policy."""
    found = batches(made)
    units, total = float(sum(recipe.denominator(b) for b in found)), 0.0
    for batch in found:
        loss, metrics = recipe.loss(policy, batch, frozen_models)
        (loss / units).backward()
        total += float(metrics["loss"]) / units
    return total


CASES = {"equal": (1.0, None), "weighted": (0.5, None), "adapters": (1.0, LoraConfig(rank=4))}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradient_are_those_of_the_equations(places, form, case):
    """With adapters, the reference is the model without them."""
    (weight, lora), recipe = CASES[case], FORMS[form]
    policy, made = stirred(load(places[0], lora=lora)), units(7, weight=weight)
    theirs, gradients = dense.beside(places[0], policy)
    wanted = expected(recipe, theirs, dense.model(places[0 if lora else 1]), made)
    wanted.backward()
    frozen_models = {"reference": policy if lora else load(places[1])} if lora or recipe.frozen_models else {}
    assert ours(recipe, policy, frozen_models, made) == pytest.approx(float(wanted.detach()), rel=2e-5)
    assert dense.apart(policy, gradients()) < 1e-4


def test_a_pair_the_wrong_way_round_is_another_loss(places):
    """Negative control."""
    made = units(7)
    policy, reference, recipe = load(places[0]), {"reference": load(places[1])}, FORMS["dpo"]
    assert (
        abs(ours(recipe, policy, reference, made) - ours(recipe, policy, reference, [unit[::-1] for unit in made]))
        > 0.1
    )


@pytest.mark.parametrize("form", ["dpo", "conservative", "means"])
def test_the_first_loss_is_ln_2(places, form):
    policy = load(places[0])
    assert ours(FORMS[form], policy, {"reference": load(places[0])}, units(9)) == pytest.approx(math.log(2), abs=1e-6)


def test_a_model_without_its_adapters_is_its_own_reference(places):
    """The same loss, and gradient of the adapters, as with a second model."""
    spec = {"lora": LoraConfig(rank=4)}
    one, other = load(places[0], **spec), load(places[0], **spec)
    for model in (one, other):
        stirred(model)
    made, recipe = units(7), FORMS["dpo"]
    losses = ours(recipe, one, {"reference": one}, made), ours(recipe, other, {"reference": load(places[0])}, made)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert abs(losses[0] - math.log(2)) > 1e-3, "the adapters change something"
    a, b = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (one, other))
    assert a.keys() == b.keys()
    assert all("lora" in name for name in a)
    assert max(float((a[n] - b[n]).abs().max()) for n in a) < 1e-6


def stirred(model: Decoder) -> Decoder:
    """Load a model whose adapters change its outputs: B is 0 at first."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter += 0.05  # the same on every rank that has a part of it
    return model


def test_experts_are_balanced_beside_an_own_reference(tmp_path):
    """The routing that the balance looks at is the policy's, with its gradient,
    and not that of the reference's pass."""
    place = moe_checkpoint("qwen3_moe", tmp_path / "moe")
    policy = load(place, lora=LoraConfig(rank=4))
    assert policy.config.moe
    (batch, *_) = batches(units(3))
    FORMS["dpo"].loss(policy, batch, {"reference": policy})
    balance = policy.load_balancing_loss()
    assert balance is not None
    assert balance.requires_grad


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(2, 9), st.integers(2, 9)), min_size=1, max_size=9), st.integers(18, 30))
def test_pairs_and_documents_are_found_however_they_are_packed(lengths, width):
    """Each answer's sum over its own tokens, its last token, and its partner, by a loop over the samples."""
    made = [(sample(a, 31 * i), sample(b, 31 * i + 1)) for i, (a, b) in enumerate(lengths)]
    for batch in batches(made, width):
        values = torch.rand(batch.tokens.shape, dtype=torch.float64)
        total, last, counted = sums(values, batch), ends(batch), document_weights(batch)
        documents = [
            (r, d) for r in range(len(batch.segments)) for d in dict.fromkeys(batch.segments[r].tolist()) if d >= 0
        ]
        for r, d in documents:
            here = batch.segments[r] == d
            trained = here & (batch.loss_weights[r] != 0)
            assert float(total[d]) == pytest.approx(float(values[r][trained].sum()))
            assert int(last[d]) == r * width + int(here.nonzero()[-1])
            assert float(counted[d]) == float(batch.loss_weights[r][here].max())
        first, second = pairs(batch)
        partners = [(d, d + 1) for d in range(len(batch.lengths) - 1) if batch.units[d] == batch.units[d + 1]]
        assert list(zip(first.tolist(), second.tolist(), strict=True)) == partners
        assert len(partners) == batch.sources.count("a") // 2
