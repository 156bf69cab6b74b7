"""Random agents before a scripted engine, and an oracle that knows what each client has received.

The engine's log-probs name the call and the position of each token, so what the samples train is known token by token.
The clients are raw sockets that read byte by byte what they choose to, so what the kernel has not handed out was not
received.
"""

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptf.data.tool_calls import parser
from ptf.data.trajectory import Generation, Prompt, Trajectory, samples_of
from ptf.rl.endpoint.endpoint import Endpoint
from ptf.rl.endpoint.request_exchange import Exchange
from ptf.rl.endpoint.session import Bounds, Session
from ptf.rl.engines.protocol import Progress, Request, Sampling
from ptf.rl.episodes import Episode, run_all
from ptf.rl.policy.policy import Limits, Policy
from tests.rl.endpoint.served import Scripted

PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "lookup", "description": "looks a place up", "parameters": PARAMETERS}}
WORDS = [
    "yes",
    "no",
    "the answer is",
    "日本語",
    "naïve",
    "👩‍👩‍👧",
    "END",
    "a\n\nb",
    "  spaces  ",
    "<b>",
    "{",
    "é",
    "\ufffd",
    "ok",
]
STOPS = ["END", "answer", "\n\n", "👩", "is 7", "語"]
SCALE = 4096  # positions in a log-prob


class ScriptedEngine(Scripted):
    """An engine whose answer is a function of the request's seed, and that keeps what it served."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.served: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # seed → context, sampled ids

    def ids_of(self, seed: int) -> list[int]:
        """Return an answer's ids, which are not those that its text is encoded to."""
        rng = random.Random(seed)
        kind = rng.random()
        words = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 8)))
        text = f"{words} {seed}"
        if kind < 0.25:
            arguments = rng.choice(['{"place":"Paris" ,  "days": 3}', '{ "days":1.0, "place": "日本"}', "{}"])
            text = (
                f'{rng.choice(["", words])}<tool_call>\n{{"name":  "lookup", "arguments": {arguments}}}\n</tool_call>'
            )
        elif kind < 0.35:
            text = rng.choice(["ok", "", " ", "\n"])
        if rng.random() < 0.3:
            before, opens = rng.choice(["", "\n", " "]), rng.choice(["<think>\n", ""])
            text = f"{before}{opens}{words}{rng.choice(['', chr(10)])}</think>\n\n{text}"
        if kind > 0.95:
            size = len(self.tokenizer.hf) - 1
            return [i for i in (rng.randrange(size) for _ in range(12)) if i not in self.tokenizer.stop_ids]
        ids, at = list[int](), 0
        while at < len(text):
            size = rng.randrange(1, 12)
            ids += self.tokenizer.encode(text[at : at + size])
            at += size
        return ids

    def generation(self, request: Request) -> Generation:
        stops = self.tokenizer.stop_ids
        ids = [*self.ids_of(request.seed), stops[request.seed % len(stops)]][: request.sampling.max_new_tokens]
        sampled = np.array(ids, np.int32)
        number = request.seed % 10_000
        logprobs = -(number + np.arange(len(ids), dtype=np.float32) / SCALE)
        self.served[request.seed] = (request.context, sampled)
        finished = ids[-1] in stops
        return Generation(request.context, sampled, logprobs, np.full(len(ids), 3, np.int32), finished)

    async def stream(self, request: Request):
        generation, rng, at = self.generation(request), random.Random(-request.seed), 0
        while at < len(generation.sampled_ids):
            await asyncio.sleep(rng.choice([0, 0, 0, 0.001]))
            end = min(at + rng.choice([1, 3, 50]), len(generation.sampled_ids))
            whole = generation if end == len(generation.sampled_ids) else None
            yield Progress(0, generation.sampled_ids[at:end], generation.logprobs[at:end], whole)
            at = end


