"""`ptf chat` serves a checkpoint as it was trained: by its template, and as transformers would answer."""

import io

import pytest
import torch
from transformers import AutoModelForCausalLM

from ptf import cli, storage
from ptf.data.character_tokenizer import character_tokenizer
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.serving.conversation import Chat
from ptf.storage import published_versions
from tests.tiny import SIZES, checkpoint, configured


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = character_tokenizer("0123456789+=", directory)
    checkpoint(directory, vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_ids[0])
    return str(directory)


def test_a_conversation_goes_on_from_what_was_said(model):
    chat = Chat(model, system="1+1=2", max_new_tokens=8, temperature=0.0)
    tokenizer, theirs = Tokenizer.load(model), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    messages = [{"role": "system", "content": "1+1=2"}]
    for text in ("2+2=", "3+3="):
        messages.append({"role": "user", "content": text})
        ids = torch.tensor([tokenizer.render(messages, True)])
        out = theirs.generate(
            ids, max_new_tokens=8, do_sample=False, eos_token_id=list(tokenizer.stop_ids), pad_token_id=0
        )[0, ids.shape[1] :].tolist()
        expected = tokenizer.decode([i for i in out if i not in tokenizer.stop_ids])
        assert chat.answer(text) == expected
        messages.append({"role": "assistant", "content": expected})
    assert chat.messages == messages
    chat.forget()
    assert chat.messages == messages[:1]


def test_lines_of_a_pipe_are_answered_by_the_published_version(model, tmp_path, monkeypatch, capsys):
    root = str(tmp_path / "published")
    storage.upload(model, f"{root}/v1")
    storage.commit(f"{root}/v1", {"version": "v1"})
    assert published_versions.point(root, "v1", None)
    told = []
    for where in (root, model):
        monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n\n/new\n1+1=\n"))
        assert cli.main(["chat", where, "--max-new-tokens", "5", "--seed", "3"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert len(told[0].splitlines()) == 2
    assert Chat(model, temperature=1.0, seed=1, max_new_tokens=5).answer("1+1=") == Chat(
        model, temperature=1.0, seed=1, max_new_tokens=5
    ).answer("1+1=")


def test_what_is_too_long_is_said_and_forgotten(model, monkeypatch, capsys):
    chat = Chat(model, max_new_tokens=SIZES["max_position_embeddings"] - 20)
    with pytest.raises(
        UserError, match=r"tokens and up to \d+ tokens of response are more than the \d+ that the model"
    ):
        chat.answer("1+1=" * 20)
    assert chat.messages == []
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n"))
    assert cli.main(["chat", model, "--max-new-tokens", "100000"]) == 2
    assert "that the model can read" in capsys.readouterr().err


def test_without_a_number_a_response_has_what_the_model_can_still_read(model, monkeypatch):
    limit, chat, asked = SIZES["max_position_embeddings"], Chat(model), []
    answer = chat.engine.answer

    def recorded(requests):
        asked.append((len(requests[0].context), requests[0].sampling.max_new_tokens))
        return answer(requests)

    monkeypatch.setattr(chat.engine, "answer", recorded)
    for longest in (5, limit):
        monkeypatch.setattr("ptf.serving.conversation.LONGEST", longest)
        chat.forget()
        chat.answer("1+1=")
    context = asked[0][0]
    assert asked == [(context, 5), (context, limit - context)]
    chat.forget()
    with pytest.raises(UserError, match=f"more than the {limit} that the model can read"):
        chat.answer("1" * limit)


def test_what_cannot_speak_is_refused(model, tmp_path, capsys):
    scorer = tmp_path / "scorer"
    storage.upload(model, str(scorer))
    configured(scorer, architectures=["Qwen3ForSequenceClassification"])
    assert cli.main(["chat", str(scorer)]) == 2
    assert "is a reward model: it scores responses, and cannot generate them" in capsys.readouterr().err
    assert cli.main(["chat", str(tmp_path / "nowhere")]) == 2
    assert "there is no directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["chat", model, "--temperature", "warm"])
    assert "'warm' is not a number from 0 to 10" in capsys.readouterr().err
