"""What an agent gets over HTTP, and what of it is trained."""

import asyncio
import json

import httpx
import numpy as np
import openai
import pytest

from ptf.data.trajectory import NoResult, Reward, group_into_documents, samples_of
from tests.data.templates import templated
from tests.rl.endpoint.served import Broken, Scripted, played, said, user

PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOL = {
    "type": "function",
    "function": {"name": "lookup", "description": "looks up a place", "parameters": PARAMETERS},
}
CALL = '<tool_call>\n{"name":  "lookup", "arguments": {"place":"Denver"}}\n</tool_call>'


def sampled(trajectory):
    return [generation.sampled_ids.tolist() for generation in trajectory.generations]


def trained(trajectory):
    """The texts of the samples' trained tokens."""
    return [s.tokens[s.loss_weights != 0].tolist() for s in samples_of(trajectory)]


def test_an_unmodified_agent_of_several_turns_becomes_one_sample(tokenizer):
    engine = Scripted(tokenizer, lambda i: f"answer {i}")

    async def agent(served):
        client, messages = served.client(), [user("hello")]
        for i in range(4):
            if i % 2:
                stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            else:
                made = await client.chat.completions.create(model="policy", messages=messages)
                text = made.choices[0].message.content
                assert (made.choices[0].finish_reason, made.system_fingerprint) == ("stop", "version-3")
            assert text == f"answer {i}"
            messages += [said(text), user("more")]

    _, t = played(agent, engine, tokenizer)
    assert t.outcome == Reward(1.0)
    assert group_into_documents(t.generations) == [[0, 1, 2, 3]]
    (sample,) = samples_of(t)
    assert sample.loss_weights.sum() == t.num_sampled_tokens
    assert tokenizer.decode(sample.tokens) == engine_text(engine, tokenizer, 3) + "answer 3<|im_end|>"
    assert t.counts == {
        "generations": 4,
        "sampling_overridden": 0,
        "undelivered": 0,
        "history_restored": 0,
        "history_reencoded": 0,
    }


def engine_text(engine, tokenizer, number):
    return tokenizer.decode(engine.asked[number].context)


def test_branches_and_sub_agents_are_trained_once_each(tokenizer):
    engine = Scripted(tokenizer, lambda i: f"answer {i}")

    async def agent(served):
        client = served.client()

        async def ask(messages):
            made = await client.chat.completions.create(model="policy", messages=messages)
            return [*messages, said(made.choices[0].message.content)]

        main = await ask([user("main")])
        sub = await ask([user("sub")])
        main = await ask([*main, user("on")])
        sub = await ask([*sub, user("on")])
        await ask([*main[:2], user("otherwise")])  # a branch after the first answer
        await asyncio.gather(ask([*main, user("a")]), ask([*sub, user("b")]))

    _, t = played(agent, engine, tokenizer)
    assert sorted(map(sorted, group_into_documents(t.generations))) == [[0, 2, 5], [1, 3, 6], [4]]
    tokens = sum(map(len, trained(t)))
    assert tokens == t.num_sampled_tokens == sum(map(len, sampled(t)))


