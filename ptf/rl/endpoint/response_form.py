"""How an exchange is answered over HTTP: in its own form, that of a chat completion, or in that of the Responses API;
whole, or as the events of a stream."""

import bisect
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from ptf.rl.endpoint.answer_stream import ENDS
from ptf.rl.endpoint.chat import event
from ptf.rl.endpoint.http_message import HttpError, HttpResponse, json_response
from ptf.rl.endpoint.request_exchange import Exchange
from ptf.rl.endpoint.responses import Message, ResponsesRequest

PARTS = {"message": "output_text", "reasoning": "reasoning_text"}  # type of an item → type of its one part


def response(request: ResponsesRequest, exchange: Exchange, done: bool = True) -> dict[str, Any]:
    """Return the whole response; if it is not `done`, what a stream begins with."""
    sampling = exchange.policy.limits.sampling
    cut = done and exchange.choices[0].finish_reason == "length"
    return {
        "id": f"resp_{exchange.number}",
        "object": "response",
        "created_at": exchange.created,
        "status": "incomplete" if cut else "completed" if done else "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": exchange.chat.model,
        "output": output(exchange) if done else [],
        "store": request.store,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "usage": usage(exchange) if done else None,
        **request.echo,
    }


def usage(exchange: Exchange) -> dict[str, Any]:
    """Return the numbers of tokens. Tokens that an engine had cached are not counted apart."""
    counts, choice, thinking = exchange.usage(), exchange.choices[0], 0
    if choice.call is not None and choice.message.get("reasoning_content"):
        ids, decode = choice.call.generation.sampled_ids, choice.policy.tokenizer.decode
        # with the token that ends the thinking
        length = bisect.bisect_left(range(1, len(ids) + 1), True, key=lambda n: ENDS in decode(ids[:n])) + 1
        thinking = min(len(ids), length)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thinking},
        "total_tokens": counts["total_tokens"],
    }


def output(exchange: Exchange) -> list[dict[str, Any]]:
    """Return the items of a response: its reasoning, its text and its function calls, as far as it has them."""
    choice = exchange.choices[0]
    message = choice.message
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    items = []
    if message.get("reasoning_content"):
        items.append(_item("reasoning", exchange.number, status, message["reasoning_content"]))
    if message.get("content") is not None:
        items.append(_item("message", exchange.number, status, message["content"]))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        made = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
        items.append({**made, "name": function["name"], "arguments": function["arguments"]})
    return items


def _item(kind: str, number: int, status: str, text: str | None = None) -> dict[str, Any]:
    """Return an item of text; None: it has none yet."""
    content = [] if text is None else [_part(kind, text)]
    if kind == "reasoning":
        return {"type": kind, "id": f"rs_{number}", "status": status, "summary": [], "content": content}
    return {"type": kind, "id": f"msg_{number}", "status": status, "role": "assistant", "content": content}


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": PARTS[kind], "text": text, **({"annotations": [], "logprobs": []} if kind == "message" else {})}


