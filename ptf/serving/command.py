"""Serving until a signal ends it."""

import asyncio
import contextlib
import dataclasses
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

from ptf.serving.options import ServingOptions
from ptf.serving.public_endpoint import PublicEndpoint, address_of
from ptf.serving.served_model import ServedModel

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    model: ServedModel, options: ServingOptions, *, host: str, port: int, key: str | None, report: Callable[[str], None]
) -> None:
    """Serve a model until SIGINT or SIGTERM; `report` is given the lines about the address.

    Raises UserError for a model or an address that cannot be served.
    """
    host = address_of(host, key)  # refused before a model is loaded
    with contextlib.ExitStack() as stack:
        if options.engine == "vllm":
            caches = stack.enter_context(tempfile.TemporaryDirectory(prefix="ptf-serve-"))
            options = dataclasses.replace(options, caches=Path(caches))
        endpoint = PublicEndpoint(model.services(options), model.name, host=host, port=port, key=key)
        asyncio.run(_serve(endpoint, report))


async def _serve(endpoint: PublicEndpoint, report: Callable[[str], None]) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def end() -> None:
        for number in SIGNALS:  # a second signal ends the process at once
            loop.remove_signal_handler(number)
        ended.set()

    await endpoint.start()
    for number in SIGNALS:
        loop.add_signal_handler(number, end)
    try:
        report(f"serving {endpoint.model} at {endpoint.url}")
        report(f"  {endpoint.example()}")
        await ended.wait()
    finally:
        await endpoint.close()
