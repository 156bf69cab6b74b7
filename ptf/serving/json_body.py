"""The bodies of requests to a served model that are no conversations."""

from typing import Any

from ptf.rl.endpoint.http_message import HttpError, HttpRequest


def body_of(request: HttpRequest, model: str, known: tuple[str, ...]) -> dict[str, Any]:
    """Return the object in a request's body. Raises HttpError for one that is none, that has keys besides `known` and
    `model`, or that names another model."""
    given = request.json_object()
    if unknown := [name for name in given if name not in ("model", *known)]:
        raise HttpError(400, f"{str(unknown[0])[:80]} is not known here; there is model, {', '.join(known)}", "body")
    if given.get("model", model) != model:
        raise HttpError(404, f"there is no model {str(given['model'])[:80]!r} here, only {model}", "model_not_found")
    return given