class RawClient:
    """A connection whose bytes are read as they are wanted."""

    def __init__(self, port: int) -> None:
        self.port, self.loop = port, asyncio.get_running_loop()
        self.socket: socket.socket | None = None
        self.data = b""

    async def send(self, path: str, key: str, body: bytes, headers: str = "") -> None:
        if self.socket is None:
            self.socket = socket.socket()
            self.socket.setblocking(False)
            await self.loop.sock_connect(self.socket, ("127.0.0.1", self.port))
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nAuthorization: Bearer {key}\r\n{headers}"
        self.data = b""
        await self.loop.sock_sendall(self.socket, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def read(self, most: int) -> bool:
        """Read at most so many bytes; return whether there may be more."""
        assert self.socket is not None
        async with asyncio.timeout(20):
            new = await self.loop.sock_recv(self.socket, most)
        self.data += new
        return bool(new)

    def response(self) -> tuple[int, bytes] | None:
        """Return the status and the body if the answer is complete."""
        head, found, rest = self.data.partition(b"\r\n\r\n")
        if not found:
            return None
        status, lower = int(head[9:12]), head.lower()
        if b"chunked" not in lower:
            size = int(lower.partition(b"content-length: ")[2].split(b"\r\n")[0])
            return (status, rest) if len(rest) == size else None
        parts = list[bytes]()
        while b"\r\n" in rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            if len(rest) < length + 2:
                return None
            if length == 0:
                return status, b"".join(parts)
            parts.append(rest[:length])
            rest = rest[length + 2 :]
        return None

    async def whole(self) -> tuple[int, bytes] | None:
        """Read the whole answer; None if the connection was closed before its end."""
        try:
            while (response := self.response()) is None:
                if not await self.read(1 << 16):
                    return None
        except OSError:
            return None
        return response

    def close(self, reset: bool = False) -> None:
        if self.socket is not None:
            if reset:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.socket.close()
            self.socket = None


def added_up(events: bytes) -> dict[int, dict[str, Any]]:
    """Return the choices that the events of a stream add up to; an empty dict if it has no end."""
    lines = [line[6:] for line in events.split(b"\n\n") if line]
    if not lines or lines[-1] != b"[DONE]":
        return {}
    choices = dict[int, dict[str, Any]]()
    for line in lines[:-1]:
        for chunk in json.loads(line).get("choices", ()):
            empty = {"content": "", "reasoning_content": "", "tool_calls": [], "entries": [], "finish_reason": None}
            choice, delta = choices.setdefault(chunk["index"], empty), chunk["delta"]
            for name in ("content", "reasoning_content"):
                choice[name] += delta.get(name) or ""
            choice["tool_calls"] += [
                {k: v for k, v in call.items() if k != "index"} for call in delta.get("tool_calls", ())
            ]
            choice["entries"] += (chunk["logprobs"] or {}).get("content", ())
            choice["finish_reason"] = chunk["finish_reason"] or choice["finish_reason"]
    return choices


def flat(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice of an answer that was not streamed, in the same form."""
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content") or "",
        "tool_calls": message.get("tool_calls") or [],
        "entries": (choice["logprobs"] or {}).get("content", []),
        "finish_reason": choice["finish_reason"],
    }


@dataclass
class Known:
    """What the clients of one episode know of exchanges, by the exchange's number."""

    received: set[int] = field(default_factory=set)
    doubtful: set[int] = field(default_factory=set)  # read to its end, then reset: no server can tell
    answers: list[tuple[int, dict[int, dict[str, Any]]]] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Agent:
    """A random agent: several conversations over several connections, cut wherever it likes."""

    def __init__(self, rng: random.Random, session: Session, port: int, calls: int) -> None:
        self.rng, self.session, self.port, self.budget = rng, session, port, calls
        self.path = f"/s/{session.id}/v1/chat/completions"
        self.known, self.clients = Known(), list[RawClient]()
        self.conversations: list[list[dict[str, Any]]] = []
        self.resent: dict[int, list[bytes]] = {}

    async def play(self) -> None:
        try:
            while self.budget > 0:
                await asyncio.gather(*(self.step() for _ in range(self.rng.choice([1, 1, 2, 4]))))
        finally:
            for client in self.clients:
                client.close()

    def messages(self) -> list[dict[str, Any]]:
        """Return a conversation: a new one, one that goes on, a branch, a rewritten or compacted one."""
        rng, kinds = self.rng, self.known.kinds
        if not self.conversations or rng.random() < 0.15:
            kinds["sub-agent"] += 1
            system = [{"role": "system", "content": "You help."}] if rng.random() < 0.3 else []
            return [*system, {"role": "user", "content": rng.choice([f"question {rng.randrange(9)}", "same", "  é\n"])}]
        messages = list(rng.choice(self.conversations))
        place = rng.random()
        if place < 0.15:
            kinds["branch"] += 1
            ends = [i + 1 for i, message in enumerate(messages) if message["role"] in ("user", "tool")]
            return messages[: rng.choice(ends)]
        if place < 0.2:
            kinds["compaction"] += 1
            return [{"role": "user", "content": f"summary of {len(messages)} messages: go on"}]
        if place < 0.28:
            kinds["rewritten"] += 1
            messages[-1] = {"role": "assistant", "content": f"rewritten {rng.randrange(3)}"}
        else:
            messages[-1] = self.returned(messages[-1])
        if messages[-1].get("tool_calls"):
            for call in messages[-1]["tool_calls"]:
                messages.append({"role": "tool", "content": "sunny", "tool_call_id": call.get("id", "x")})
            return messages
        return [*messages, {"role": "user", "content": rng.choice(["go on", "and then?", f"more {rng.randrange(5)}"])}]

    def returned(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return an answer as a client sends it back."""
        rng, kinds, message = self.rng, self.known.kinds, dict(message)
        if message.get("tool_calls") and rng.random() < 0.6:
            kinds["re-serialised tool calls"] += 1
            calls = []
            for call in message["tool_calls"]:
                arguments = json.loads(call["function"]["arguments"])
                text = json.dumps(arguments, sort_keys=True, separators=rng.choice([(",", ":"), (", ", ": ")]))
                calls.append({**call, "function": {"name": call["function"]["name"], "arguments": text}})
            message["tool_calls"] = calls
        if message.get("reasoning_content") and rng.random() < 0.5:
            kinds["dropped thinking"] += 1
            message.pop("reasoning_content")
        if rng.random() < 0.1:
            message["content"] = (message.get("content") or "").strip()
        if message.get("tool_calls") and not message.get("content"):
            message["content"] = rng.choice([None, ""])
        return message

    def body(self) -> dict[str, Any]:
        rng, kinds = self.rng, self.known.kinds
        body: dict[str, Any] = {"model": "policy", "messages": self.messages(), "logprobs": rng.random() < 0.7}
        if rng.random() < 0.6 or any(message.get("tool_calls") for message in body["messages"]):
            body["tools"] = [TOOL]
        for name, chance, make in (
            ("stream", 0.5, lambda: True),
            ("n", 0.12, lambda: rng.randrange(2, 4)),
            ("stop", 0.2, lambda: rng.sample(STOPS, rng.randrange(1, 3))),
            ("max_tokens", 0.15, lambda: rng.randrange(1, 20)),
            ("model", 0.08, lambda: rng.choice(["policy:no_loss", "judge"])),
            ("temperature", 0.05, lambda: 0.5),
        ):
            if rng.random() < chance:
                body[name] = make()
                kinds[name if name != "model" else "frozen"] += 1
        return body

    async def step(self) -> None:
        """Make a request, cut it somewhere or not, and perhaps repeat it."""
        body = self.body()
        self.budget -= body.get("n", 1)
        data = json.dumps(body, ensure_ascii=self.rng.random() < 0.5).encode()
        chance = self.rng.random()
        if chance < 0.6:
            await self.request(body, data)
        elif chance < 0.65:  # one that is equal, at the same time
            self.known.kinds["equal, at once"] += 1
            await asyncio.gather(self.request(body, data), self.request(body, data))
        else:
            cut = self.rng.choice(["before", "unread", "during", "during", "after"])
            self.known.kinds[f"cut {cut}"] += 1
            await self.cut(body, data, cut)
            if self.rng.random() < 0.6:
                self.known.kinds["retry"] += 1
                await self.request(body, data, self.rng.choice(["", "X-Stainless-Retry-Count: 1\r\n"]))
        if self.rng.random() < 0.05:
            self.known.kinds["declared retry of a delivered answer"] += 1
            await self.request(body, data, "X-Stainless-Retry-Count: 1\r\n")

    def client(self) -> RawClient:
        free = [client for client in self.clients if client.socket is not None]
        if free and self.rng.random() < 0.7:
            self.clients.remove(client := self.rng.choice(free))
        else:
            client = RawClient(self.port)
        return client

    async def request(self, body: dict[str, Any], data: bytes, headers: str = "") -> None:
        """Ask, and read the whole answer; now and then close the connection then."""
        client = self.client()
        await client.send(self.path, self.session.agent_key, data, headers)
        response = await client.whole()
        if response is None:
            self.known.faults.append("an answer was cut by the server")
            client.close()
            return
        if self.rng.random() < 0.2:
            client.close()
        else:
            self.clients.append(client)
        self.take(body, response, self.known.received)

    async def cut(self, body: dict[str, Any], data: bytes, cut: str) -> None:
        client, rng = RawClient(self.port), self.rng
        reset = rng.random() < 0.5
        await client.send(self.path, self.session.agent_key, data)
        try:
            if cut == "before":
                await asyncio.sleep(rng.choice([0, 0, 0.001]))
            elif cut == "unread":
                await asyncio.sleep(0.01)
            elif cut == "during":
                for _ in range(rng.randrange(1, 6)):
                    if client.response() is None and not await client.read(rng.choice([1, 40, 200, 1000])):
                        break
            else:
                await client.whole()
        finally:
            response = client.response()
            client.close(reset)
        if response is not None:
            self.take(body, response, self.known.doubtful if reset else self.known.received)

    def take(self, body: dict[str, Any], response: tuple[int, bytes], into: set[int]) -> None:
        """Note a whole answer, and go on from it later."""
        status, text = response
        if status != 200:
            error = json.loads(text)["error"]
            self.known.kinds[f"refused: {status}"] += 1
            if status != 400:
                self.known.faults.append(f"status {status}: {error['message']}")
            return
        if body.get("stream"):
            choices = added_up(text)
            number = json.loads(text[6:].partition(b"\n\n")[0])["id"]
        else:
            made = json.loads(text)
            choices, number = {choice["index"]: flat(choice) for choice in made["choices"]}, made["id"]
        if not choices:
            self.known.faults.append("a stream without an end")
            return
        number = int(number.removeprefix("chatcmpl-"))
        into.add(number)
        self.known.answers.append((number, choices))
        choice = choices[self.rng.randrange(len(choices))]
        message = {"role": "assistant", "content": choice["content"]}
        message |= {name: choice[name] for name in ("reasoning_content", "tool_calls") if choice[name]}
        self.conversations.append([*body["messages"], message])
        self.conversations = self.conversations[-8:]


class FuzzPlay:
    """A play that serves one session to each random agent, and keeps what is needed to judge it."""

    def __init__(self, calls: int, session: Callable[..., Session] = Session) -> None:
        self.calls, self.make = calls, session
        self.judged: dict[int, tuple[Agent, list[Exchange], Session]] = {}

    async def __aenter__(self) -> "FuzzPlay":
        self.endpoint = Endpoint()
        await self.endpoint.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.endpoint.close()

    async def __call__(self, prompt: Prompt, policy: Policy) -> Trajectory:
        session = self.make(policy, parser("hermes"), Bounds(), {"judge": "policy:no_loss"})
        self.endpoint.open(session)
        agent = Agent(random.Random(prompt.index), session, self.endpoint.server.port, self.calls)
        await agent.play()
        exchanges = list(session.all)
        await session.close()
        self.judged[prompt.index] = (agent, exchanges, session)
        return policy.trajectory(1.0, counts=session.counts)


def visible(tokenizer: Any, ids: np.ndarray, stops: Any) -> int:
    """Return how many of the ids are sampled if the stop strings end the answer."""
    if not stops:
        return len(ids)
    for n in range(1, len(ids) + 1):
        if ids[n - 1] not in tokenizer.stop_ids and any(stop in tokenizer.decode(ids[:n]) for stop in stops):
            return n
    return len(ids)


def violations(tokenizer: Any, engine: ScriptedEngine, play: FuzzPlay, index: int, trajectory: Trajectory) -> list[str]:
    """Compare what an episode's samples train with what its clients received."""
    agent, exchanges, session = play.judged[index]
    known, found = agent.known, list(agent.known.faults)
    base = (index + 1) * 10_000
    must, may = set[int](), set[int]()
    delivered = delivered_at_most = 0
    wanted = dict[int, np.ndarray]()
    for exchange in exchanges:
        received = exchange.number in known.received
        doubtful = exchange.number in known.doubtful
        delivered += len(exchange.choices) * received
        delivered_at_most += len(exchange.choices) * (received or doubtful)
        for choice in exchange.choices:
            if choice.context is None or base + choice.number not in engine.served:
                continue
            ids = engine.served[base + choice.number][1]
            wanted[choice.number] = ids[: visible(tokenizer, ids, exchange.chat.stops)]
            if exchange.chat.model == "policy" and (received or doubtful):
                (must if received else may).add(choice.number)
    trained = dict[int, list[tuple[int, int]]]()
    for sample in samples_of(trajectory):
        logprobs, places = sample.token_columns["rollout_logprobs"], np.flatnonzero(sample.loss_weights)
        for place in places.tolist():
            number, position = divmod(round(-float(logprobs[place]) * SCALE), SCALE)
            trained.setdefault(number, []).append((position, int(sample.tokens[place])))
            if position == 0 and not np.array_equal(sample.tokens[:place], engine.served[base + number][0]):
                found.append(f"call {number} is trained in another context than was served")
    for number, tokens in trained.items():
        if number not in must | may:
            found.append(f"call {number} is trained and was not received, or is frozen")
        elif sorted(tokens) != list(enumerate(wanted[number].tolist())):
            found.append(f"call {number} is trained with other ids, or not once")
    found += [f"call {number} was received and is not trained" for number in sorted(must - set(trained))]
    counts = session.counts
    if not counts["generations"] - delivered_at_most <= counts["undelivered"] <= counts["generations"] - delivered:
        found.append(f"{counts['undelivered']} calls count as undelivered of {counts['calls']}, {delivered} delivered")
    return found + message_faults(known, {exchange.number: exchange for exchange in exchanges})


def message_faults(known: Known, exchanges: dict[int, Exchange]) -> list[str]:
    """Return where a client's answer is not the whole answer, or its log-probs are those of another call."""
    found = []
    for number, choices in known.answers:
        whole = {choice["index"]: flat(choice) for choice in exchanges[number].completion()["choices"]}
        if choices != whole:
            found.append(f"exchange {number}: the deltas do not add up to the message")
        for choice in exchanges[number].choices:
            entries = choices[choice.index]["entries"]
            if any(round(-entry["logprob"] * SCALE) // SCALE != choice.number for entry in entries):
                found.append(f"exchange {number} shows another call")
    return found


@dataclass
class Report:
    """What a run of several episodes found."""

    calls: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def fuzz(
    tokenizer: Any,
    seeds: range,
    calls: int = 30,
    engine: ScriptedEngine | None = None,
    session: Callable[..., Session] = Session,
    tamper: Callable[[Trajectory], Trajectory] = lambda trajectory: trajectory,
) -> Report:
    """Play one episode for each seed, all at once, and judge them."""
    engine = engine or ScriptedEngine(tokenizer)
    play = FuzzPlay(calls, session)
    limits = Limits(Sampling(60, 1.0, tokenizer.stop_ids), 900)

    def episode(index: int) -> Episode:
        prompt = Prompt(np.array([9], np.int32), {}, "a", index)
        return Episode(prompt, limits, tokenizer, lambda number: (index + 1) * 10_000 + number, play, timeout_s=60)

    trajectories = asyncio.run(run_all(engine, list(map(episode, seeds))))
    report = Report()
    for index, trajectory in zip(seeds, trajectories, strict=True):
        if index not in play.judged:
            report.violations.append(f"episode {index} failed: {trajectory.outcome}")
            continue
        agent, _, made = play.judged[index]
        found = violations(tokenizer, engine, play, index, tamper(trajectory))
        report.violations += [f"episode {index}: {fault}" for fault in found]
        report.kinds += agent.known.kinds
        report.counts += made.counts
        report.counts["doubtful"] += len(agent.known.doubtful)
    report.calls = report.counts["generations"]
    return report
