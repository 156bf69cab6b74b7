"""Reward models against the equations: transformers' own classifier reads the scores, one answer at a time, in float64."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from ptf.compute.world import World
from ptf.config.schema import LoraConfig, ModelConfig
from ptf.data.sample import Atom
from ptf.data.tokenizer import Tokenizer, character_tokenizer
from ptf.errors import UserError
from ptf.model.decoder import Decoder
from ptf.recipes.rm import RM
from ptf.train.trainer import load_model
from tests.recipes import dense
from tests.recipes.test_dpo import atoms, ours, stirred
from tests.tiny import SIZES

FORMS = {
    "pair": RM(),
    "margin": RM(margin=True),
    "centred": RM(centring=0.05),
    "binary": RM(form="binary"),
    "regression": RM(form="regression"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    directory = tmp_path_factory.mktemp("rm")
    torch.manual_seed(3)
    Qwen3ForSequenceClassification(Qwen3Config(**SIZES, num_labels=1, initializer_range=0.2)).save_pretrained(directory)
    return directory


def load(place: Path, **spec: Any) -> Decoder:
    return load_model(place, World(), ModelConfig(path=str(place), **spec), seed=0, precision="fp32", head="scalar")[0]


def data(recipe: RM, weight: float) -> list[Atom]:
    made, rng = atoms(6, weight=weight), np.random.default_rng(0)
    if recipe.form == "pair":
        if not recipe.margin:
            return made
        return [tuple(replace(s, streams={"margin": np.full(len(s), i / 4, np.float32)}) for s in atom) for i, atom in enumerate(made)]
    truth = {"binary": lambda: rng.integers(0, 2), "regression": rng.normal}[recipe.form]
    return [(replace(s, streams={"score": np.full(len(s), truth(), np.float32)}),) for atom in made for s in atom]


def expected(recipe: RM, network, made: list[Atom]) -> torch.Tensor:
    total, units = torch.zeros((), dtype=torch.float64), 0.0
    for atom in made:
        weight, scores = float(atom[0].weights.max()), [dense.score(network, s) for s in atom]
        if recipe.form == "pair":
            margin = float(atom[0].streams["margin"][0]) if recipe.margin else 0.0
            loss = -torch.log(torch.sigmoid(scores[0] - scores[1] - margin)) + recipe.centring * (scores[0] + scores[1]) ** 2
        else:
            y = float(atom[0].streams["score"][0])
            loss = (scores[0] - y) ** 2 if recipe.form == "regression" else -y * logsigmoid(scores[0]) - (1 - y) * logsigmoid(-scores[0])
        total, units = total + weight * loss, units + weight
    return total / units


@pytest.mark.parametrize("weight", [1.0, 0.5], ids=["equal", "weighted"])
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradient_are_those_of_the_equations(place, form, weight):
    recipe = FORMS[form]
    made, model, theirs = data(recipe, weight), load(place), dense.model(place, scalar=True)
    wanted = expected(recipe, theirs, made)
    wanted.backward()
    assert ours(recipe, model, {}, made) == pytest.approx(float(wanted), rel=2e-5)
    assert dense.apart(model, dense.gradients(theirs)) < 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_of_adapters_is_that_of_the_equations(place, form):
    recipe = FORMS[form]
    made, model = data(recipe, 1.0), stirred(load(place, lora=LoraConfig(rank=4)))
    theirs, leaves = dense.adapted(dense.model(place, scalar=True), model)
    wanted = expected(recipe, theirs, made)
    wanted.backward()
    assert ours(recipe, model, {}, made) == pytest.approx(float(wanted.detach()), rel=2e-5)
    assert dense.apart(model, {name: leaf.grad for name, leaf in leaves.items()}) < 1e-4


def test_a_score_read_one_token_early_is_another_loss(place, monkeypatch):
    """Negative control."""
    made, recipe = data(FORMS["pair"], 1.0), FORMS["pair"]
    right = ours(recipe, load(place), {}, made)
    from ptf.recipes import documents, rm

    monkeypatch.setattr(rm, "ends", lambda batch: (documents.ends(batch) - 1).clamp(min=0))
    assert abs(ours(recipe, load(place), {}, made) - right) > 1e-2


def chat(asked: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def characters(tmp_path_factory) -> Tokenizer:
    return character_tokenizer("abc?", tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(
    ("recipe", "row", "message"),
    [
        (RM(), {"prompt": "a?", "chosen": "b", "rejected": "b"}, "are the same"),
        (RM(), {"prompt": "a?", "chosen": "b"}, "needs `chosen` and `rejected`"),
        (RM(), {"chosen": "b", "rejected": "c"}, "without a prompt"),
        (RM(), {"prompt": "a?", "chosen": "b", "rejected": ""}, "empty"),
        (RM(), {"chosen": chat("a?", "b"), "rejected": chat("c?", "c")}, "different prompts"),
        (RM(margin=True), {"prompt": "a?", "chosen": "b", "rejected": "c"}, "needs a number `margin`"),
        (RM(form="binary"), {"prompt": "a?", "completion": "b", "reward": 3}, "from 0 to 1"),
        (RM(form="regression"), {"prompt": "a?", "completion": "b", "reward": float("nan")}, "finite"),
        (RM(form="regression"), {"prompt": "a?", "completion": "b"}, "needs `prompt`, `completion` and `reward`"),
    ],
)
def test_rows_that_cannot_be_compared_or_scored_are_refused(characters, recipe, row, message):
    with pytest.raises(UserError, match=message):
        recipe.encode(row, characters, "a")
