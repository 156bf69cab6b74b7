"""Agents that use the Responses API of the unmodified SDK: what they get, and what of it is trained."""

import json

import httpx
import openai
import pytest

from ptf.data.trajectory import group_into_documents, samples_of
from ptf.rl.endpoint.http_message import HttpError
from ptf.rl.endpoint.responses import messages_of
from tests.rl.endpoint.served import Broken, Scripted, played

PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOL = {"type": "function", "name": "lookup", "description": "looks up a place", "parameters": PARAMETERS}
CALL = '<tool_call>\n{"name":  "lookup", "arguments": {"place":"Denver"}}\n</tool_call>'
THOUGHT = "<think>\nIt must be looked up.\n</think>\n\n"


async def streamed(client, **body):
    """The final response of a stream, which the SDK checks event by event, and the types of its events."""
    async with client.responses.stream(**body) as stream:
        kinds = [event.type async for event in stream]
        return await stream.get_final_response(), kinds


async def asked(client, stream, **body):
    return (await streamed(client, **body))[0] if stream else await client.responses.create(**body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_turns_with_a_function_become_one_sample(tokenizer, stream, by_id):
    texts = [THOUGHT + "A moment. " + CALL, "It is sunny.", "Not at all."]
    engine = Scripted(tokenizer, texts.__getitem__)

    async def agent(served):
        client, items, previous = served.client(), [], None
        said = []
        new = [{"role": "user", "content": [{"type": "input_text", "text": "How is it in Denver?"}]}]
        for _ in texts:
            items += new
            more = {"previous_response_id": previous, "input": new} if by_id else {"input": items}
            made = await asked(client, stream, model="policy", tools=[TOOL], instructions="Be brief.", **more)
            said.append(made)
            items += [item.model_dump(exclude_none=True) for item in made.output]
            previous = made.id
            calls = [item for item in made.output if item.type == "function_call"]
            new = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
            new = new or [{"role": "user", "content": "Thank you."}]
        return said

    served, t = played(agent, engine, tokenizer)
    first, second, _ = served.result
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert json.loads(first.output[2].arguments) == {"place": "Denver"}
    assert first.output[0].content[0].text == "It must be looked up."
    assert (second.output_text, second.status, second.usage.output_tokens_details.reasoning_tokens) == (
        "It is sunny.",
        "completed",
        0,
    )
    thinking = tokenizer.decode(t.generations[0].sampled_ids[: first.usage.output_tokens_details.reasoning_tokens])
    assert thinking.strip() == THOUGHT.strip()
    assert group_into_documents(t.generations) == [[0, 1, 2]]
    (sample,) = samples_of(t)
    assert sample.loss_weights.sum() == t.num_sampled_tokens
    assert "Be brief." in tokenizer.decode(sample.tokens)
    assert (t.counts["history_reencoded"], t.counts["undelivered"]) == (0, 0)


def test_chat_completions_and_responses_are_one_session(tokenizer):
    engine = Scripted(tokenizer, lambda i: f"answer {i}")

    async def agent(served):
        client = served.client()
        made = await client.responses.create(model="policy", input="hello")
        messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": made.output_text}]
        await client.chat.completions.create(model="policy", messages=[*messages, {"role": "user", "content": "on"}])

    _, t = played(agent, engine, tokenizer)
    assert group_into_documents(t.generations) == [[0, 1]]


def test_the_events_of_a_stream(tokenizer):
    engine = Scripted(tokenizer, lambda i: THOUGHT + "Yes. " + CALL)

    async def agent(served):
        return await streamed(served.client(), model="policy", input="?", tools=[TOOL])

    served, _ = played(agent, engine, tokenizer)
    kinds = [kind.removeprefix("response.") for kind in served.result[1]]
    assert list(dict.fromkeys(kinds)) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_text.delta",
        "output_text.done",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "completed",
    ]
    assert kinds.count("output_item.added") == kinds.count("output_item.done") == 3


