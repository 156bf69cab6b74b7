"""Responses to conversations, as chat completions or in OpenAI's Responses API, sampled as the client asks."""

import asyncio
import itertools
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ptf.data.tokenizer import Tokenizer
from ptf.data.tool_calls import parser_of
from ptf.data.trajectory import Prompt
from ptf.errors import UserError
from ptf.rl.endpoint.chat import ChatRequest, parse_chat, whole_number
from ptf.rl.endpoint.http_message import HttpError, HttpRequest, HttpResponse
from ptf.rl.endpoint.http_server import Handle
from ptf.rl.endpoint.request_exchange import Exchange, raise_if_not_one_by_one
from ptf.rl.endpoint.response_form import http_response
from ptf.rl.endpoint.responses import ResponsesRequest, parse_responses
from ptf.rl.engines import protocol
from ptf.rl.engines.protocol import Sampling, StreamingEngine
from ptf.rl.engines.stepper import Stepper
from ptf.rl.policy.policy import Limits, NoRoom, Policy

MOST_PENDING = 1024  # requests
MOST_SEED = 2**63 - 1
WATCHED_EVERY_S = 0.25  # whether a client is still there
UNRANDOM = {"top_k": (None, 0, -1), "min_p": (None, 0)}  # values that ask for nothing; others are not supported


class SteppedEngine(StreamingEngine, Protocol):
    """An engine that a thread steps."""

    stepper: Stepper


class ResponseService:
    """Answers conversations with an engine.

    `max_length` is the most tokens of a context with its response, `max_new_tokens` those of a response whose request
    gives no limit.
    """

    def __init__(
        self, engine: SteppedEngine, tokenizer: Tokenizer, model: str, max_length: int, max_new_tokens: int
    ) -> None:
        self.engine, self.tokenizer, self.model = engine, tokenizer, model
        self.max_length, self.max_new_tokens = max_length, max_new_tokens
        self.form = parser_of(tokenizer.hf.chat_template)
        self.paths: Mapping[str, Handle] = {"/v1/chat/completions": self._chat, "/v1/responses": self._responses}
        self.numbers = itertools.count(secrets.randbits(40))  # ids of responses do not repeat after a restart
        self.running: dict[asyncio.Task[None], asyncio.Task[None]] = {}  # responses → what ends them early
        self.renderer = ThreadPoolExecutor(1, "renderer")  # a long text must not keep the event loop

    def example(self) -> tuple[str, dict[str, Any]]:
        """Return a path and the body of a request that can be tried, with a text that the tokenizer can encode."""
        said = next((text for text in ("Hello", "hello", "1") if _has_tokens(self.tokenizer, text)), "Hello")
        return "/v1/chat/completions", {"model": self.model, "messages": [{"role": "user", "content": said}]}

    async def close(self) -> None:
        """End what is being computed."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        self.renderer.shutdown()
        await asyncio.to_thread(_wait_for_last_step, self.engine.stepper)

    async def _chat(self, request: HttpRequest) -> HttpResponse:
        return await self._answered(request, parse_chat(request.json_object()))

    async def _responses(self, request: HttpRequest) -> HttpResponse:
        asked = replace(parse_responses(request.json_object(), _no_earlier), store=False)
        return await self._answered(request, asked.chat, asked)

    async def _answered(
        self, request: HttpRequest, chat: ChatRequest, asked: ResponsesRequest | None = None
    ) -> HttpResponse:
        """Answer a request for chat completions, or what was `asked` for as one; if its client leaves, sampling
        ends."""
        exchange = await self._exchange(chat)
        self.running[exchange.task] = asyncio.create_task(_watched(exchange, request))
        exchange.task.add_done_callback(self.running.pop)
        return await http_response(exchange, asked, {})

    async def _exchange(self, chat: ChatRequest) -> Exchange:
        """Begin the responses to a request. Raises HttpError (400, 404, 429) if it cannot be served."""
        if chat.model not in (self.model, "policy"):  # the second is what a request without `model` is read as
            raise HttpError(404, f"there is no model {chat.model[:80]!r} here, only {self.model}", "model_not_found")
        if len(self.running) >= MOST_PENDING:
            raise HttpError(429, f"{MOST_PENDING} requests are pending", "too_many_pending")
        raise_if_not_one_by_one(chat, self.form)
        for name, harmless in UNRANDOM.items():
            if chat.sampling.get(name) not in harmless:
                raise HttpError(400, f"{name} is not supported here", name)
        temperature, top_p = (_number(chat, name, most) for name, most in (("temperature", 2.0), ("top_p", 1.0)))
        if top_p == 0:
            raise HttpError(400, "top_p must be above 0", "top_p")
        most = chat.max_tokens or self.max_new_tokens
        sampling = Sampling(most, temperature, self.tokenizer.stop_ids, top_p)
        seed = whole_number(chat.sampling, "seed", -MOST_SEED, MOST_SEED)
        seed = secrets.randbits(62) if seed is None else seed
        of_episode = secrets.randbits(62)  # ids of tool calls differ between requests of one seed
        policy = Policy(
            Prompt(np.zeros(0, np.int32), {}, "", 0),
            Limits(sampling, self.max_length),
            self.tokenizer,
            lambda number: of_episode if number < 0 else (seed + number) % 2**62,
            lambda request: protocol.answered(self.engine, request, None),
            self.engine.version,
            lambda request: protocol.streamed(self.engine, request, None),
        )
        try:
            context = await asyncio.get_running_loop().run_in_executor(
                self.renderer, policy.context, chat.messages, chat.tools, chat.template_arguments
            )
        except NoRoom as error:
            raise HttpError(
                400, str(error).replace("data.seq_len", "--max-length"), "context_length_exceeded"
            ) from None
        except UserError as error:
            raise HttpError(400, str(error), "invalid_messages") from None
        chat = replace(chat, model=self.model)
        return Exchange(next(self.numbers), chat, context, policy, self.form, trained=False)


def _wait_for_last_step(stepper: Stepper) -> None:
    """Wait until the thread that computes has ended; if it still ran when the process ends, torch could crash."""
    with stepper.exclusively("end"):
        pass


def _number(chat: ChatRequest, name: str, most: float) -> float:
    value = chat.sampling.get(name, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise HttpError(400, f"{name} must be a number from 0 to {most:g}", name)
    return float(value)


def _no_earlier(name: str) -> Any:
    raise HttpError(
        400,
        "previous_response_id is not supported here, because no responses are kept; give the whole conversation as "
        "`input`",
        "previous_response_id",
    )


async def _watched(exchange: Exchange, request: HttpRequest) -> None:
    """End sampling when the client leaves."""
    while not exchange.task.done():
        await asyncio.wait({exchange.task}, timeout=WATCHED_EVERY_S)
        if not request.connected():
            exchange.task.cancel()


def _has_tokens(tokenizer: Tokenizer, text: str) -> bool:
    try:
        tokenizer.encode(text)
    except UserError:
        return False
    return True
