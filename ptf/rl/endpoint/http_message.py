"""Requests, answers and refusals of the HTTP server."""

import hmac
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ptf.data.tool_calls.json_text import is_encodable


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request with its whole body, or one that is refused whatever its body is."""

    method: str
    path: str  # without the query
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    connected: Callable[[], bool] = lambda: True  # whether its client still waits
    settle: Callable[[], None] = lambda: None  # call `lost` of answers that are known by now not to have arrived
    refusal: "HttpError | None" = None

    def has_key(self, key: str) -> bool:
        """Return whether the request has this API key; the comparison takes the same time for every other key."""
        given = self.headers.get("authorization", "").removeprefix("Bearer ").strip()
        return hmac.compare_digest(given.encode(), key.encode())

    def json_object(self) -> dict[str, Any]:
        """Return the object in the body. Raises HttpError (400) if there is none, or if a text in it is none."""
        try:
            given = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise HttpError(400, f"the body is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise HttpError(400, "the body must be an object")
        if b"\\ud" in self.body.lower() and not is_encodable(json.dumps(given, ensure_ascii=False)):
            raise HttpError(400, "the body has half of a surrogate pair, which is no character", "invalid_text")
        return given


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An answer to a request.

    `sending` is called before the last bytes are written: of a body in parts, when it has ended. It may raise OSError,
    which closes the connection without them. `lost` is called once after it, if the client did not receive them.
    """

    status: int
    body: bytes | AsyncGenerator[bytes]
    content_type: str = "application/json"
    headers: Mapping[str, str] | None = None
    sending: Callable[[], None] = lambda: None
    lost: Callable[[], None] = lambda: None


NO_FIELDS = ("invalid_messages", "invalid_text", "context_length_exceeded")  # codes of refused requests


class HttpError(Exception):
    """A request that is refused, with the status and the reason that the client gets."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.param = code if status == 400 and code not in NO_FIELDS else None  # the field that is at fault

    def response(self) -> HttpResponse:
        """Return the answer, in the form of OpenAI's errors."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return HttpResponse(self.status, json.dumps({"error": error}).encode())


def json_response(value: Any) -> HttpResponse:
    """Return an answer with this value."""
    return HttpResponse(200, json.dumps(value, ensure_ascii=False).encode())