class ResponseForm:
    """The response that an exchange becomes, whole or as one stream of events, numbered from 0.

    `conversations` keeps those that a later request may continue: id → messages up to the response.
    """

    def __init__(
        self, request: ResponsesRequest, exchange: Exchange, conversations: MutableMapping[str, Sequence[Message]]
    ) -> None:
        self.request, self.exchange, self.conversations = request, exchange, conversations
        self.numbers = itertools.count()
        self.texts: dict[str, str] = {}  # kind of each item of text that has begun → its text; the last one is open

    def completion(self) -> dict[str, Any]:
        """Return the whole reply of an exchange that is done."""
        self._store()
        return response(self.request, self.exchange)

    def _store(self) -> None:
        if self.request.store:
            self.conversations[f"resp_{self.exchange.number}"] = [
                *self.request.messages,
                self.exchange.choices[0].message,
            ]

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the reply in pieces, from the beginning. Raises as `Exchange.finished`."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=response(self.request, self.exchange, done=False))
        async with contextlib.aclosing(self.exchange.news()) as chunks:
            async for chunk in chunks:
                delta = chunk["delta"]
                for kind, text in (("reasoning", delta.get("reasoning_content")), ("message", delta.get("content"))):
                    for part in self._text(kind, text) if text else ():
                        yield part
        for part in self._end():
            yield part
        self._store()

    def failure_event(self, message: str) -> bytes:
        """Return the event that ends a stream whose engine failed."""
        error = {"message": message, "type": "server_error", "code": None, "param": None}
        return self._event("error", **error, error=error)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return f"event: {kind}\n".encode() + event({**fields, "type": kind, "sequence_number": next(self.numbers)})

    def _text(self, kind: str, text: str) -> Iterator[bytes]:
        if kind not in self.texts:
            for before, whole in list(self.texts.items())[-1:]:
                yield from self._finish(_item(before, self.exchange.number, "completed", whole))
            yield from self._begin(kind)
        self.texts[kind] += text
        more = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{PARTS[kind]}.delta", **self._place(kind), delta=text, **more)

    def _place(self, kind: str) -> dict[str, Any]:
        """Return where the one part of an item of text is."""
        index = list(self.texts).index(kind)
        return {"item_id": _item(kind, self.exchange.number, "")["id"], "output_index": index, "content_index": 0}

    def _begin(self, kind: str) -> Iterator[bytes]:
        index, item = len(self.texts), _item(kind, self.exchange.number, "in_progress")
        self.texts[kind] = ""
        yield self._event("response.output_item.added", output_index=index, item=item)
        yield self._event("response.content_part.added", **self._place(kind), part=_part(kind, ""))

    def _finish(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        kind, part = item["type"], item["content"][0]
        place = self._place(kind)
        more = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{PARTS[kind]}.done", **place, text=part["text"], **more)
        yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _end(self) -> Iterator[bytes]:
        """Yield what is left when sampling has ended: the open item, the function calls, and the response object."""
        whole = response(self.request, self.exchange)
        for index, item in enumerate(whole["output"]):
            kind = item["type"]
            if kind == "function_call":
                begun = {**item, "arguments": "", "status": "in_progress"}
                place, arguments = {"item_id": item["id"], "output_index": index}, item["arguments"]
                name, said = item["name"], "response.function_call_arguments"
                yield self._event("response.output_item.added", output_index=index, item=begun)
                yield self._event(f"{said}.delta", **place, delta=arguments)
                yield self._event(f"{said}.done", **place, name=name, arguments=arguments)
                yield self._event("response.output_item.done", output_index=index, item=item)
            elif kind not in self.texts or kind == list(self.texts)[-1]:  # the open one, or an empty text
                yield from self._begin(kind) if kind not in self.texts else ()
                yield from self._finish(item)
        kind = "incomplete" if whole["incomplete_details"] else "completed"
        yield self._event(f"response.{kind}", response=whole)


async def http_response(
    exchange: Exchange,
    asked: ResponsesRequest | None,
    conversations: MutableMapping[str, Sequence[Message]],
    deliver: Callable[[], None] = lambda: None,
    lose: Callable[[], None] = lambda: None,
) -> HttpResponse:
    """Return the HTTP response to a request for chat completions, or to what was `asked` for as one.

    `conversations` keeps what a later request may continue. `deliver` is called before the last bytes are written, and
    `lose` if the client did not receive them. Raises HttpError if the engine fails.
    """
    form = exchange if asked is None else ResponseForm(asked, exchange, conversations)
    if exchange.chat.stream:
        answer = HttpResponse(200, _until_failure(form), "text/event-stream", {"cache-control": "no-cache"})
    else:
        await exchange.finished()
        answer = json_response(form.completion())
    return replace(answer, sending=deliver, lost=lose)


async def _until_failure(form: Exchange | ResponseForm) -> AsyncGenerator[bytes]:
    """Yield the events of a form; one that says why is the last if the engine fails."""
    try:
        async with contextlib.aclosing(form.events()) as parts:
            async for part in parts:
                yield part
    except HttpError as error:
        yield form.failure_event(str(error))
