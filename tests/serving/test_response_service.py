"""What people and products get of a served model: the client's sampling, refusals by name, and no work for nobody."""

import asyncio
from pathlib import Path

import openai
import pytest

from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.rl.rewards.judge_reward import JudgePrompt, JudgeReward, UnreadableReply
from ptf.serving.conversation import Chat
from ptf.serving.public_endpoint import PublicEndpoint
from ptf.serving.served_model import ServedModel
from ptf.tasks.tiny import write_model
from tests.serving.serving import asked, chatting
from tests.tiny import checkpoint

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return chatting(tmp_path_factory.mktemp("serve") / "model")


def adapter_of(base: Path, directory: Path) -> Path:
    """A LoRA adapter with random weights, written by PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("adapted", [False, True])
def test_the_likeliest_answer_is_that_of_ptf_chat(model, tmp_path, adapted):
    where = adapter_of(model, tmp_path / "adapter") if adapted else model

    async def use(client, endpoint):
        body = {"model": "m", "messages": HELLO, "temperature": 0, "max_tokens": 12}
        answers = await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(3)))
        return {made.json()["choices"][0]["message"]["content"] for made in answers}

    answers = asked(where, use)
    assert answers == {Chat(str(where), max_new_tokens=12, temperature=0.0).answer("Hello")}
    assert not adapted or answers != {Chat(str(model), max_new_tokens=12, temperature=0.0).answer("Hello")}


@pytest.mark.parametrize(("alphabet", "text"), [("abcdefghijklmnopqrstuvwxyz ", "hello"), ("0123456789+=", "1")])
def test_the_request_that_is_suggested_is_answered(tmp_path, alphabet, text):
    write_model(tmp_path, alphabet)
    tokenizer = Tokenizer.load(str(tmp_path))
    checkpoint(tmp_path, max_position_embeddings=128, vocab_size=len(tokenizer.hf), eos_token_id=tokenizer.stop_ids[0])

    async def use(client, endpoint):
        path, body = endpoint.services[0].example()
        assert body["messages"][0]["content"] == text
        return (await client.post(path, json=body)).status_code

    assert asked(tmp_path, use, max_new_tokens=8) == 200


def test_what_the_client_asks_for_is_done(model):
    async def use(client, endpoint):
        async def answer(**body):
            made = (await client.post(CHAT, json={"messages": HELLO, "max_tokens": 30, **body})).json()
            return [choice["message"]["content"] for choice in made["choices"]], made

        first, again = (await answer(seed=7))[0], (await answer(seed=7))[0]
        assert first == again
        assert first != (await answer(seed=8))[0]
        assert (await answer(seed=7, top_p=1e-6))[0] == (await answer(seed=8, temperature=0))[0]
        assert len(set((await answer(seed=7, n=3))[0])) == 3
        texts, made = await answer(seed=7, max_tokens=5)
        assert (made["usage"]["completion_tokens"], made["choices"][0]["finish_reason"]) == (5, "length")
        stop = next(c for c in first[0] if c.isalpha())
        texts, made = await answer(seed=7, stop=stop)
        assert (texts[0], made["choices"][0]["finish_reason"]) == (first[0].partition(stop)[0], "stop")

    asked(model, use)


def test_the_sdk_speaks_to_it_with_a_key(model):
    async def use(client, endpoint):
        sdk = openai.AsyncOpenAI(base_url=endpoint.url, api_key="secret", timeout=20)
        (only,) = (await sdk.models.list()).data
        assert only.id == "m"
        stream = await sdk.chat.completions.create(model="m", messages=HELLO, seed=3, max_tokens=20, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        made = await sdk.responses.create(model="m", input="Hello", max_output_tokens=20, extra_body={"seed": 3})
        assert (made.output_text, made.temperature, made.store) == (text, 1.0, False)
        wrong = openai.AsyncOpenAI(base_url=endpoint.url, api_key="other", timeout=20, max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await wrong.models.list()
        with pytest.raises(openai.NotFoundError, match="there is no model"):
            await sdk.chat.completions.create(model="gpt", messages=HELLO)
        assert (await client.get("/health")).status_code == 200
        assert (await client.post(CHAT, json={"messages": HELLO})).status_code == 401
        assert (await client.get("/health", headers={"host": "evil.example"})).status_code == 403

    asked(model, use, key="secret")


def test_it_can_be_the_judge_of_a_reward(model, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")

    async def use(client, endpoint):
        judge = JudgeReward(
            url=endpoint.url,
            model="m",
            prompt="{prompt} {response}",
            api_key_env="JUDGE_KEY",
            max_tokens=12,
            score="(never said)",
            retries=0,
        )
        with pytest.raises(UnreadableReply) as caught:  # its weights are random
            await judge({"prompt": "1+1?"}, "2")
        return str(caught.value), judge.shown

    message = JudgePrompt("{prompt} {response}").filled({"prompt": "1+1?"}, "2", "")
    said = Chat(str(model), max_new_tokens=12, temperature=0.0).answer(message)
    reason, shown = asked(model, use, key="secret")
    assert reason.endswith(f"…{shown(said)}"), reason


REFUSED = {
    "logit_bias": {"5": 1},
    "max_tokens": 0,
    "messages": [],
    "min_p": 0.1,
    "response_format": {"type": "json_object"},
    "seed": "a",
    "temperature": 3,
    "top_k": 5,
    "top_p": 0,
}


def test_what_is_not_supported_is_refused_by_name(model):
    async def use(client, endpoint):
        for name, value in REFUSED.items():
            made = await client.post(CHAT, json={"messages": HELLO, name: value})
            assert (made.status_code, name in made.text) == (400, True), (name, made.text)
        made = await client.post("/v1/responses", json={"input": "a", "previous_response_id": "resp_1"})
        assert (made.status_code, "previous_response_id" in made.text) == (400, True)
        made = await client.post(CHAT, json={"messages": [{"role": "user", "content": "word " * 2000}]})
        assert (made.status_code, made.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "--max-length" in made.text
        assert (await client.post("/v1/score", json={})).status_code == 404
        assert (await client.get(CHAT)).status_code == 405
        assert (await client.post("/v1/models")).status_code == 405

    asked(model, use)


@pytest.mark.parametrize("stream", [False, True])
def test_sampling_ends_when_the_client_leaves(model, stream):
    async def use(client, endpoint):
        engine = endpoint.services[0].engine
        body = {"messages": HELLO, "max_tokens": 900, "stream": stream, "seed": 1}
        request = asyncio.create_task(client.post(CHAT, json=body))
        while not engine.stepper.waiting_requests:
            await asyncio.sleep(0.01)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        for _ in range(200):
            if not engine.stepper.waiting_requests and not endpoint.services[0].running:
                return len(engine.continuous.responses)
            await asyncio.sleep(0.05)
        return None

    assert asked(model, use) is not None


def test_what_cannot_be_served_is_refused(model, tmp_path):
    with pytest.raises(UserError, match=r"--host 0\.0\.0\.0: an address that other machines reach needs a key"):
        PublicEndpoint([], "m", host="0.0.0.0", port=0, key=None)
    with pytest.raises(UserError, match="--max-length 2000: the model reads 1024 tokens at most"):
        asked(model, None, max_length=2000)
    with pytest.raises(UserError, match="there is no directory"):
        asked(tmp_path / "nowhere", None)
    (tmp_path / "own").symlink_to(model)
    with pytest.raises(UserError, match="does not serve rankings and adapters; use --engine native"):
        asked(model, None, engine="vllm", catalogue="catalogue.json")
    own = ServedModel(str(chatting(tmp_path / "headed")), "m")
    (tmp_path / "headed" / "head.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"has components of its own \(head\.safetensors\)"):
        asked(own, None)
