"""A server on the loopback interface whose answers a test decides."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What the server answers: a status, headers, and a body, which is JSON unless it is bytes."""

    body: Any = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    closes: bool = False  # the connection ends instead


@dataclass
class Server:
    """Its address, and the requests that it got: path, headers, body."""

    url: str
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)


@contextlib.contextmanager
def serving(answer: Callable[[int, Any], Reply]) -> Iterator[Server]:
    """Serve `answer(number of the request, its body)`."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(server.requests)
                server.requests.append((self.path, dict(self.headers), body))
            reply = answer(number, body)
            if reply.closes:
                self.close_connection = True
                self.connection.close()
                return
            data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            with contextlib.suppress(OSError):  # the client may have gone
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(data)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 128

        def handle_error(self, *_: Any) -> None:
            pass

    http = Quiet(("127.0.0.1", 0), Handler)
    server = Server(f"http://127.0.0.1:{http.server_address[1]}")
    thread = threading.Thread(target=http.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join(10)
        http.server_close()
