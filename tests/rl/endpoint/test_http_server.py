"""The HTTP server: its protocol, its bounds, and when an answer counts as lost."""

import asyncio
import contextlib
import json
import socket
import struct

import pytest

from ptf.rl.endpoint.http_message import HttpError, HttpResponse
from ptf.rl.endpoint.http_server import HttpBounds, HttpServer

GET = b"GET /a HTTP/1.1\r\nHost: localhost\r\n\r\n"


def post(body, path="/a", headers=""):
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Log:
    """A server whose answers echo, and the events of each, in order."""

    def __init__(self, **options):
        self.events, self.size = [], 2
        self.hold = asyncio.Event()
        self.server = HttpServer(self.handle, bounds=HttpBounds(**options), admit=self.admit)

    def admit(self, request):
        if request.path == "/refused":
            raise HttpError(401, "refused")

    async def handle(self, request):
        if request.path == "/wait":
            await self.hold.wait()
        if request.path == "/fault":
            raise KeyError("a fault of the server")
        answer = json.dumps([request.method, request.path, len(request.body)]).encode()
        note = self.events.append
        if request.path == "/stream":
            return HttpResponse(200, self.parts(answer), "text/plain", lost=lambda: note("lost"))
        if request.path == "/large":
            answer = b"x" * (1 << 24)
        return HttpResponse(200, answer, sending=lambda: note("sending"), lost=lambda: note("lost"))

    async def parts(self, answer):
        for _ in range(self.size):
            yield answer
            await asyncio.sleep(0.01)
        self.events.append("sending")


@contextlib.asynccontextmanager
async def serving(**options):
    log = Log(**options)
    await log.server.start()
    try:
        yield log
    finally:
        await log.server.close()


async def connected(log, data=b""):
    given = socket.socket()
    given.setblocking(False)
    await asyncio.get_running_loop().sock_connect(given, ("127.0.0.1", log.server.port))
    await send(given, data)
    return given


async def send(given, data):
    await asyncio.get_running_loop().sock_sendall(given, data)


async def received(given, until=None):
    """Return what comes until the end, or until it holds `until`."""
    loop, data = asyncio.get_running_loop(), b""
    async with asyncio.timeout(20):
        while until is None or until not in data:
            new = await loop.sock_recv(given, 1 << 16)
            if not new:
                break
            data += new
    return data


async def asked(log, data, until=None):
    with await connected(log, data) as given:
        return await received(given, until)


