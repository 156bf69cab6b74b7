"""How an exchange is answered over HTTP: in the form of a chat completion or of a response, whole or as a stream."""

import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from ptf.rl.endpoint.http_message import HttpError, HttpResponse
from ptf.rl.endpoint.request_exchange import Exchange


class Form(Protocol):
    """The form in which an exchange is answered: its own (chat completions), or a ResponseForm."""

    def completion(self) -> dict[str, Any]:
        """Return the whole reply of an exchange that is done."""
        ...

    def events(self, deliver: Callable[[], None]) -> AsyncGenerator[bytes]:
        """Yield the reply in pieces, from the beginning; `deliver` is called before the last of them is written."""
        ...

    def failure_event(self, message: str) -> bytes:
        """Return the event that ends a stream whose engine failed."""
        ...


async def answered(
    exchange: Exchange, form: Form, deliver: Callable[[], None] | None = None, lose: Callable[[], None] | None = None
) -> HttpResponse:
    """Return the HTTP response to a request. `deliver` is called before its last bytes are written, and `lose` if the
    client did not receive them. Raises HttpError if the engine fails."""
    if exchange.chat.stream:
        events = _until_failure(form, deliver or (lambda: None))
        return HttpResponse(200, events, "text/event-stream", {"cache-control": "no-cache"}, lost=lose)
    try:
        await exchange.finished()
    except HttpError:
        raise
    except Exception as error:
        raise HttpError(500, _failure(error)) from error
    body = json.dumps(form.completion(), ensure_ascii=False).encode()
    return HttpResponse(200, body, sending=deliver, lost=lose)


async def _until_failure(form: Form, deliver: Callable[[], None]) -> AsyncGenerator[bytes]:
    """Yield the events of a form; one that says why is the last if the engine fails."""
    try:
        async with contextlib.aclosing(form.events(deliver)) as parts:
            async for part in parts:
                yield part
    except ConnectionAbortedError:
        raise
    except Exception as error:
        yield form.failure_event(_failure(error))


def _failure(error: Exception) -> str:
    return str(error) if isinstance(error, HttpError) else f"the engine failed: {type(error).__name__}"
