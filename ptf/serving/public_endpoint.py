"""The address of a served model: its paths, its key, who may ask, and how it ends."""

import asyncio
import json
import signal
import time

from ptf.errors import UserError
from ptf.rl.endpoint.http_message import HttpError, HttpRequest, HttpResponse, json_response
from ptf.rl.endpoint.http_server import HttpServer
from ptf.serving.options import ServingOptions
from ptf.serving.served_model import ServedModel, Service

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(model: ServedModel, options: ServingOptions, *, host: str, port: int, key: str | None) -> None:
    """Serve a model until SIGINT or SIGTERM, and print its address.

    Raises UserError for a model or an address that cannot be served.
    """
    host = address_of(host, key)  # refused before a model is loaded
    asyncio.run(_serve(PublicEndpoint(model.services(options), model.name, host=host, port=port, key=key)))


async def _serve(endpoint: "PublicEndpoint") -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def end() -> None:
        for number in SIGNALS:  # a second signal ends the process at once
            loop.remove_signal_handler(number)
        ended.set()

    await endpoint.start()
    for number in SIGNALS:
        loop.add_signal_handler(number, end)
    try:
        print(f"serving {endpoint.model} at {endpoint.url}\n  {endpoint.example()}", flush=True)
        await ended.wait()
    finally:
        await endpoint.close()


class PublicEndpoint:
    """Serves a model's services; with a `key`, to those that have it.

    Raises UserError for a host other than this machine's own without a key.
    """

    def __init__(self, services: list[Service], model: str, *, host: str, port: int, key: str | None) -> None:
        host = address_of(host, key)
        self.services, self.model, self.key, self.created = services, model, key, int(time.time())
        self.handlers = {path: handle for service in services for path, handle in service.paths.items()}
        self.server = HttpServer(self._handle, host=host, port=port, admit=self._authorise)

    @property
    def url(self) -> str:
        """Return the base URL, as OpenAI's SDKs take it."""
        host = f"[{self.server.host}]" if ":" in self.server.host else self.server.host
        return f"http://{host}:{self.server.port}/v1"

    async def start(self) -> None:
        """Listen. Raises UserError if the address cannot be used."""
        try:
            await self.server.start()
        except (OSError, OverflowError) as error:
            raise UserError(f"--host {self.server.host} --port {self.server.port}: {error}") from None

    async def close(self) -> None:
        """End all responses, and stop listening."""
        await self.server.close()
        for service in self.services:
            await service.close()

    def example(self) -> str:
        """Return a command that asks for something."""
        path, body = self.services[0].example()
        key = ' -H "Authorization: Bearer $KEY"' if self.key else ""
        url = self.url.removesuffix("/v1") + path
        return f"curl {url}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"

    async def _handle(self, request: HttpRequest) -> HttpResponse:
        path = request.path.rstrip("/")
        if path == "/health":
            return json_response({"status": "ok"})
        if path == "/v1/models":
            if request.method != "GET":
                raise HttpError(405, f"{path} takes GET")
            model = {"id": self.model, "object": "model", "created": self.created, "owned_by": "ptf"}
            return json_response({"object": "list", "data": [model]})
        if path not in self.handlers:
            raise HttpError(404, f"there is no path {path[:80]!r} here: {', '.join(['/v1/models', *self.handlers])}")
        if request.method != "POST":
            raise HttpError(405, f"{path} takes POST")
        return await self.handlers[path](request)

    def _authorise(self, request: HttpRequest) -> None:
        if self.key and request.path.rstrip("/") != "/health" and not request.has_key(self.key):
            raise HttpError(401, "the API key is wrong", "invalid_api_key")


def address_of(host: str, key: str | None) -> str:
    """Return the address to listen on. Raises UserError for one that other machines reach, without a key."""
    host = "127.0.0.1" if host == "localhost" else host  # the server checks the Host header of such an address
    if host not in ("127.0.0.1", "::1") and not key:
        raise UserError(
            f"--host {host}: an address that other machines reach needs a key; put one into an environment variable "
            "and name it with --api-key-env"
        )
    return host
