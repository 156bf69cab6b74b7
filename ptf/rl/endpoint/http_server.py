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
import resource
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ptf.rl.endpoint.http_connection import READ, ClientReader, Connection
from ptf.rl.endpoint.http_message import HttpRequest, HttpResponse

MAX_CONNECTIONS = 4096  # and half of the files that this process may open


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
