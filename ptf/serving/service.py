"""What a served model offers: paths, what answers them, and how bodies that are no conversations are read."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from ptf.rl.endpoint.http_message import HttpError, HttpRequest, HttpResponse

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


def body_of(request: HttpRequest, model: str, known: tuple[str, ...]) -> dict[str, Any]:
    """Return the object in a request's body. Raises HttpError for one that is none, that has keys besides `known` and
    `model`, or that names another model."""
    given = request.json_object()
    if unknown := [name for name in given if name not in ("model", *known)]:
        raise HttpError(400, f"{str(unknown[0])[:80]} is not known here; there is model, {', '.join(known)}", "body")
    if given.get("model", model) != model:
        raise HttpError(404, f"there is no model {str(given['model'])[:80]!r} here, only {model}", "model_not_found")
    return given