def test_an_answer_at_the_limit_is_incomplete(tokenizer):
    engine = Scripted(tokenizer, lambda i: "word " * 50)

    async def agent(served):
        client, body = served.client(), {"model": "policy", "input": "?", "max_output_tokens": 5}
        whole = await client.responses.create(**body)
        events = [event async for event in await client.responses.create(**body, stream=True)]
        return whole, events[-1]

    served, _ = played(agent, engine, tokenizer)
    whole, last = served.result
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == whole.max_output_tokens == last.response.max_output_tokens == 5
    assert (last.type, last.response.output_text) == ("response.incomplete", whole.output_text)


def test_what_is_cut_is_not_trained_and_retries_take_the_same_answer(tokenizer):
    engine = Scripted(tokenizer, lambda i: f"answer {i}", pause_s=0.02)

    async def agent(served):
        headers = {"authorization": f"Bearer {served.session.agent_key}"}
        body = {"model": "policy", "input": "?", "stream": True}
        async with httpx.AsyncClient(headers=headers) as client:
            async with client.stream("POST", f"{served.url}/responses", json=body) as response:
                await anext(response.aiter_bytes())
            again = await client.post(f"{served.url}/responses", json=body)
            other = await client.post(f"{served.url}/responses", json={**body, "input": "!"}, timeout=10)
        return again.text, other.text

    served, t = played(agent, engine, tokenizer)
    assert "answer 0" in served.result[0]
    assert "answer 1" in served.result[1]
    assert (len(engine.asked), len(t.generations), served.session.counts["retries"]) == (2, 2, 1)


def test_an_engine_that_fails_ends_the_stream_with_an_error(tokenizer):
    async def agent(served):
        client = served.client(max_retries=0)
        with pytest.raises(openai.APIError, match="the engine failed: RuntimeError"):
            [event async for event in await client.responses.create(model="policy", input="?", stream=True)]

    with pytest.raises(RuntimeError, match="the device is away"):
        played(agent, Broken(tokenizer), tokenizer)


REFUSED = {
    "background": True,
    "conversation": "conv_1",
    "include": ["message.output_text.logprobs"],
    "input": [],
    "instructions": 5,
    "max_output_tokens": 0,
    "frequency_penalty": 0.5,
    "presence_penaltyy": 0,
    "n": 2,
    "previous_response_id": "resp_7",
    "reasoning": {"effort": "high"},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}},
    "tool_choice": "required",
    "tools": [{"type": "web_search"}],
    "top_logprobs": 2,
    "truncation": "auto",
}


def test_what_is_not_supported_is_refused_by_name(tokenizer):
    engine = Scripted(tokenizer)

    async def agent(served):
        headers = {"authorization": f"Bearer {served.session.agent_key}"}
        found = {}
        async with httpx.AsyncClient(headers=headers) as client:
            for name, value in REFUSED.items():
                body = {"model": "policy", "input": "?", name: value}
                found[name] = await client.post(f"{served.url}/responses", json=body)
        return found

    served, _ = played(agent, engine, tokenizer)
    for name, response in served.result.items():
        assert response.status_code == (404 if name == "previous_response_id" else 400), name
        assert "no response 'resp_7'" in response.text if name == "previous_response_id" else name in response.text
    assert engine.asked == []


def test_a_response_that_is_not_stored_cannot_be_continued(tokenizer):
    engine = Scripted(tokenizer)

    async def agent(served):
        client = served.client()
        made = await client.responses.create(model="policy", input="?", store=False)
        with pytest.raises(openai.NotFoundError, match="has stored no response"):
            await client.responses.create(model="policy", input="?", previous_response_id=made.id)

    played(agent, engine, tokenizer)


WRONG = [
    5,
    [5],
    [{"role": "robot", "content": "a"}],
    [{"role": "user"}],
    [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
    [{"type": "function_call", "name": "a", "arguments": "{}"}],
    [{"type": "function_call_output", "output": "a"}],
    [{"type": "item_reference", "id": "msg_1"}],
    [{"type": "reasoning", "summary": []}, {"role": "user", "content": "a"}, {"type": "reasoning", "content": "b"}],
    [{"type": "reasoning", "content": "b"}, {"role": "user", "content": "a"}],
]


@pytest.mark.parametrize("items", WRONG)
def test_items_that_are_not_supported_are_refused(items):
    with pytest.raises(HttpError, match="input"):
        messages_of(items)