async def eventually(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def run(test, **options):
    """Run a test, whose connections must all end; return what became of the answers."""

    async def main():
        async with serving(**options) as log:
            await test(log)
            await eventually(lambda: not log.server.connections)
            return log.events

    return asyncio.run(main())


def test_requests_follow_each_other_and_may_be_sent_at_once():
    async def test(log):
        with await connected(log) as given:
            for body in (b"", b"abc"):
                await send(given, post(body))
                assert f'["POST", "/a", {len(body)}]'.encode() in await received(given, b"]")
        together = await asked(log, GET + post(b"1234") + post(b"12", headers="Connection: close\r\n"))
        parts = (b"HTTP/1.1 200", b'"/a", 0]', b'"/a", 4]', b'"/a", 2]')
        assert [together.count(part) for part in parts] == [3, 1, 1, 1]

    assert run(test) == ["sending"] * 5


def test_bodies_in_chunks_heads_and_expectations():
    chunked = b"POST /a HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def test(log):
        assert b'"/a", 5]' in await asked(log, chunked + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"]")
        head = await asked(log, b"HEAD /a HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert head.endswith(b"\r\n\r\n")
        with await connected(log, post(b"ab", headers="Expect: 100-continue\r\n")[:-2]) as given:
            assert (await received(given, b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
            await send(given, b"ab")
            assert b'"/a", 2]' in await received(given, b"]")
        assert b'["BREW", "/a", 0]' in await asked(log, GET.replace(b"GET", b"BREW"), b"]")

    run(test)


BAD = {
    b"no request\r\n\r\n": 400,
    b"GET /a HTTP/1.1\r\n\r\n": 400,  # no Host
    b"GET /a HTTP/1.1\r\nHost: localhost\r\nHost: b\r\n\r\n": 400,
    b"GET /a HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n": 400,
    b"GET /a HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n": 400,
    b"GET /a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n": 400,
    b"GET /a HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n": 501,
    b"GET /a HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 17) + b"\r\n\r\n": 431,
    b"POST /a HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n": 400,
    GET.replace(b"localhost", b"evil.example"): 403,
    GET.replace(b"localhost", b"localhost.evil.example:80"): 403,
    post(b"x" * 3000): 413,
    post(b"", "/refused"): 401,
    post(b"", "/fault"): 500,
}


def test_bad_requests_get_a_status_and_cost_nobody_else_anything():
    async def test(log):
        for request, status in BAD.items():
            answer = await asked(log, request, b"}}")
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()), (request[:80], answer[:80])
            json.loads(answer.partition(b"\r\n\r\n")[2])
        assert b"200" in await asked(log, GET, b"]")

    run(test, body=1000)


def test_slow_and_idle_clients_are_left():
    async def test(log):
        for begun in (b"", b"GET /a HTT", post(b"abcdef")[:-3]):
            assert await asked(log, begun) == b""
        with await connected(log, post(b"", "/large")):  # it never reads
            await eventually(lambda: "lost" in log.events)

    run(test, idle_s=0.1, request_s=0.1, send_s=0.2)


def test_a_request_that_trickles_has_a_deadline():
    async def test(log):
        with await connected(log) as given, contextlib.suppress(ConnectionError):
            for byte in GET * 100:
                await send(given, bytes([byte]).replace(b"\n", b"-"))
                await asyncio.sleep(0.02)
            pytest.fail("the server reads on")

    run(test, request_s=0.3, send_s=0.3)


def test_the_longest_waiting_connection_makes_room_for_a_new_one():
    async def test(log):
        idle = [await connected(log) for _ in range(6)]
        assert b"200" in await asked(log, GET, b"]")
        assert len(log.server.connections) <= 4
        assert await received(idle[0]) == b""
        for given in idle:
            given.close()

    run(test, connections=4)


def test_connections_whose_answers_are_being_made_are_kept():
    async def test(log):
        busy = [await connected(log, post(b"", "/wait")) for _ in range(2)]
        await eventually(lambda: len(log.server.connections) == 2 and not log.server.waiting)
        with pytest.raises((ConnectionError, AssertionError)):
            assert await asked(log, GET)
        log.hold.set()
        for given in busy:
            assert b"200" in await received(given, b"]")
            given.close()

    run(test, connections=2)


def test_bytes_of_all_bodies_are_bounded():
    async def test(log):
        with await connected(log, post(b"x" * 900)[:-1]) as given:
            await eventually(lambda: log.server.receiving == 899)
            assert b" 429 " in await asked(log, post(b"x" * 200), b"}}")
            await send(given, b"x")
            assert b" 200 " in await received(given, b"]")
        assert log.server.receiving == 0

    run(test, body=1000, bodies=1000)


def reset(given):
    given.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    given.close()


@pytest.mark.parametrize("path", ["/a", "/stream"])
@pytest.mark.parametrize(
    ("reads", "ends", "lost"),
    [
        ("all", socket.socket.close, 0),
        ("all", reset, 1),  # it cannot be told from one that did not read
        ("nothing", socket.socket.close, 1),
        ("nothing", reset, 1),
        ("some", socket.socket.close, 1),
        ("some", reset, 1),
    ],
)
def test_lost_is_called_once_where_the_answer_was_not_read(path, reads, ends, lost):
    async def test(log):
        given = await connected(log, post(b"", path))
        await eventually(lambda: "sending" in log.events)
        await asyncio.sleep(0.02)
        if reads == "all":
            await received(given, b"0\r\n\r\n" if path == "/stream" else b"]")
        elif reads == "some":
            await asyncio.get_running_loop().sock_recv(given, 20)
        ends(given)

    assert run(test) == ["sending"] + ["lost"] * lost


@pytest.mark.parametrize("ends", [socket.socket.close, reset])
def test_an_answer_that_meets_a_closed_connection_is_not_received(ends):
    """The server writes before it can notice, and the kernel answers with an error."""

    async def test(log):
        given = await connected(log, post(b"", "/wait"))
        await eventually(lambda: log.server.connections and not log.server.waiting)
        log.hold.set()
        ends(given)

    assert run(test) in ([], ["sending", "lost"])


def test_what_comes_after_a_received_answer_does_not_lose_it():
    async def test(log):
        for last in (b"no request\r\n\r\n", b"GET /a HT", b""):
            given = await connected(log, GET)
            await received(given, b"]")
            await send(given, last)
            await asyncio.sleep(0.05)
            (reset if last.startswith(b"GET") else socket.socket.close)(given)

    assert run(test, idle_s=5) == ["sending"] * 3


def test_an_idle_connection_that_times_out_loses_nothing():
    async def test(log):
        with await connected(log, GET) as given:
            assert b"200" in await received(given)

    assert run(test, idle_s=0.1) == ["sending"]


def test_answers_to_requests_that_were_sent_at_once_are_lost_together():
    async def test(log):
        given = await connected(log, GET * 3)
        await eventually(lambda: log.events.count("sending") == 3)
        given.close()  # nothing was read

    assert run(test) == ["sending"] * 3 + ["lost"] * 3
