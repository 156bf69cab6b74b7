"""How an exchange is answered over HTTP: in the form of a chat completion or of a response, whole or as a stream."""

import contextlib
import json
from collections.abc import AsyncGenerator, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ptf.rl.endpoint import chat as chat_completions
from ptf.rl.endpoint.chat import ChatRequest
from ptf.rl.endpoint.http_message import HttpError, HttpResponse
from ptf.rl.endpoint.request_exchange import Exchange
from ptf.rl.endpoint.response_form import ResponseEvents, response, response_id
from ptf.rl.endpoint.responses import Message, ResponsesRequest


class Form(Protocol):
    """The form in which a request is answered."""

    @property
    def chat(self) -> ChatRequest:
        """Return the request as one for chat completions."""
        ...

    def whole(self, exchange: Exchange) -> dict[str, Any]:
        """Return the whole reply to the request of an exchange that is done."""
        ...

    def events(self, exchange: Exchange, deliver: Callable[[], None]) -> AsyncGenerator[bytes]:
        """Yield the reply in pieces; `deliver` is called before the last of them is written. An engine that fails ends
        the stream with an error event."""
        ...


@dataclass(frozen=True, slots=True)
class ChatForm:
    """Chat completions."""

    chat: ChatRequest

    def whole(self, exchange: Exchange) -> dict[str, Any]:
        """See Form."""
        return exchange.completion()

    async def events(self, exchange: Exchange, deliver: Callable[[], None]) -> AsyncGenerator[bytes]:
        """See Form."""

        def failed(message: str) -> bytes:
            return chat_completions.event({"error": {"message": message, "type": "server_error", "code": None}})

        async with contextlib.aclosing(_until_failure(exchange.events(deliver), failed)) as parts:
            async for part in parts:
                yield part


@dataclass(frozen=True, slots=True)
class ResponsesForm:
    """Responses. `conversations` keeps those that a later request may continue: id → messages up to the response."""

    request: ResponsesRequest
    conversations: MutableMapping[str, Sequence[Message]]

    @property
    def chat(self) -> ChatRequest:
        """See Form."""
        return self.request.chat

    def whole(self, exchange: Exchange) -> dict[str, Any]:
        """See Form."""
        self._store(exchange)
        return response(self.request, exchange)

    async def events(self, exchange: Exchange, deliver: Callable[[], None]) -> AsyncGenerator[bytes]:
        """See Form."""
        events = ResponseEvents(self.request, exchange)

        def stored_and_delivered() -> None:
            self._store(exchange)
            deliver()

        async with contextlib.aclosing(_until_failure(events.events(stored_and_delivered), events.failed)) as parts:
            async for part in parts:
                yield part

    def _store(self, exchange: Exchange) -> None:
        if self.request.store:
            self.conversations[response_id(exchange)] = [*self.request.messages, exchange.choices[0].message]


async def _until_failure(events: AsyncGenerator[bytes], failed: Callable[[str], bytes]) -> AsyncGenerator[bytes]:
    """Yield events; what `failed` makes of the reason is the last one if the engine fails."""
    try:
        async with contextlib.aclosing(events) as parts:
            async for part in parts:
                yield part
    except ConnectionAbortedError:
        raise
    except Exception as error:
        yield failed(_failure(error))


def _failure(error: Exception) -> str:
    return str(error) if isinstance(error, HttpError) else f"the engine failed: {type(error).__name__}"


async def answered(
    exchange: Exchange, form: Form, deliver: Callable[[], None] | None = None, lose: Callable[[], None] | None = None
) -> HttpResponse:
    """Return the HTTP response to a request. `deliver` is called before its last bytes are written, and `lose` if the
    client did not receive them. Raises HttpError if the engine fails."""
    if form.chat.stream:
        events = form.events(exchange, deliver or (lambda: None))
        return HttpResponse(200, events, "text/event-stream", {"cache-control": "no-cache"}, lost=lose)
    try:
        await exchange.finished()
    except HttpError:
        raise
    except Exception as error:
        raise HttpError(500, _failure(error)) from error
    body = json.dumps(form.whole(exchange), ensure_ascii=False).encode()
    return HttpResponse(200, body, sending=deliver, lost=lose)
