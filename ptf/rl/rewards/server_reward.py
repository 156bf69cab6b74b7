"""Rewards that a server computes: requests of JSON with a bounded time and size, retried after growing waits.

Secrets are read from environment variables when they are needed. They are sent as headers and are in no message.
"""

import asyncio
import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import httpx

from ptf.errors import UserError
from ptf.rl.loopback import mounts
from ptf.workspace.credentials import HIDDEN, SHORTEST, redacted

LONGEST_WAIT_S = 30.0  # before a retry, whatever the server asks for
SHOWN = 300  # characters of a reply in a message
ERROR_BYTES = 4096  # of the body of an error that are read


class RequestFault(Exception):
    """A request was refused, or failed with all its retries, or its reply is no JSON."""


class _PassingFault(Exception):
    """One request failed, and may not fail again: the reason, and the seconds that the server asks to wait for."""


def raise_if_less(name: str, value: Any, least: float, *, whole: bool = True) -> None:
    """Raise UserError unless an argument is a number of at least `least`, and, if `whole`, a whole one."""
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not value >= least:
        raise UserError(f"{name}: it must be a {'whole ' * whole}number of at least {least}, not {value!r}")


@dataclass(kw_only=True, eq=False)
class ServerReward:
    """What rewards that ask a server share. Raises UserError for values that cannot be used.

    `headers_from_env` maps headers to the environment variables that hold their values, `timeout_s` limits one
    request with its reply, and `max_concurrent_calls` is how many are made at once in a process. Connections that
    fail and replies with status 408, 429 or 5xx are tried again up to `retries` times, after at most `wait_s` seconds,
    then twice as long, or after `Retry-After`; at most 30 s. Any other status is a fault, redirects too. A reply has
    at most `max_bytes`.
    """

    url: str
    headers_from_env: Mapping[str, str] | None = None
    timeout_s: float | None = None  # None: only the caller's limit
    retries: int = 3
    wait_s: float = 0.5
    max_bytes: int = 1 << 20
    max_concurrent_calls: int = 64
    bearer_from_env: str | None = field(init=False, default=None)  # variable with the token of `Authorization`
    asks = "rows and responses are sent to"  # what is done with the address, for the run's first line

    def __post_init__(self) -> None:
        for name, least in (("max_concurrent_calls", 1), ("retries", 0), ("max_bytes", 1)):
            raise_if_less(name, getattr(self, name), least)
        raise_if_less("wait_s", self.wait_s, 0, whole=False)
        if self.timeout_s is not None:
            raise_if_less("timeout_s", self.timeout_s, 0.001, whole=False)
        parts = urlsplit(self.url) if isinstance(self.url, str) else None
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"url: {self.url!r} is no address of the form https://host/path")
        if parts.username is not None or parts.password is not None:
            raise UserError("url: it must hold no user and password; name the variable of a header that has them")
        headers = self.headers_from_env or {}
        if not isinstance(headers, Mapping) or not all(
            isinstance(text, str) and text for pair in headers.items() for text in pair
        ):
            raise UserError("headers_from_env: it must be {HEADER: NAME_OF_AN_ENVIRONMENT_VARIABLE, …}")

    @classmethod
    def check_arguments(cls, **args: Any) -> None:
        """Raise UserError if these arguments cannot be used."""
        cls(**args)

    @classmethod
    def first_lines(cls, **args: Any) -> list[str]:
        """Return the first line that a run prints about the reward. Raises UserError if it cannot be used here: a
        secret is not in the environment."""
        reward = cls(**args)
        reward.secret_headers()
        address = urlsplit(reward.url)._replace(query="", fragment="").geturl()  # without what follows the path
        return [f"reward: {reward.asks} {address}, up to {reward.max_concurrent_calls} at once"]

    def secret_headers(self) -> dict[str, str]:
        """Return the headers whose values are in environment variables. Raises UserError, which names no value."""
        headers = {header: _variable(name, header) for header, name in (self.headers_from_env or {}).items()}
        if self.bearer_from_env is not None:
            headers["Authorization"] = f"Bearer {_variable(self.bearer_from_env, 'Authorization')}"
        return headers

    async def post(self, body: Any) -> Any:
        """Return the JSON that the server answers to a body. Raises RequestFault."""
        try:
            content = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RequestFault(f"the row cannot be written as JSON: {error}") from None
        for attempt in range(self.retries + 1):
            try:
                return await self._attempt(content)
            except _PassingFault as error:
                reason, asked_s = error.args
                if attempt == self.retries:
                    count = f" (request {attempt + 1} of {attempt + 1})" if attempt else ""
                    raise RequestFault(f"{reason}{count}") from None
                await asyncio.sleep(self._wait(attempt, asked_s))

    async def _attempt(self, content: bytes) -> Any:
        """Return the JSON that the server answers. Raises RequestFault, and _PassingFault where a retry may help."""
        try:
            async with asyncio.timeout(self.timeout_s):
                status, headers, data = await self._exchange(content)
        except TimeoutError:
            raise _PassingFault(f"no reply within {self.timeout_s} s", None) from None
        except httpx.TransportError as error:
            raise _PassingFault(self.shown(f"{type(error).__name__}: {error}"), None) from None
        if 300 <= status < 400:
            raise RequestFault(
                f"HTTP {status}: redirects are refused, and this one leads to "
                f"{self.shown(headers.get('Location', 'nowhere'))}"
            )
        if status in (408, 429) or status >= 500:
            raise _PassingFault(f"HTTP {status}: {self._beginning(data)}", retry_after(headers.get("Retry-After", "")))
        if not 200 <= status < 300:
            raise RequestFault(f"HTTP {status}: {self._beginning(data)}")
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise RequestFault(f"the reply is no JSON: {self._beginning(data)}") from None

    async def _exchange(self, content: bytes) -> tuple[int, Mapping[str, str], bytes]:
        """Return the status, the headers and the body of one reply; of an error, the beginning of its body."""
        async with self._client.stream("POST", self.url, content=content) as response:
            is_error = not 200 <= response.status_code < 300
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise RequestFault("the reply is compressed, which the request did not allow")
            data = bytearray()
            async for chunk in response.aiter_raw():
                data += chunk
                if is_error and len(data) >= ERROR_BYTES:
                    break
                if len(data) > self.max_bytes:
                    raise RequestFault(f"the reply is longer than {self.max_bytes} bytes")
            return response.status_code, response.headers, bytes(data[:ERROR_BYTES] if is_error else data)

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        """The connections, made with the first request. This machine is reached without a proxy."""
        return httpx.AsyncClient(
            headers={
                "Content-Type": "application/json",
                "Accept": "application/json",
                "Accept-Encoding": "identity",
                **self.secret_headers(),
            },
            timeout=None,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            mounts=mounts(self.url),
            follow_redirects=False,
        )

    def _beginning(self, data: bytes) -> str:
        return self.shown(data[:ERROR_BYTES].decode(errors="replace"))

    def shown(self, text: str) -> str:
        """Return the beginning of a text on one line, without secrets."""
        for value in self.secret_headers().values():
            for word in (value, *value.split()):
                text = text.replace(word, HIDDEN) if len(word) >= SHORTEST else text
        line = " ".join(redacted(text).split())
        return "".join(c if c.isprintable() else "?" for c in line[:SHOWN]) or "(empty)"

    def _wait(self, attempt: int, asked_s: float | None) -> float:
        """Return the seconds before a retry: those that the server asks for, or twice as many as before the last."""
        if asked_s is not None:
            return min(asked_s, LONGEST_WAIT_S)
        longest = min(self.wait_s * 2.0 ** min(attempt, 60), LONGEST_WAIT_S)
        return longest * random.Random(time.monotonic_ns()).uniform(0.5, 1.0)  # spreads calls that failed together


def _variable(name: str, header: str) -> str:
    """Return the value of an environment variable for a header. Raises UserError, which does not name the value."""
    value = os.environ.get(name, "").strip()
    if not value:
        raise UserError(f"the environment variable {name} (header {header}) is not set where this runs")
    if not (value.isascii() and value.isprintable()):
        raise UserError(f"the environment variable {name} has characters that a header cannot have")
    return value


def retry_after(value: str) -> float | None:
    """Return the seconds of a header `Retry-After`, which is a number or a date; None if it is neither."""
    try:
        return max(0.0, float(value) if value[:1].isdigit() else parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None
