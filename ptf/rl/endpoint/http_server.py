"""A small HTTP/1.1 server that knows whether an answer reached its client.

What the client never received must not be trained, so the server needs more than web frameworks tell: whether the last
byte was written to an open connection, and whether the connection was broken afterwards. A client that closes a
connection with bytes unread resets it; one that had closed it before the answer was written is known by the error that
the kernel keeps for the socket. The protocol itself is h11's.

Connections, the bytes of requests, and the seconds of a request, of a pause and of a client that does not read are
bounded. If there are too many connections, the one that has waited longest without an answer being made for it is
closed.
"""

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import h11

from ptf.rl.endpoint.http_message import HttpError, HttpRequest, HttpResponse

MAX_CONNECTIONS = 4096  # and half of the files that this process may open
READ = 1 << 16
MAX_HEADERS = 1 << 16  # bytes
LINGER_S = 5.0  # for a client to close a connection that was ended here
LOCAL = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True, slots=True)
class HttpBounds:
    """Limits of a server."""

    body: int = 1 << 23  # bytes of one request
    bodies: int = 1 << 28  # bytes of all requests that are being received
    connections: int = 0  # 0: as many as this process's open files allow
    idle_s: float = 600.0  # between two requests of a connection
    request_s: float = 60.0  # from a request's first byte to its last
    send_s: float = 60.0  # for a client to take what was written


Handle = Callable[[HttpRequest], Coroutine[Any, Any, HttpResponse]]


