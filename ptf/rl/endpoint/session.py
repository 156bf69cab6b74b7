"""A session: one episode as an agent sees it, at an address and with a key of its own."""

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ptf.data.tool_calls import Format
from ptf.data.trajectory import NoResult, Trajectory
from ptf.errors import UserError
from ptf.rl.endpoint.chat import ChatRequest
from ptf.rl.endpoint.http_message import HttpError, HttpRequest
from ptf.rl.endpoint.request_exchange import Exchange, raise_if_not_one_by_one
from ptf.rl.policy.calls import Message
from ptf.rl.policy.policy import NoRoom, Policy

MODELS = ("policy", "policy:no_loss")  # the responses of the first are trained
RETRY = "x-stainless-retry-count"  # of OpenAI's SDKs: how often a request was sent before


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one session."""

    generations: int = 1000  # responses; `n` of a request counts n times
    pending: int = 64


class Session:
    """The requests of one agent.

    The agent's key is for calls. The scorer's key is for the reward and the end of the session; the agent must not have
    it. `form` is the format of tool calls, `aliases` are other names of the models.
    """

    def __init__(
        self, policy: Policy, form: Format | None, bounds: Bounds, aliases: Mapping[str, str] | None = None
    ) -> None:
        self.policy, self.form, self.bounds, self.aliases = policy, form, bounds, aliases or {}
        self.id, self.agent_key, self.scorer_key = (secrets.token_urlsafe(16) for _ in range(3))  # 128 bits each
        self.exchanges: dict[bytes, list[Exchange]] = {}  # those with each body
        self.all: list[Exchange] = []
        self.conversations: dict[str, Sequence[Message]] = {}  # id of a stored response → the messages up to its end
        self.counts: Counter[str] = Counter()
        self.closed = self.ended = False  # no more requests; and no more changes
        self.reward: float | None = None
        self.is_full = False  # whether the last new request had no room for a response
        self.refused = ""  # why the last request that would be a new one was refused

    def exchange(self, request: HttpRequest, chat: ChatRequest) -> Exchange:
        """Return the exchange of a request: a new one, or that of the request which it repeats.

        A request repeats one with the same body if the client declares so, or if that one's reply did not reach its
        client, which has gone. Raises HttpError.
        """
        digest = hashlib.sha256(request.path.encode() + b"\0" + request.body).digest()
        known = [exchange for exchange in self.exchanges.get(digest, ()) if not exchange.failed]
        undelivered = [exchange for exchange in known if not exchange.delivered]
        abandoned = [exchange for exchange in undelivered if not exchange.waiting]
        of_retry = [*abandoned, *undelivered, *reversed(known)]
        repeated = {"": abandoned, "0": []}.get(request.headers.get(RETRY, ""), of_retry)  # by what the client declares
        if (exchange := next(iter(repeated), None)) is not None:
            if exchange.waiting >= self.bounds.pending:
                raise HttpError(429, f"{self.bounds.pending} clients wait for this response", "too_many_pending")
            self.counts["retries"] += 1
        else:
            try:
                exchange = self._new(chat)
            except HttpError as error:
                self.refused = str(error)
                self.exchanges.pop(digest, None)  # if it is repeated, it repeats nothing that was answered
                raise
            self.exchanges.setdefault(digest, []).append(exchange)
            self.all.append(exchange)
        exchange.clients.append(replace(request, headers={}, body=b""))
        return exchange

    def _new(self, chat: ChatRequest) -> Exchange:
        model = self.aliases.get(chat.model, chat.model)
        if model not in MODELS:
            known = ", ".join([*MODELS, *self.aliases])
            reason = f"there is no model {chat.model[:80]!r} here but {known} (rollout.harness.models names others)"
            raise HttpError(404, reason, "model_not_found")
        if chat.tools and self.form is None:
            raise HttpError(400, "no format of tool calls is known; set rollout.harness.tool_format", "tools")
        raise_if_not_one_by_one(chat, self.form)
        if sum(not exchange.task.done() for exchange in self.all) >= self.bounds.pending:
            raise HttpError(429, f"{self.bounds.pending} requests of this session are pending", "too_many_pending")
        if self.counts["generations"] + chat.n > self.bounds.generations:
            raise HttpError(
                429,
                f"this session has had its {self.bounds.generations} responses",
                "too_many_responses",
            )
        try:
            context, self.is_full = self.policy.context(chat.messages, chat.tools, chat.template_arguments), False
        except NoRoom:
            context, self.is_full = None, True
        except UserError as error:
            raise HttpError(400, str(error), "invalid_messages") from None
        except RecursionError:
            raise HttpError(400, "messages or tools are nested too deeply", "invalid_messages") from None
        sampling = self.policy.limits.sampling
        own = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        self.counts["generations"] += chat.n
        self.counts["sampling_overridden"] += any(own.get(name) != value for name, value in chat.sampling.items())
        return Exchange(len(self.all), chat, context, self.policy, self.form, trained=model == MODELS[0])

    def trajectory(self, outcome: float | NoResult | None, text: str | None = None) -> Trajectory:
        """Return the episode. One whose last request had no room for a response did not end by itself."""
        complete = False if self.is_full else None
        return self.policy.trajectory(outcome, text=text, complete=complete, counts=self.counts)

    def deliver(self, exchange: Exchange) -> None:
        """Note that a response reaches a client: it is context of what follows, and trained.

        Raises ConnectionAbortedError if the session is closed, so that nothing is delivered that is not trained.
        """
        if exchange.failed:
            return
        if self.closed:
            raise ConnectionAbortedError("the session is closed")
        if not exchange.delivered:
            for call in exchange.calls:
                self.policy.history.add(call)
        exchange.deliveries += 1

    def lose(self, exchange: Exchange) -> None:
        """Note that a response did not reach a client to which it was delivered.

        If no other client has it, and no later request continues it, it is not trained.
        """
        if exchange.failed or self.ended:
            return
        exchange.deliveries -= 1
        if exchange.deliveries == 0 and exchange.calls:
            self.policy.history.lose(exchange.calls)

    async def close(self) -> None:
        """End the session: further requests are refused, and pending responses are aborted."""
        if self.closed:
            return
        self.closed = True
        for exchange in self.all:
            exchange.task.cancel()
        await asyncio.gather(*(exchange.task for exchange in self.all), return_exceptions=True)
        await asyncio.sleep(0)  # transports that failed tell so
        for exchange in self.all:
            for client in exchange.clients:
                client.settle()
            self.counts["undelivered"] += 0 if exchange.delivered else len(exchange.choices)
        self.ended = True
        self.counts["history_restored"] = self.policy.history.history_restored
        self.counts["history_reencoded"] = self.policy.history.history_reencoded
        self.exchanges.clear()
        self.all.clear()
