"""Attempts of an agent to reach what it must not: the scorer's paths, other sessions, and more than its bounds."""

import asyncio
import json

from ptf.rl.endpoint.http_server import HttpBounds, HttpServer
from ptf.rl.endpoint.session import Bounds, Session
from tests.rl.endpoint.served import Scripted, played

BODY = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
CHAT = json.dumps(BODY).encode()
CALLS = "/v1/chat/completions"


class Attacker:
    """Sends bytes as an agent can, and notes the status of each answer; 0 for a closed connection."""

    def __init__(self, served, other):
        self.port, self.own, self.other, self.found = served.port, served.session, other, {}
        self.base, self.foreign = f"/s/{served.session.id}", f"/s/{other.id}"

    async def raw(self, name, data):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            line = await asyncio.wait_for(reader.readline(), 20)
            self.found[name] = int(line.split()[1]) if line else 0
        finally:
            writer.close()

    async def ask(self, name, path, key=None, body=CHAT, method="POST", host="localhost", headers=""):
        key = self.own.agent_key if key is None else key
        head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n{headers}"
        await self.raw(name, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


REWARD = b'{"reward": 1.0}'


async def attempts(a):
    """Make every attempt once."""
    key = a.own.agent_key
    await a.ask("reward with the agent's key", f"{a.base}/reward", body=REWARD)
    await a.ask("close with the agent's key", f"{a.base}/close")
    await a.ask("reward without a key", f"{a.base}/reward", "", REWARD)
    await a.ask("reward with the session's id as key", f"{a.base}/reward", a.own.id, REWARD)
    await a.ask("a beginning of the key", f"{a.base}{CALLS}", key[:-1])
    await a.ask("a longer key", f"{a.base}{CALLS}", key + "x")
    await a.ask("the other's session with the own key", f"{a.foreign}{CALLS}")
    await a.ask("the other's reward with the own key", f"{a.foreign}/reward", body=REWARD)
    await a.ask("the other's models", f"{a.foreign}/v1/models", method="GET", body=b"")
    await a.ask("a session that is not there", f"/s/{'x' * 22}{CALLS}")
    await a.ask("no session", f"/s/{CALLS}")
    await a.ask("the list of sessions", "/s", method="GET", body=b"")
    await a.ask("up to the other's reward", f"{a.base}/v1/../../{a.other.id}/reward", body=REWARD)
    await a.ask("up to the own reward", f"{a.base}/v1/../reward", body=REWARD)
    await a.ask("an encoded path", f"{a.base}/v1/%2e%2e/reward", body=REWARD)
    await a.ask("an encoded reward", f"{a.base}/%72eward", body=REWARD)
    await a.ask("two slashes", f"{a.base}//reward", body=REWARD)
    await a.ask("reward with a slash at its end", f"{a.base}/reward/", body=REWARD)
    await a.ask("reward with a query", f"{a.base}/reward?v1/chat/completions", body=REWARD)
    await a.ask("reward in capitals", f"{a.base}/REWARD", body=REWARD)
    await a.ask("a whole URL as the target", f"http://localhost{a.base}/reward", body=REWARD)
    await a.ask("another method", f"{a.base}{CALLS}", method="DELETE")
    await a.ask("the method in a header", f"{a.base}/v1/models", headers="X-HTTP-Method-Override: POST\r\n")
    await a.ask("the path in a header", f"{a.base}/v1/x", headers=f"X-Original-URL: {a.base}/reward\r\n")
    await a.ask("a name that points here", f"{a.base}{CALLS}", host="rebound.example")
    await a.ask("a name with this one in it", f"{a.base}{CALLS}", host="localhost.example:80")
    await a.ask("an empty Host", f"{a.base}{CALLS}", host="")
    await a.ask("a preflight of a web page", f"{a.base}/reward", method="OPTIONS", headers="Origin: http://x\r\n")
    smuggled = f"POST {a.base}/reward HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    smuggled = f"{smuggled}Content-Length: {len(REWARD)}\r\n\r\n".encode() + REWARD
    await a.ask("a request in a body", f"{a.base}{CALLS}", body=smuggled)
    head = f"POST {a.base}{CALLS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    await a.raw("two lengths", f"{head}Content-Length: 5\r\nContent-Length: 9\r\n\r\n".encode() + smuggled)
    await a.raw("a broken length", f"{head}Content-Length: +5\r\n\r\n".encode() + smuggled)
    await a.raw("a space before the colon", f"{head}Content-Length : 5\r\n\r\n".encode() + smuggled)
    await a.raw("an unknown coding", f"{head}Transfer-Encoding: xchunked\r\n\r\n".encode() + smuggled)
    await a.raw("a folded key", f"{head}X: a\r\n b\r\nContent-Length: 0\r\n\r\n".encode())
    await a.raw("the version of another protocol", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")


REFUSED = (400, 401, 403, 404, 405, 501)


def test_an_agent_reaches_neither_the_scorer_nor_another_session(tokenizer):
    engine = Scripted(tokenizer)

    async def agent(served):
        other = Session(served.session.policy, None, Bounds())
        served.endpoint.open(other)
        attacker = Attacker(served, other)
        await attempts(attacker)
        assert served.session.reward is None
        assert other.reward is None
        assert not other.closed
        assert not served.session.closed
        return attacker.found

    served, t = played(agent, engine, tokenizer)
    assert len(served.result) >= 20
    for name, status in served.result.items():
        assert status in REFUSED, (name, status)
    assert engine.asked == []
    assert t.generations == ()


BAD_REWARDS = [
    b"NaN",
    b'{"reward": NaN}',
    b'{"reward": Infinity}',
    b'{"reward": -1e400}',
    b'{"reward": "1"}',
    b'{"reward": true}',
    b'{"reward": null}',
    b'{"reward": [1]}',
    b'{"reward": 1e13}',
    b'{"reward": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b"\xff",
    b"",
    b"{}",
]


def test_what_is_no_reward_is_refused_from_the_scorer_too(tokenizer):
    async def agent(served):
        attacker = Attacker(served, served.session)
        for i, body in enumerate(BAD_REWARDS):
            await attacker.ask(str(i), f"{attacker.base}/reward", served.session.scorer_key, body)
        assert served.session.reward is None
        await attacker.ask("good", f"{attacker.base}/reward", served.session.scorer_key, REWARD)
        return attacker.found

    served, _ = played(agent, Scripted(tokenizer), tokenizer)
    assert served.result == {str(i): 400 for i in range(len(BAD_REWARDS))} | {"good": 200}


def message(**parts):
    return json.dumps({**BODY, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", **parts}]}).encode()


BAD_BODIES = {
    "not JSON": b"{",
    "deep": b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "no object": b"[]",
    "half a character": b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "content is a number": message(content=5),
    "calls are a text": message(content="a", tool_calls="abc"),
    "calls hold a text": message(content="a", tool_calls=["abc"]),
    "a call without a function": message(content="a", tool_calls=[{"function": None}]),
    "a call whose name is a number": message(content="a", tool_calls=[{"function": {"name": 5, "arguments": "{}"}}]),
    "arguments that are not JSON": message(content="a", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
    "a role that is none": json.dumps({**BODY, "messages": [{"role": 5, "content": "a"}]}).encode(),
    "an image": json.dumps({**BODY, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}).encode(),
    "too many messages": json.dumps({**BODY, "messages": BODY["messages"] * 5000}).encode(),
    "too many choices": json.dumps({**BODY, "n": 1000}).encode(),
    "too many stops": json.dumps({**BODY, "stop": ["a"] * 99}).encode(),
    "tools that are none": json.dumps({**BODY, "tools": ["a"]}).encode(),
    "no number of tokens": json.dumps({**BODY, "max_tokens": "5"}).encode(),
}


def test_malformed_bodies_are_refused_by_name(tokenizer):
    engine = Scripted(tokenizer)

    async def agent(served):
        attacker = Attacker(served, served.session)
        for name, body in BAD_BODIES.items():
            await attacker.ask(name, f"{attacker.base}{CALLS}", body=body)
        return attacker.found

    served, _ = played(agent, engine, tokenizer)
    assert served.result == dict.fromkeys(BAD_BODIES, 400)
    assert engine.asked == []


def test_pending_requests_and_waiting_clients_are_bounded(tokenizer):
    engine = Scripted(tokenizer, pause_s=0.1)

    async def agent(served):
        attacker = Attacker(served, served.session)
        bodies = [json.dumps({**BODY, "user": str(i % 4)}).encode() for i in range(4)]
        path, retry = f"{attacker.base}{CALLS}", "X-Stainless-Retry-Count: 1\r\n"
        first = [attacker.ask(f"first {i}", path, body=bodies[i]) for i in range(4)]
        await asyncio.gather(*first)
        again = [attacker.ask(f"again {i}", path, body=b" " + bodies[0], headers=retry) for i in range(5)]
        await asyncio.gather(*again)
        return attacker.found

    served, _ = played(agent, engine, tokenizer, pending=2)
    counts = [list(served.result.values())[:4].count(status) for status in (200, 429)]
    assert counts == [2, 2]
    assert list(served.result.values())[4:].count(429) == 3


def test_a_flood_of_connections_shuts_out_nobody(tokenizer):
    async def agent(served):
        served.endpoint.server.most_connections = 8
        flood = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(40)]
        for _, writer in flood[::2]:
            writer.write(b"POST /s/")  # and no more
        attacker = Attacker(served, served.session)
        await attacker.ask("call", f"{attacker.base}{CALLS}")
        assert len(served.endpoint.server.connections) <= 8
        for _, writer in flood:
            writer.close()
        return attacker.found

    served, t = played(agent, Scripted(tokenizer), tokenizer)
    assert served.result == {"call": 200}
    assert len(t.generations) == 1


def test_the_number_of_connections_is_below_that_of_open_files():
    assert 1 <= HttpServer(None).most_connections <= 4096
    assert HttpServer(None, bounds=HttpBounds(connections=3)).most_connections == 3


def test_a_frozen_model_is_served_and_not_trained_whatever_its_name(tokenizer):
    async def agent(served):
        served.session.aliases = {"judge": "policy:no_loss", "mine:no_loss": "policy"}
        client = served.client()
        for model in ("policy", "policy:no_loss", "judge", "mine:no_loss"):
            await client.chat.completions.create(model=model, messages=BODY["messages"])

    _, t = played(agent, Scripted(tokenizer, lambda i: f"answer {i}"), tokenizer)
    assert [tokenizer.decode(g.sampled_ids) for g in t.generations] == [f"answer {i}<|im_end|>" for i in (0, 3)]


def test_tools_without_a_known_format_are_refused(tokenizer):
    async def agent(served):
        attacker = Attacker(served, served.session)
        tools = [{"type": "function", "function": {"name": "f"}}]
        await attacker.ask("tools", f"{attacker.base}{CALLS}", body=json.dumps({**BODY, "tools": tools}).encode())
        return attacker.found

    served, _ = played(agent, Scripted(tokenizer), tokenizer, form=None)
    assert served.result == {"tools": 400}


def test_a_session_that_closes_ends_what_is_pending(tokenizer):
    engine = Scripted(tokenizer, lambda i: "long " * 50, pause_s=0.05)

    async def agent(served):
        attacker = Attacker(served, served.session)
        pending = asyncio.create_task(attacker.ask("pending", f"{attacker.base}{CALLS}"))
        while not engine.asked:
            await asyncio.sleep(0.01)
        await served.session.close()
        await pending
        await attacker.ask("after", f"{attacker.base}{CALLS}")
        return attacker.found

    served, t = played(agent, engine, tokenizer)
    assert served.result == {"pending": 410, "after": 410}
    assert t.generations == ()
    assert t.counts["undelivered"] == 1
