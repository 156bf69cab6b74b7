"""A server on the loopback interface whose answers a test decides."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.loopback import Answers, Loopback, running


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

    class Handler(Answers):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(served.requests)
                served.requests.append((self.path, dict(self.headers), body))
            reply = answer(number, body)
            if reply.closes:
                self.close_connection = True
                self.connection.close()
            else:
                self.answer(reply.body, reply.status, reply.headers)

    with running(Loopback(Handler)) as http:
        served = Server(http.url)
        yield served
