"""Scores over HTTP are those that the reward model gives in training, whatever is asked beside them."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from ptf.config import loads
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.serving.served_model import ServedModel
from tests.serving.serving import asked, chatting
from tests.tiny import arithmetic

TURNS = [[{"role": "user", "content": f"is it {i}"}, {"role": "assistant", "content": "yes " * i}] for i in range(1, 6)]
SCORE = "/v1/score"


@pytest.fixture(scope="module")
def scorer(tmp_path_factory) -> Path:
    """A reward model with random weights."""
    directory = chatting(tmp_path_factory.mktemp("scores") / "model")
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "score"}, "pad_token_id": 0}
    (directory / "config.json").write_text(json.dumps(config))
    weight = torch.randn(1, config["hidden_size"], generator=torch.Generator().manual_seed(0))
    tensors = load_file(directory / "model.safetensors") | {"score.weight": weight}
    tensors.pop("lm_head.weight", None)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def by_transformers(scorer: Path, messages: list) -> float:
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(scorer), Tokenizer.load(str(scorer))
    ids = tokenizer.encode(tokenizer.render_text(messages, False).rstrip("\n"))
    return model(torch.tensor([ids])).logits.item()


def test_scores_are_those_of_transformers_and_do_not_depend_on_the_batch(scorer):
    async def use(client, endpoint):
        async def scores(**body):
            made = (await client.post(SCORE, json=body)).json()
            assert (made["object"], made["model"]) == ("scores", "m")
            return made["scores"]

        alone = [(await scores(messages=messages))[0] for messages in TURNS]
        assert await scores(model="m", messages=TURNS) == alone
        together = await asyncio.gather(*(scores(messages=messages) for messages in TURNS))
        assert [score for (score,) in together] == alone
        assert await scores(prompt="is it 2", response="yes yes ") == [alone[1]]
        several = await scores(prompt=TURNS[1][:1], response=["yes yes ", "no"])
        assert (several[0], len(several), several[1] != several[0]) == (alone[1], 2, True)
        assert len(set(alone)) == len(alone)
        return alone

    found = asked(scorer, use)
    assert found == pytest.approx([by_transformers(scorer, messages) for messages in TURNS], abs=1e-4)


WRONG = [
    {},
    {"messages": []},
    {"messages": [{"role": "user", "content": "a"}]},
    {"messages": TURNS[0], "prompt": "a", "response": "b"},
    {"prompt": "a"},
    {"prompt": "a", "response": 5},
    {"prompt": "a", "response": ["b", 5]},
    {"prompt": "a", "response": "b" * 3000},
    {"prompt": "a", "response": "b", "max_tokens": 5},
    {"messages": [TURNS[0], "a"]},
    {"messages": [TURNS[0]] * 1025},
]


def test_what_has_no_score_is_refused(scorer):
    async def use(client, endpoint):
        for body in WRONG:
            made = await client.post(SCORE, json=body)
            assert made.status_code == 400, (body, made.text)
            assert made.json()["error"]["message"]
        assert (await client.post(SCORE, json={"model": "gpt", "prompt": "a", "response": "b"})).status_code == 404
        assert (await client.post(SCORE, content=b"[")).status_code == 400
        assert (await client.post("/v1/chat/completions", json={"messages": TURNS[0][:1]})).status_code == 404
        assert (await client.post(SCORE, json={"prompt": "a", "response": "b"})).status_code == 200

    asked(scorer, use)


def test_a_head_that_is_not_stored_is_refused(scorer, tmp_path):
    headless = chatting(tmp_path / "model")
    (headless / "config.json").write_text((scorer / "config.json").read_text())
    with pytest.raises(UserError, match=r"it has no head\.weight"):
        asked(headless, None)
    with pytest.raises(UserError, match="does not serve models that score; use --engine native"):
        asked(scorer, None, engine="vllm")


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_head_of_the_users_own_is_served_if_it_has_one_output(tmp_path, outputs):
    directory = chatting(tmp_path / "headed")
    raw = arithmetic(tmp_path)
    raw["model"]["head"] = {"use": "tests.serving.own_head:Outputs", "args": {"outputs": outputs}}
    size = json.loads((directory / "config.json").read_text())["hidden_size"]
    own = {"head.project.weight": torch.zeros(outputs, size), "head.project.bias": torch.full((outputs,), 2.5)}
    save_file(own, directory / "head.safetensors")
    served = ServedModel(str(directory), "m", loads(yaml.safe_dump(raw)))

    async def use(client, endpoint):
        return (await client.post(SCORE, json={"prompt": "a", "response": ["b", "cd"]})).json()["scores"]

    if outputs == 1:
        assert asked(served, use) == [2.5, 2.5]
    else:
        with pytest.raises(UserError, match="has a head of its own with 2 outputs"):
            asked(served, use)
