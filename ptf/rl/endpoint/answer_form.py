"""How an exchange is answered over HTTP: in the form of a chat completion or of a response, whole or as a stream."""

import contextlib
from collections.abc import AsyncGenerator, Callable, MutableMapping, Sequence
from dataclasses import replace

from ptf.rl.endpoint.http_message import HttpError, HttpResponse, json_response
from ptf.rl.endpoint.request_exchange import Exchange
from ptf.rl.endpoint.response_form import ResponseForm
from ptf.rl.endpoint.responses import Message, ResponsesRequest


async def answered(
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
        events, headers = _until_failure(form, deliver), {"cache-control": "no-cache"}
        return HttpResponse(200, events, "text/event-stream", headers, lost=lose)
    await exchange.finished()
    return replace(json_response(form.completion()), sending=deliver, lost=lose)


async def _until_failure(form: Exchange | ResponseForm, deliver: Callable[[], None]) -> AsyncGenerator[bytes]:
    """Yield the events of a form; one that says why is the last if the engine fails."""
    try:
        async with contextlib.aclosing(form.events(deliver)) as parts:
            async for part in parts:
                yield part
    except HttpError as error:
        yield form.failure_event(str(error))
