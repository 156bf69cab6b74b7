"""What a served model offers: paths, and what answers them."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from ptf.rl.endpoint.http_message import HttpRequest, HttpResponse

Handle = Callable[[HttpRequest], Coroutine[Any, Any, HttpResponse]]


class Service(Protocol):
    """One kind of use of a model."""

    paths: Mapping[str, Handle]  # of POST requests

    def example(self) -> tuple[str, dict[str, Any]]:
        """Return a path and the body of a request that can be tried."""
        ...

    async def close(self) -> None:
        """End what is being computed."""
        ...