def test_tool_calls_that_come_back_in_another_form_are_spliced(tokenizer):
    """The sampled text has spaces that no client sends back; what was sampled stays in the context."""
    engine = Scripted(tokenizer, lambda i: CALL if i == 0 else "It is sunny.")

    async def agent(served):
        client, messages = served.client(), [user("How is it in Denver?")]
        made = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = made.choices[0].message
        assert (made.choices[0].finish_reason, message.content) == ("tool_calls", None)
        assert json.loads(message.tool_calls[0].function.arguments) == {"place": "Denver"}
        result = {"role": "tool", "content": "sunny", "tool_call_id": message.tool_calls[0].id}
        again = [*messages, message.model_dump(exclude_none=True), result]
        made = await client.chat.completions.create(model="policy", messages=again, tools=[TOOL])
        return made.choices[0].message.content

    served, t = played(agent, engine, tokenizer)
    assert served.result == "It is sunny."
    assert group_into_documents(t.generations) == [[0, 1]]
    assert CALL in engine_text(engine, tokenizer, 1)
    assert (t.counts["history_restored"], t.counts["history_reencoded"]) == (1, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_sampling_ends_with_the_token_that_completes_a_stop_string(tokenizer, stream):
    engine = Scripted(tokenizer, lambda i: "one two END three")

    async def agent(served):
        client = served.client()
        made = await client.chat.completions.create(
            model="policy", messages=[user("a")], stop=["END", "xyz"], stream=stream
        )
        if not stream:
            return made.choices[0].message.content, made.choices[0].finish_reason
        chunks = [chunk.choices[0] async for chunk in made]
        return "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason

    served, t = played(agent, engine, tokenizer)
    assert served.result == ("one two ", "stop")
    (generation,) = t.generations
    text = tokenizer.decode(generation.sampled_ids)
    assert text.endswith("END")
    assert "END" not in tokenizer.decode(generation.sampled_ids[:-1])
    assert t.complete


def test_a_repeated_request_whose_answer_was_not_received_is_answered_once(tokenizer):
    engine = Scripted(tokenizer, lambda i: f"answer {i}", pause_s=0.02)

    async def agent(served):
        url = f"{served.url}/chat/completions"
        headers = {"authorization": f"Bearer {served.session.agent_key}"}
        body = {"model": "policy", "messages": [user("a")]}
        async with httpx.AsyncClient(headers=headers) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(url, json=body, timeout=0.03)
            first = (await client.post(url, json=body, timeout=10)).json()
            second = (await client.post(url, json=body, timeout=10)).json()  # after full delivery: a new call
            declared = (await client.post(url, json=body, headers={"x-stainless-retry-count": "1"}, timeout=10)).json()
        return [made["choices"][0]["message"]["content"] for made in (first, second, declared)]

    served, t = played(agent, engine, tokenizer)
    assert served.result == ["answer 0", "answer 1", "answer 1"]
    assert len(engine.asked) == len(t.generations) == 2
    assert served.session.counts["retries"] == 2


def test_what_no_client_received_is_not_trained_and_no_context(tokenizer):
    engine = Scripted(tokenizer, lambda i: f"answer {i} " * 40, pause_s=0.002)

    async def agent(served):
        headers = {"authorization": f"Bearer {served.session.agent_key}"}
        body = {"model": "policy", "messages": [user("a")], "stream": True}
        url = f"{served.url}/chat/completions"
        async with httpx.AsyncClient(headers=headers) as client, client.stream("POST", url, json=body) as response:
            await anext(response.aiter_bytes())  # cut in the middle
        await served.client().chat.completions.create(model="policy", messages=[user("b")])
        await asyncio.sleep(0.2)

    _, t = played(agent, engine, tokenizer)
    assert len(engine.asked) == 2
    assert ["answer 1" in tokenizer.decode(g.sampled_ids) for g in t.generations] == [True]
    assert t.counts["undelivered"] == 1


def test_several_choices_have_one_context_and_their_own_seeds(tokenizer):
    engine = Scripted(tokenizer, lambda i: f"answer {i}")

    async def agent(served):
        made = await served.client().chat.completions.create(model="policy", messages=[user("a")], n=3, logprobs=True)
        assert [len(choice.logprobs.content) for choice in made.choices] == [
            len(engine.tokenizer.encode(choice.message.content)) + 1 for choice in made.choices
        ]
        return [choice.message.content for choice in made.choices]

    served, t = played(agent, engine, tokenizer)
    assert served.result == ["answer 0", "answer 1", "answer 2"]
    assert group_into_documents(t.generations) == [[0], [1], [2]]
    assert len({request.seed for request in engine.asked}) == 3


def test_bounds_keys_and_closed_sessions(tokenizer):
    engine = Scripted(tokenizer, lambda i: f"answer {i}")

    async def agent(served):
        session, base = served.session, f"http://127.0.0.1:{served.port}/s/{served.session.id}"
        keys = {"agent": session.agent_key, "scorer": session.scorer_key, "none": "x", "other": "x" * 22}
        body = {"model": "policy", "messages": [user("a")]}
        found = {}
        async with httpx.AsyncClient() as client:

            async def post(path, key, json=body, **headers):
                made = await client.post(
                    base + path, json=json, headers={"authorization": f"Bearer {keys[key]}", **headers}
                )
                return made.status_code

            for key in keys:
                found[key] = await post("/v1/chat/completions", key), await post("/reward", key, {"reward": 0.25})
            found["no number"] = [await post("/reward", "scorer", {"reward": r}) for r in ("1", None, True, 1e300)]
            found["host"] = await post("/v1/chat/completions", "agent", host="evil.example")
            found["session"] = (await client.post(base[:-3] + "abc/v1/chat/completions", json=body)).status_code
            found["model"] = await post("/v1/chat/completions", "agent", {**body, "model": "gpt-5"})
            found["large"] = await post("/v1/chat/completions", "agent", {**body, "user": "x" * (1 << 24)})
            found["second"] = await post("/v1/chat/completions", "agent", {**body, "n": 2})
            scorer = {"authorization": f"Bearer {session.scorer_key}"}
            closed = await client.post(f"{base}/close", headers=scorer)
            found["close"] = await post("/close", "agent"), closed.status_code, closed.json()
            found["after"] = await post("/v1/chat/completions", "agent")
        return found

    served, _ = played(agent, engine, tokenizer, generations=2)
    assert served.result == {
        "agent": (200, 401),
        "scorer": (401, 200),
        "none": (401, 401),
        "other": (401, 401),
        "no number": [400] * 4,
        "host": 403,
        "session": 404,
        "model": 404,
        "large": 413,
        "second": 429,
        "close": (401, 200, {"closed": True}),
        "after": 410,
    }
    assert served.session.reward == 0.25


def test_sampling_parameters_that_are_overridden_are_counted(tokenizer):
    """The job's own are sampled with; those that equal them override nothing."""
    engine = Scripted(tokenizer)

    async def agent(served):
        own = served.session.policy.limits.sampling
        for sampling in ({}, {"temperature": own.temperature + 0.5}, {"top_p": own.top_p}, {"top_p": own.top_p / 2}):
            await served.client().chat.completions.create(model="policy", messages=[user("a")], **sampling)

    _, t = played(agent, engine, tokenizer)
    assert (t.counts["generations"], t.counts["sampling_overridden"]) == (4, 2)
    assert len({request.sampling for request in engine.asked}) == 1


def test_no_room_is_a_length(tokenizer):
    engine = Scripted(tokenizer)

    async def agent(served):
        made = await served.client().chat.completions.create(model="policy", messages=[user("word " * 400)])
        return made.choices[0].finish_reason, made.choices[0].message.content

    served, t = played(agent, engine, tokenizer, length=300)
    assert served.result == ("length", "")
    assert t.generations == ()


@pytest.mark.parametrize(("asked", "complete"), [([3], True), ([3, 400], False), ([3, 400, 3], True)])
def test_an_episode_whose_last_request_has_no_room_is_not_complete(tokenizer, asked, complete):
    async def agent(served):
        for words in asked:
            await served.client().chat.completions.create(model="policy", messages=[user("word " * words)])

    _, t = played(agent, Scripted(tokenizer), tokenizer, length=300)
    assert t.complete is complete
    assert len(t.generations) == asked.count(3)


def test_an_engine_that_fails_ends_the_step_and_not_the_episode(tokenizer):
    async def agent(served):
        with pytest.raises(openai.InternalServerError):
            await served.client(max_retries=0).chat.completions.create(model="policy", messages=[user("a")])

    with pytest.raises(RuntimeError, match="the device is away"):
        played(agent, Broken(tokenizer), tokenizer)


def test_an_agent_that_raises_has_no_result(tokenizer):
    async def agent(served):
        await served.client().chat.completions.create(model="policy", messages=[user("a")])
        raise KeyError("price")

    _, t = played(agent, Scripted(tokenizer), tokenizer, raises=KeyError)
    assert isinstance(t.outcome, NoResult)
    assert "price" in t.outcome.reason
    assert np.concatenate(sampled(t)).size


def test_a_conversation_of_harmony_goes_on_in_new_samples(shared):
    """Its template writes calls in another form, and refuses channels in a message's content."""
    tokenizer = templated("gpt-oss", shared)
    answers = [
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}',
        "<|channel|>analysis<|message|>Now I know.<|end|><|start|>assistant<|channel|>final<|message|>It is 3.",
        "<|channel|>final<|message|>You are welcome.",
    ]
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": parameters}}]

    async def agent(served):
        messages, found = [user("1+2")], []
        for more in ([{"role": "tool", "content": "3", "tool_call_id": "x"}], [user("Thanks.")], []):
            made = await served.client().chat.completions.create(model="policy", messages=messages, tools=tools)
            found.append(made.choices[0].message)
            messages += [found[-1].model_dump(exclude_none=True), *more]
        return found

    play, t = played(agent, Scripted(tokenizer, answers.__getitem__), tokenizer, form="harmony")
    call, last, thanks = play.result
    assert (call.tool_calls[0].function.name, call.tool_calls[0].function.arguments) == ("add", '{"a": 1}')
    assert [message.reasoning_content for message in (call, last)] == ["I add.", "Now I know."]
    assert [message.content for message in (last, thanks)] == ["It is 3.", "You are welcome."]
    assert len(samples_of(t)) == len(answers)
    assert t.counts["history_reencoded"] > 0