class HttpServer:
    """Serves `handle` on `host` and `port` (0: any free port).

    `admit` is called with each request before its body is received, and raises HttpError to refuse it.
    """

    def __init__(
        self,
        handle: Handle,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        bounds: HttpBounds | None = None,
        admit: Callable[[HttpRequest], object] = lambda request: None,
    ) -> None:
        self.handle, self.host, self.port, self.admit = handle, host, port, admit
        self.bounds = bounds or HttpBounds()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        allowed = MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, max(files // 2, 1))
        self.most_connections = self.bounds.connections or allowed
        self.connections: set[asyncio.Task[None]] = set()
        self.waiting: dict[Connection, None] = {}  # those for which no answer is being made; the longest first
        self.receiving = 0  # bytes of bodies
        self.server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; `port` is then the port that is used."""
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.StreamReaderProtocol:
            return asyncio.StreamReaderProtocol(ClientReader(limit=READ, loop=loop), self._accept, loop=loop)

        self.server = await loop.create_server(protocol, self.host, self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        if self.server is not None:
            self.server.close()
        for task in list(self.connections):
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        assert isinstance(reader, ClientReader)
        while len(self.connections) >= self.most_connections:
            longest = next(iter(self.waiting), None)
            if longest is None:
                writer.transport.abort()
                return
            self.waiting.pop(longest)
            longest.settle()
            longest.writer.transport.abort()
            self.connections.discard(longest.task)
        self.connections.add(task)
        try:
            with contextlib.suppress(asyncio.CancelledError):  # by `close`
                await Connection(self, reader, writer, task).serve()
        finally:
            self.connections.discard(task)
            writer.transport.abort()


class ClientReader(asyncio.StreamReader):
    """Reads what a client sends; knows at any time whether the client is gone, and whether there is anything unread."""

    ended = False  # the client has closed its side, even if bytes of it are unread
    received = taken = 0  # bytes

    def feed_data(self, data: Any) -> None:
        """Take bytes from the transport."""
        self.received += len(data)
        super().feed_data(data)

    def feed_eof(self) -> None:
        """Note the end of what the client sends."""
        self.ended = True
        super().feed_eof()

    async def take(self, most: int) -> bytes:
        """Return at most so many bytes, none at the end. Raises OSError if the connection was reset."""
        data = await self.read(most)
        self.taken += len(data)
        return data

    @property
    def gone(self) -> bool:
        """Return whether the client has closed or reset the connection."""
        return self.ended or self.exception() is not None


class Connection:
    """One connection: requests and answers by turns, and which answers its client did not receive."""

    def __init__(
        self, server: HttpServer, reader: ClientReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> None:
        self.server, self.reader, self.writer, self.task = server, reader, writer, task
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADERS)
        self.unconfirmed: list[HttpResponse] = []  # answers that were written, before which no request came
        self.pipelined = False  # whether a request had come before the last answer was written
        self.broken = False

    async def serve(self) -> None:
        """Answer requests until the client closes the connection."""
        try:
            while (request := await self._next()) is not None:
                await self._send(await self._answered(request), request.method)
                if self.http.our_state is not h11.DONE:
                    break
                self.http.start_next_cycle()
            await self._close()
        except (OSError, TimeoutError, h11.LocalProtocolError):
            self.broken = True
        finally:
            self.settle()

    def settle(self) -> None:
        """Call `lost` of the answers that the client cannot have, if the connection is known to be broken."""
        if not self.unconfirmed:
            return
        transport = self.writer.transport
        if self.broken or self._failed() or transport.get_write_buffer_size() > 0:
            self.broken = True
            transport.abort()
            lost, self.unconfirmed = self.unconfirmed, []
            for response in lost:
                response.lost()

    def _failed(self) -> bool:
        """Return whether the connection was reset, or the kernel has an error: what was written met a closed socket."""
        if self.reader.exception() is not None:
            return True
        if self.writer.transport.is_closing():
            return False
        return self.writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0

    async def _close(self) -> None:
        """Close the connection when all is written and read. Raises OSError if the client does not take it.

        Only the client's own end of the connection tells whether it has read everything.
        """
        self.broken = self._failed()
        if not self.reader.gone and not self.writer.transport.is_closing():
            self.server.waiting[self] = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(LINGER_S, self.server.bounds.send_s)):
                    self.writer.write_eof()
                    while await self.reader.take(READ):
                        pass
            self.server.waiting.pop(self, None)
            self.broken = self._failed()
        self.writer.close()
        async with asyncio.timeout(self.server.bounds.send_s):
            await self.writer.wait_closed()

    async def _next(self) -> HttpRequest | None:
        """Return the next request; None if there is none: the client is gone, too slow or does not speak HTTP."""
        bounds, parts = self.server.bounds, list[bytes]()
        self.server.waiting[self] = None
        try:
            if not self.http.trailing_data[0]:
                async with asyncio.timeout(bounds.idle_s):
                    first = await self.reader.take(READ)
                self.http.receive_data(first)
                if first and not self.pipelined:  # a client goes on when it has read the answer before
                    self.unconfirmed.clear()
            async with asyncio.timeout(bounds.request_s):
                return await self._whole(parts)
        except TimeoutError:
            return None
        except h11.RemoteProtocolError as error:
            if self.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                await self._send(HttpError(error.error_status_hint, f"this is no valid request: {error}").response())
            return None
        finally:
            self.server.receiving -= sum(map(len, parts))
            self.server.waiting.pop(self, None)

    async def _answered(self, request: HttpRequest) -> HttpResponse:
        if request.refusal is not None:
            return request.refusal.response()
        try:
            return await self.server.handle(request)
        except HttpError as error:
            return error.response()
        except Exception as error:
            logging.getLogger(__name__).exception("a request failed: %s", request.method)
            return HttpError(500, f"the server failed: {type(error).__name__}").response()

    async def _whole(self, parts: list[bytes]) -> HttpRequest | None:
        """Return the request whose first bytes have come, and keep the parts of its body in `parts`."""
        request, refusal, size = None, None, 0
        while True:
            event = self.http.next_event()
            if event is h11.NEED_DATA:
                if self.http.they_are_waiting_for_100_continue:
                    self.writer.write(self.http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
                self.http.receive_data(await self.reader.take(READ))
            elif isinstance(event, h11.Request):
                request = HttpRequest(
                    event.method.decode("ascii"),
                    event.target.decode("latin-1").partition("?")[0],
                    {name.decode("ascii").lower(): value.decode("latin-1") for name, value in event.headers},
                    b"",
                )
                refusal = self._refusal(request)
            elif isinstance(event, h11.Data):
                size += len(event.data)
                refusal = self._too_large(size, len(event.data)) or refusal
                if refusal is None:
                    parts.append(bytes(event.data))
                    self.server.receiving += len(event.data)
                elif size > 4 * self.server.bounds.body:  # less is read, so that the client reads the refusal
                    return None
            elif isinstance(event, h11.EndOfMessage) and request is not None:  # it comes after one
                return replace(
                    request,
                    body=b"".join(parts),
                    connected=lambda: not self.reader.gone,
                    settle=self.settle,
                    refusal=refusal,
                )
            else:  # ConnectionClosed, or PAUSED
                return None

    def _refusal(self, request: HttpRequest) -> HttpError | None:
        """Return why a request is refused whatever its body is: it may be that of a web page, sent through a browser,
        whose Host is another one."""
        given = request.headers.get("host", "").lower()
        host = given if given.endswith("]") else given.rpartition(":")[0] or given
        try:
            if self.server.host in ("127.0.0.1", "::1") and host not in LOCAL:
                raise HttpError(403, f"this server is for local clients; the Host header names {host[:80]!r}")
            self.server.admit(request)
        except HttpError as error:
            return error
        return None

    def _too_large(self, size: int, new: int) -> HttpError | None:
        bounds = self.server.bounds
        if size > bounds.body:
            return HttpError(413, f"the body has more than the {bounds.body} bytes that are allowed", "body_too_large")
        if self.server.receiving + new > bounds.bodies:
            return HttpError(429, "too many bytes of requests are being received", "too_many_bytes")
        return None

    async def _send(self, response: HttpResponse, method: str = "GET") -> None:
        """Write an answer. Raises OSError if the client has gone."""
        length = {"content-length": str(len(response.body))} if isinstance(response.body, bytes) else {}
        headers = {"content-type": response.content_type, **(response.headers or {})}
        headers |= length or {"transfer-encoding": "chunked"}
        start = self.http.send(h11.Response(status_code=response.status, headers=list(headers.items()))) or b""
        last = response.body if isinstance(response.body, bytes) and method != "HEAD" else b""
        if not isinstance(response.body, bytes):
            async with contextlib.aclosing(response.body) as parts:
                async for part in parts:
                    if last:
                        start += self.http.send(h11.Data(data=last)) or b""
                    await self._write(start)
                    start, last = b"", part
        self._raise_if_gone()
        response.sending()
        # in one write: a client that stops reading at the last part leaves nothing unread, which would look like a loss
        end = [h11.Data(data=last), h11.EndOfMessage()] if last else [h11.EndOfMessage()]
        self.unconfirmed.append(response)  # from here on `sending` was called
        self.pipelined = self.reader.received > self.reader.taken or bool(self.http.trailing_data[0])
        await self._write(start + b"".join(self.http.send(event) or b"" for event in end))

    def _raise_if_gone(self) -> None:
        if self.reader.gone:
            raise ConnectionResetError("the client closed the connection before it had its answer")

    async def _write(self, data: bytes) -> None:
        self._raise_if_gone()
        self.writer.write(data)
        if self.writer.transport.get_write_buffer_size() or self.writer.transport.is_closing():
            async with asyncio.timeout(self.server.bounds.send_s):
                await self.writer.drain()
