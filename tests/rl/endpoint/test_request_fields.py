"""Fields of a request: without effect, neutral, or refused by name; and one tool call only."""

import json
from dataclasses import replace

import httpx
import pytest

from ptf.data.tool_calls import FORMATS
from ptf.rl.endpoint.answer_stream import AnswerStream
from ptf.rl.endpoint.chat import parse_chat
from ptf.rl.endpoint.http_message import HttpError
from tests.data.templates import templated
from tests.rl.endpoint.served import Scripted, played, user
from tests.rl.endpoint.test_session import CALL, TOOL

BODY = {"model": "policy", "messages": [user("a")]}
ACCEPTED = {
    **{"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "prompt_cache_key": "k"},
    **{"ignore_eos": False, "best_of": 1, "frequency_penalty": 0, "length_penalty": 1.0, "min_tokens": 0},
    **{"guided_json": None, "parallel_tool_calls": True, "response_format": {"type": "text"}},
}
REFUSED = {
    **{"guided_json": {}, "structured_outputs": {}, "allowed_token_ids": [1], "bad_words": ["a"], "min_tokens": 1},
    **{"ignore_eos": True, "stop_token_ids": [1], "length_penalty": 2, "best_of": 2, "chat_template": "x"},
    **{"documents": [{}], "continue_final_message": True, "reasoning_effort": "high", "max_token": 5},
    **{"chat_template_kwargs": {"tokenize": True}, "frequency_penalty": 0.5, "functions": [{}]},
    **{"logit_bias": {"5": 1}, "presence_penalty": 0.5, "response_format": {"type": "json_object"}},
    **{"top_logprobs": 2, "tool_choice": "required"},
}


def test_what_has_no_effect_is_accepted_and_all_else_is_refused_by_name() -> None:
    for name, value in ACCEPTED.items():
        parse_chat({**BODY, name: value})
    for name, value in REFUSED.items():
        with pytest.raises(HttpError) as caught:
            parse_chat({**BODY, name: value})
        assert (caught.value.status, caught.value.param) == (400, name)
    for name, hint in (("temprature", "did you mean temperature"), ("reasoning_effort", "; leave it out")):
        with pytest.raises(HttpError, match=hint):
            parse_chat({**BODY, name: 1})
    for argument in ("return_assistant_tokens_mask", "documents", "padding", "self", "not a name"):
        with pytest.raises(HttpError, match=argument) as caught:
            parse_chat({**BODY, "chat_template_kwargs": {argument: True}})
        assert caught.value.param == "chat_template_kwargs"
    for field in ({"messages": []}, {"tools": 1}, {"n": 0}, {"stop": [""]}):
        with pytest.raises(HttpError) as caught:
            parse_chat({**BODY, **field})
        assert json.loads(caught.value.response().body)["error"]["param"] == next(iter(field))
    assert HttpError(400, "", "invalid_text").param is None
    parse_chat({**BODY, "messages": [{**user("a"), "unknown": 1}]})


def test_arguments_of_the_template_reach_it_and_the_refusal_names_the_field() -> None:
    tokenizer = templated("plain")
    own = "{% if shout %}LOUD {% endif %}"
    tokenizer.hf.chat_template = own + str(tokenizer.hf.chat_template)
    engine = Scripted(tokenizer)

    async def agent(served):
        headers = {"authorization": f"Bearer {served.session.agent_key}"}
        async with httpx.AsyncClient(headers=headers) as client:
            more = [{}, {"chat_template_kwargs": {"shout": True}}, {"guided_json": {"type": "object"}}]
            return [await client.post(f"{served.url}/chat/completions", json={**BODY, **one}) for one in more]

    served, _ = played(agent, engine, tokenizer)
    assert [made.status_code for made in served.result] == [200, 200, 400]
    assert served.result[2].json()["error"]["param"] == "guided_json"
    quiet, loud = (tokenizer.decode(request.context) for request in engine.asked)
    assert loud == f"LOUD {quiet}"


@pytest.mark.parametrize("parallel", [True, False])
def test_without_parallel_calls_sampling_ends_with_the_first(parallel: bool) -> None:
    tokenizer = templated("plain")
    engine = Scripted(tokenizer, lambda i: f"{CALL}\n{CALL}" if i == 0 else "done")

    async def agent(served):
        create, messages = served.client().chat.completions.create, [user("a")]
        made = await create(model="policy", messages=messages, tools=[TOOL], parallel_tool_calls=parallel)
        message = made.choices[0].message
        assert made.choices[0].finish_reason == "tool_calls"
        messages += [message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "content": "sunny", "tool_call_id": one.id} for one in message.tool_calls]
        await create(model="policy", messages=messages, tools=[TOOL])
        return len(message.tool_calls)

    served, trajectory = played(agent, engine, tokenizer)
    first, second = trajectory.generations
    assert served.result == (2 if parallel else 1)
    assert tokenizer.decode(first.sampled_ids).count("<tool_call>") == served.result
    if not parallel:  # what was sampled begins the next context
        begun = [*first.context, *first.sampled_ids]
        assert second.context[: len(begun)].tolist() == begun


TEXTS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"s": "}</tool_call>"}}</tool_call>',
    "glm45": "<tool_call>f<arg_key>s</arg_key><arg_value>a</arg_value><arg_key>t</arg_key><arg_value>b</arg_value>"
    "</tool_call>",
    "qwen3_coder": "<function=f><parameter=s>a</parameter><parameter=t>b</parameter></function>",
    "llama3_json": '{"name": "f", "parameters": {"s": "}"}}',
}


def test_parameters_that_never_end_are_read_in_linear_time() -> None:
    parses, own = [], FORMATS["qwen3_coder"].parse

    def counted(text, tools):
        parses.append(text)
        return own(text, tools)

    tokenizer, form = templated("plain"), replace(FORMATS["qwen3_coder"], parse=counted)
    stream = AnswerStream(tokenizer, form, None, (), False, None, True)
    for token in tokenizer.encode("<function=f>" + "<parameter=a>}" * 200 + "</parameter></function>"):
        stream.feed(token)
    assert stream.stopped
    assert 0 < len(parses) < 10


@pytest.mark.parametrize("name", TEXTS)
def test_the_first_call_is_whole_when_sampling_ends(name: str) -> None:
    tokenizer, text = templated("plain"), TEXTS[name]
    stream = AnswerStream(tokenizer, FORMATS[name], None, (), False, None, True)
    for token in tokenizer.encode(f"{text}{text}"):
        stream.feed(token)
        if stream.stopped:
            break
    assert stream.text == text
    assert json.loads(FORMATS[name].parse(stream.text, None).tool_calls[0].arguments).keys() >= {"s"}
