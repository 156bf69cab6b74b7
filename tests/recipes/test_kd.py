"""Distillation against the papers' equations: forms, temperatures, several teachers, top-k,
ahead of training or beside it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ptf.config.sections.model import LoraConfig
from ptf.data.batch import Batch
from ptf.data.document import Document, PackUnit
from ptf.data.packing import pack_all
from ptf.errors import UserError
from ptf.recipes.kd.config import TeacherConfig
from ptf.recipes.kd.recipe import KD, shared_vocabulary
from ptf.train.precompute import of_samples
from tests.recipes import dense
from tests.recipes.of_keys import of_keys
from tests.recipes.test_dpo import load, ours, stirred
from tests.tiny import checkpoint, sample

ONE = {"big": TeacherConfig(path="big")}
TWO = {"big": TeacherConfig(path="big", weight=3.0), "small": TeacherConfig(path="small")}
FORMS = {
    "forward": of_keys(KD, teachers=ONE),
    "reverse": of_keys(KD, teachers=ONE, loss_type="reverse"),
    "js": of_keys(KD, teachers=ONE, loss_type="js", beta=0.2),
    "hot": of_keys(KD, teachers=ONE, temperature=2.0, ce_coef=0.3),
    "two": of_keys(KD, teachers=TWO, loss_type="js", ce_coef=1.0),
    "top": of_keys(KD, teachers=ONE, top_k=5, temperature=1.5),
    "top of two": of_keys(KD, teachers=TWO, loss_type="reverse", top_k=5, ce_coef=0.5),
}


def units(count: int, seed: int = 0) -> list[PackUnit]:
    rng = np.random.default_rng(seed)
    made = [sample(int(rng.integers(4, 14)), 100 * seed + i) for i in range(count)]
    return [(Document(s.tokens, s.loss_weights * np.float32(0.5 + i % 3), s.source),) for i, s in enumerate(made)]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """A student, and teachers of other widths and depths, one of which has more rows of vocabulary than the student."""
    root = tmp_path_factory.mktemp("kd")
    return {
        "student": checkpoint(root / "student", seed=1),
        "big": checkpoint(root / "big", seed=2, hidden_size=96, num_hidden_layers=3, tie_word_embeddings=False),
        "small": checkpoint(root / "small", seed=3, hidden_size=32, vocab_size=120),
    }


def expected(recipe: KD, student, teachers, made: list[PackUnit]) -> torch.Tensor:
    """Return the mean loss over the trained tokens, weighted by their weights."""
    total, units = torch.zeros((), dtype=torch.float64), 0.0
    shares = {
        name: teacher.weight / sum(t.weight for t in recipe.config.teachers.values())
        for name, teacher in recipe.config.teachers.items()
    }
    for (one,) in made:
        tokens, weights = torch.tensor(one.tokens[None].astype("int64")), torch.tensor(one.loss_weights[1:]).double()
        logits = student(tokens).logits[0, :-1]
        loss = recipe.config.ce_coef * -logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1)
        for name, share in shares.items():
            with torch.no_grad():
                theirs = teachers[name](tokens).logits[0, :-1, : logits.shape[1]]
            t, s = ((z / recipe.config.temperature).softmax(-1) for z in (theirs, logits))
            if recipe.config.top_k:
                best = t.topk(recipe.config.top_k).indices
                s, t = (torch.cat([p.gather(1, best), 1 - p.gather(1, best).sum(1, keepdim=True)], 1) for p in (s, t))
            m = recipe.config.beta * t + (1 - recipe.config.beta) * s

            def kl(p, q):
                return (p * (p / q).log()).sum(-1)

            apart = {
                "forward": kl(t, s),
                "reverse": kl(s, t),
                "js": recipe.config.beta * kl(t, m) + (1 - recipe.config.beta) * kl(s, m),
            }[recipe.config.loss_type]
            loss = loss + share * recipe.config.temperature**2 * apart
        total, units = total + (weights * loss).sum(), units + float(weights.sum())
    return total / units


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["whole", "adapters"])
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradient_are_those_of_the_equations(places, form, lora):
    recipe, made = FORMS[form], units(9)
    student = stirred(load(places["student"], lora=lora))
    theirs, gradients = dense.beside(places["student"], student)
    wanted = expected(recipe, theirs, {name: dense.model(places[name]) for name in recipe.config.teachers}, made)
    wanted.backward()
    teachers = {name: load(places[name]) for name in recipe.config.teachers}
    assert ours(recipe, student, teachers, made) == pytest.approx(float(wanted.detach()), rel=2e-5)
    assert dense.apart(student, gradients()) < 1e-4
    assert not any(p.grad is not None for teacher in teachers.values() for p in teacher.parameters())


def test_a_teacher_that_says_other_things_is_another_loss(places):
    """Negative control."""
    student, made = load(places["student"]), units(9)
    losses = [
        ours(replace(FORMS["forward"]), student, {"big": load(places[name])}, made)
        for name in ("big", "small", "student")
    ]
    assert losses[2] == pytest.approx(0, abs=1e-6)
    assert min(abs(losses[0] - losses[1]), losses[0], losses[1]) > 0.1


@pytest.mark.parametrize("form", ["top", "top of two"])
def test_what_was_found_ahead_gives_the_same_loss_however_it_is_packed(places, form):
    recipe, made = FORMS[form], units(9)
    student, teachers = load(places["student"]), {name: load(places[name]) for name in FORMS[form].config.teachers}
    wanted = ours(recipe, student, teachers, made)
    gradient = {name: p.grad.clone() for name, p in student.named_parameters()}
    student.zero_grad()
    numbered = [(Document(s.tokens, s.loss_weights, str(i)),) for i, (s,) in enumerate(made)]
    found: dict[str, dict[str, np.ndarray]] = {}
    for sequence in pack_all(numbered, 30):
        batch = Batch.of([sequence], 30)
        found |= of_samples(batch, recipe.precomputed_columns(student, batch, teachers))
    ahead = [(Document(s.tokens, s.loss_weights, s.source, found[str(i)]),) for i, (s,) in enumerate(made)]
    assert ours(recipe.with_keys(precompute=True), student, {}, ahead[::-1]) == pytest.approx(wanted, rel=1e-5)
    assert all(torch.allclose(p.grad, gradient[name], rtol=1e-4, atol=1e-6) for name, p in student.named_parameters())


def test_vocabularies_of_unequal_length_are_compared_where_both_have_rows(places):
    assert shared_vocabulary(load(places["student"]), load(places["small"]), "small") == 97
    with pytest.raises(UserError, match=r"algo\.top_k \(97\) must be less than the vocabulary of 97"):
        ours(FORMS["top"].with_keys(top_k=97), load(places["student"]), {"big": load(places["big"])}, units(1))
