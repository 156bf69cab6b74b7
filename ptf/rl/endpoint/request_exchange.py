"""One request of an agent and its responses, which go on if the connection is cut: a repeated request takes them."""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np

from ptf.data.tool_calls import Format
from ptf.data.trajectory import Generation
from ptf.rl.endpoint.answer_stream import AnswerStream
from ptf.rl.endpoint.chat import DONE, ChatRequest, delta_of, event, message_of
from ptf.rl.endpoint.http_message import HttpError, HttpRequest
from ptf.rl.policy.calls import Call, CallInput
from ptf.rl.policy.policy import Policy


def raise_if_not_one_by_one(chat: ChatRequest, form: Format | None) -> None:
    """Raise HttpError (400) if sampling is to end with the first tool call, and the format writes a list of them."""
    if chat.one_call and form and form.in_list:
        raise HttpError(
            400,
            "parallel_tool_calls: this model writes its tool calls as a list; leave it out",
            "parallel_tool_calls",
        )


class Choice:
    """One of the responses to the request of an exchange; `form` is the format of tool calls."""

    def __init__(self, exchange: "Exchange", index: int, form: Format | None) -> None:
        self.chat, self.context, self.policy = exchange.chat, exchange.context, exchange.policy
        self.index, self.number, self.trained = index, next(exchange.policy.numbers), exchange.trained
        self.answer = AnswerStream(
            self.policy.tokenizer,
            form if self.chat.tools else None,
            self.chat.tools,
            self.chat.stops,
            self.context is not None and self.context.text.rstrip().endswith("<think>"),
            form.divide if form else None,
            self.chat.one_call,
        )
        self.message: dict[str, Any] = {"role": "assistant", "content": ""}
        self.finish_reason, self.call = "length", None
        self.entries: list[dict[str, Any]] = []  # log-probs of the tokens, as in chat completions

    async def run(self, report: Callable[[dict[str, Any]], None]) -> None:
        """Sample the response; give what is new of it to `report`, in the form of a chunk's choice."""
        if self.context is None:
            report(self.choice({"delta": {}}, 0, self.finish_reason))
            return
        generation, reported = await self._sample(self.context, report)
        parts = self.answer.whole(generation)
        identifiers = [  # which repeat with the episode
            hashlib.sha256(f"{self.policy.seed} {self.number} {i}".encode()).hexdigest()[:9]
            for i in range(len(parts.tool_calls))
        ]
        self.message = message_of(parts, identifiers)
        call = self.policy.call_of(self.context, self.number, generation)
        call.message, call.text = self.message, parts.content or ""
        call.complete = generation.finished or self.answer.stopped
        call.trained = self.trained
        self.call = call
        self.finish_reason = "tool_calls" if parts.tool_calls else "stop" if call.complete else "length"
        delta = delta_of(
            *self.answer.rest_of(parts.thinking or "", parts.content or ""), self.message.get("tool_calls", ())
        )
        report(self.choice({"delta": delta}, reported, self.finish_reason))

    async def _sample(self, context: CallInput, report: Callable[[dict[str, Any]], None]) -> tuple[Generation, int]:
        """Return the generation, up to the token that completes a stop string, and how many tokens were reported."""
        request = self.policy.request(context, self.number, self.chat.max_tokens)
        ids, logprobs, reported = list[int](), list[float](), 0
        stream = self.policy.stream(request)
        try:
            async for progress in stream:
                for token, logprob in zip(progress.sampled_ids.tolist(), progress.logprobs.tolist(), strict=True):
                    ids.append(token)
                    logprobs.append(logprob)
                    if self.chat.logprobs:
                        text = self.policy.tokenizer.decode([token])
                        entry = {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                        self.entries.append(entry)
                    self.answer.feed(token)
                    if self.answer.stopped:
                        return self._cut(request.context, ids, logprobs), reported
                if progress.generation is not None:
                    return progress.generation, reported
                thinking, content = self.answer.new_parts()
                if thinking or content:
                    report(self.choice({"delta": delta_of(thinking, content)}, reported))
                    reported = len(ids)
        finally:
            await stream.aclose()
        raise RuntimeError("the engine's response has no end")

    def _cut(self, context: np.ndarray, ids: Sequence[int], logprobs: Sequence[float]) -> Generation:
        """Return a response that a stop string ended; its last token completes the string."""
        return Generation(
            context,
            np.array(ids, np.int32),
            np.array(logprobs, np.float32),
            np.full(len(ids), self.policy.version, np.int32),
            ids[-1] in self.policy.tokenizer.stop_ids,
        )

    def choice(self, said: dict[str, Any], reported: int, finish_reason: str | None = None) -> dict[str, Any]:
        """Return what is said, a message or a delta, with the log-probs of the tokens that were not reported."""
        logprobs = {"content": self.entries[reported:]} if self.chat.logprobs else None
        return {"index": self.index, **said, "logprobs": logprobs, "finish_reason": finish_reason}


class Exchange:
    """A request that is answered once, however often it is repeated.

    `context` is None if there is no room for a response; `trained`: whether its responses are.
    """

    def __init__(
        self,
        number: int,
        chat: ChatRequest,
        context: CallInput | None,
        policy: Policy,
        form: Format | None,
        *,
        trained: bool,
    ) -> None:
        self.number, self.chat, self.context, self.policy, self.trained = number, chat, context, policy, trained
        self.choices = [Choice(self, index, form) for index in range(chat.n)]
        self.created = int(time.time())
        self.chunks: list[dict[str, Any]] = []
        self.changed = asyncio.Event()
        self.deliveries = 0  # to clients, each of which has asked for it
        self.clients: list[HttpRequest] = []  # those that asked, without their bodies
        self.task = asyncio.create_task(self._run())

    @property
    def delivered(self) -> bool:
        """Return whether a client has the reply."""
        return self.deliveries > 0 or any(call.received for call in self.calls)

    @property
    def waiting(self) -> int:
        """Return how many clients wait for the reply."""
        return sum(client.connected() for client in self.clients)

    @property
    def failed(self) -> bool:
        """Return whether there is no reply and never will be."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def calls(self) -> list[Call]:
        """Return the calls of the policy."""
        return [choice.call for choice in self.choices if choice.call is not None]

    async def _run(self) -> None:
        tasks = [asyncio.create_task(choice.run(self._report)) for choice in self.choices]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # one that failed ends all
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._wake()

    async def finished(self) -> None:
        """Wait for all responses; a waiter that is cancelled does not cancel them.

        Raises HttpError if sampling failed, or if the session was closed before.
        """
        await asyncio.wait([self.task])
        if self.task.cancelled():
            raise HttpError(410, "the session was closed before the response was complete", "session_closed")
        if (error := self.task.exception()) is not None:
            raise HttpError(500, f"the engine failed: {type(error).__name__}") from error

    def _report(self, chunk: dict[str, Any]) -> None:
        self.chunks.append(chunk)
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def head(self, kind: str) -> dict[str, Any]:
        """Return what whole replies and chunks have in common."""
        of_model = {"model": self.chat.model, "system_fingerprint": f"version-{self.policy.version}"}
        return {"id": f"chatcmpl-{self.number}", "object": kind, "created": self.created, **of_model}

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens."""
        prompt = 0 if self.context is None else len(self.context.tokens)
        sampled = sum(len(call.generation.sampled_ids) for call in self.calls)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def completion(self) -> dict[str, Any]:
        """Return the whole reply of an exchange that is done. It has all choices."""
        return {
            **self.head("chat.completion"),
            "choices": [one.choice({"message": one.message}, 0, one.finish_reason) for one in self.choices],
            "usage": self.usage(),
        }

    async def news(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield what is new of the responses, as chunks' choices, from the beginning. Raises as `finished`."""
        sent = 0
        while True:
            changed, done = self.changed, self.task.done()
            for chunk in self.chunks[sent:]:
                sent += 1
                yield chunk
            if done:
                break
            await changed.wait()
        await self.finished()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the reply in pieces, from the beginning. Raises as `finished`."""
        head = self.head("chat.completion.chunk")
        for choice in self.choices:
            first = {
                "index": choice.index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            yield event({**head, "choices": [first]})
        async for chunk in self.news():
            yield event({**head, "choices": [chunk]})
        if self.chat.usage_in_stream:
            yield event({**head, "choices": [], "usage": self.usage()})
        yield DONE

    def failure_event(self, message: str) -> bytes:
        """Return the event that ends a stream whose engine failed."""
        return event({"error": {"message": message, "type": "server_error", "code": None}})
