"""Reward models against the equations: transformers' own classifier reads the scores, one answer at a time,
in float64."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from ptf.compute.world import World
from ptf.config.sections.model import ModelConfig
from ptf.data.batch import Batch
from ptf.data.character_tokenizer import character_tokenizer
from ptf.data.document import PackUnit, length
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model.decoder import Decoder
from ptf.recipes import documents
from ptf.recipes.rm import recipe as rm
from ptf.recipes.rm.recipe import RM
from ptf.train.trainer import load_model
from tests.recipes import dense
from tests.recipes.of_keys import of_keys
from tests.recipes.test_dpo import CASES, ours, stirred, units
from tests.tiny import SIZES

FORMS = {
    "pair": of_keys(RM),
    "margin": of_keys(RM, margin=True),
    "centred": of_keys(RM, center_coef=0.05),
    "binary": of_keys(RM, loss_type="binary"),
    "regression": of_keys(RM, loss_type="regression"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    directory = tmp_path_factory.mktemp("rm")
    torch.manual_seed(3)
    Qwen3ForSequenceClassification(Qwen3Config(**SIZES, num_labels=1, initializer_range=0.2)).save_pretrained(directory)
    return directory


def load(place: Path, **spec: Any) -> Decoder:
    return load_model(place, World(), ModelConfig(path=str(place), **spec), seed=0, precision="fp32", head="scalar")


def data(recipe: RM, weight: float) -> list[PackUnit]:
    made, rng = units(6, weight=weight), np.random.default_rng(0)
    if recipe.config.loss_type == "pair":
        if not recipe.config.margin:
            return made
        return [
            tuple(replace(s, token_columns={"margin": np.full(len(s), i / 4, np.float32)}) for s in unit)
            for i, unit in enumerate(made)
        ]
    found = []
    for s in (s for unit in made for s in unit):  # the last token has a score, and up to two before it
        weights, scores = np.zeros((2, len(s)), np.float32)
        places = {len(s) - 1, *rng.integers(1, len(s), 2).tolist()}
        for place in places:
            weights[place], scores[place] = (
                s.loss_weights.max(),
                {"binary": lambda: rng.integers(0, 2), "regression": rng.normal}[recipe.config.loss_type](),
            )
        found.append((replace(s, loss_weights=weights, token_columns={"score": scores, "answer_length": scores}),))
    assert any((sample.loss_weights != 0).sum() > 1 for (sample,) in found)
    return found


def expected(recipe: RM, network, made: list[PackUnit]) -> torch.Tensor:
    total, units = torch.zeros((), dtype=torch.float64), 0.0
    for unit in made:
        weight = float(unit[0].loss_weights.max())
        if recipe.config.loss_type == "pair":
            scores = [dense.score(network, s) for s in unit]
            margin = float(unit[0].token_columns["margin"][0]) if recipe.config.margin else 0.0
            loss = (
                -torch.log(torch.sigmoid(scores[0] - scores[1] - margin))
                + recipe.config.center_coef * (scores[0] + scores[1]) ** 2
            )
            total, units = total + weight * loss, units + weight
            continue
        (s,) = unit
        for end in np.flatnonzero(s.loss_weights):  # each is read by itself, with nothing after it
            y, score = (
                float(s.token_columns["score"][end]),
                dense.score(
                    network,
                    replace(s, tokens=s.tokens[: end + 1], loss_weights=s.loss_weights[: end + 1], token_columns={}),
                ),
            )
            loss = (
                (score - y) ** 2
                if recipe.config.loss_type == "regression"
                else -y * logsigmoid(score) - (1 - y) * logsigmoid(-score)
            )
            total, units = total + weight * loss, units + weight
    return total / units


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradient_are_those_of_the_equations(place, form, case):
    (weight, lora), recipe = CASES[case], FORMS[form]
    made, model = data(recipe, weight), stirred(load(place, lora=lora))
    theirs, gradients = dense.beside(place, model, scalar=True)
    wanted = expected(recipe, theirs, made)
    wanted.backward()
    assert ours(recipe, model, {}, made) == pytest.approx(float(wanted.detach()), rel=2e-5)
    assert dense.apart(model, gradients()) < 1e-4


def test_a_score_read_one_token_early_is_another_loss(place, monkeypatch):
    """Negative control."""
    made, recipe = data(FORMS["pair"], 1.0), FORMS["pair"]
    right = ours(recipe, load(place), {}, made)

    monkeypatch.setattr(rm, "ends", lambda batch: (documents.ends(batch) - 1).clamp(min=0))
    assert abs(ours(recipe, load(place), {}, made) - right) > 1e-2


def test_answers_of_a_conversation_are_scored_as_each_is_by_itself(place, characters):
    """A conversation is read once and has a score and a length for each of its answers. Negative control: if the
    score is read where tokens after the answer are visible, it differs."""
    messages = [*chat("a?", "b"), *chat("c?", "cab"), *chat("b?", "a")]
    for i, reward in ((1, 1.0), (3, 0.0), (5, 0.5)):
        messages[i]["reward"] = reward
    recipe, model = of_keys(RM, loss_type="binary"), load(place)
    ((whole,),) = recipe.encode({"messages": messages}, characters, "s")
    rows = [
        {"prompt": bare(messages[:i]), "completion": messages[i]["content"], "reward": messages[i]["reward"]}
        for i in (1, 3, 5)
    ]
    alone = [recipe.encode(row, characters, "s")[0] for row in rows]
    together, apart = (Batch.of([made], sum(map(length, made))) for made in ([(whole,)], alone))
    for name in ("score", "answer_length"):
        assert recipe.of_answers(together, name).tolist() == recipe.of_answers(apart, name).tolist()
    assert recipe.of_answers(together, "answer_length").tolist() == [2.0, 4.0, 2.0], "with the end of each turn"
    scores = recipe.scores(model, apart)
    assert recipe.scores(model, together).tolist() == pytest.approx(scores.tolist(), abs=1e-5)
    earlier = replace(
        together, loss_weights=together.loss_weights.roll(-1), trained_positions=together.trained_positions - 1
    )
    assert recipe.scores(model, earlier).tolist() != pytest.approx(scores.tolist(), abs=1e-3)
    assert float(recipe.denominator(together)) == float(recipe.denominator(apart)) == 3.0


def test_tokenized_data_without_scored_responses_are_refused(place):
    """Data of other recipes have none. A batch without documents is accepted."""
    recipe, model = of_keys(RM, loss_type="binary"), load(place)
    sample = data(recipe, 1.0)[0][0]

    def loss_of(**changes: Any) -> float:
        batch = Batch.of([[(replace(sample, **changes),)]], len(sample))
        return float(recipe.loss(model, batch, {})[0])

    with pytest.raises(UserError, match="have no score at the end of each response: tokenize them again"):
        loss_of(token_columns={"score": sample.token_columns["score"]})
    assert loss_of(loss_weights=np.zeros(len(sample), np.float32), token_columns={}) == 0.0


def bare(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: m[key] for key in ("role", "content")} for m in messages]


def rated(*rewards: Any, role: str = "assistant") -> dict[str, Any]:
    messages = [m for _ in rewards for m in chat("a?", "b")]
    for message, reward in zip([m for m in messages if m["role"] == role], rewards, strict=True):
        message["reward"] = reward
    return {"messages": messages}


def chat(asked: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def characters(tmp_path_factory) -> Tokenizer:
    return character_tokenizer("abc?", tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(
    ("recipe", "row", "message"),
    [
        (of_keys(RM), {"prompt": "a?", "chosen": "b", "rejected": "b"}, "are the same"),
        (of_keys(RM), {"prompt": "a?", "chosen": "b"}, "needs `chosen` and `rejected`"),
        (of_keys(RM), {"chosen": "b", "rejected": "c"}, "without a `prompt`"),
        (of_keys(RM), {"prompt": "a?", "chosen": "b", "rejected": ""}, "empty"),
        (of_keys(RM), {"chosen": chat("a?", "b"), "rejected": chat("c?", "c")}, "different prompts"),
        (of_keys(RM, margin=True), {"prompt": "a?", "chosen": "b", "rejected": "c"}, "needs a number `margin`"),
        (of_keys(RM, loss_type="binary"), {"prompt": "a?", "completion": "b", "reward": 3}, "from 0 to 1"),
        (of_keys(RM, loss_type="regression"), {"prompt": "a?", "completion": "b", "reward": float("nan")}, "finite"),
        (
            of_keys(RM, loss_type="regression"),
            {"prompt": "a?", "completion": "b"},
            "needs `prompt`, `completion` and `reward`",
        ),
        (of_keys(RM, loss_type="binary"), rated(1, 0, -1), "from 0 to 1, not -1"),
        (
            of_keys(RM, loss_type="regression"),
            rated(1, "good"),
            "message 3: `reward` must be a finite number, not 'good'",
        ),
        (of_keys(RM, loss_type="regression"), rated(None, None), "no message of the assistant's has a `reward`"),
        (
            of_keys(RM, loss_type="regression"),
            rated(1, role="user"),
            r"message 0 \(user\) has a `reward`, but only what the assistant says",
        ),
        (of_keys(RM, loss_type="regression"), {"messages": rated(1)["messages"][1:]}, "the assistant speaks first"),
    ],
)
def test_rows_that_cannot_be_compared_or_scored_are_refused(characters, recipe, row, message):
    with pytest.raises(UserError, match=message):
        recipe.encode(row, characters, "a")
