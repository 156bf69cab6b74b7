"""Servers of HTTP on the loopback interface whose answers a test decides."""

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar


class Loopback(ThreadingHTTPServer):
    """A server at a free port; what a client does to its connection is no error of it."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, answers: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), answers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """Nothing on the console."""


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send a body, which is JSON unless it is bytes; the client may have gone."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing on the console."""


Served = TypeVar("Served", bound=Loopback)


@contextlib.contextmanager
def running(server: Served) -> Iterator[Served]:
    """The server while it answers."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)
