"""A model that is served in the test's own process."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from ptf.serving.options import ServingOptions
from ptf.serving.public_endpoint import PublicEndpoint
from ptf.serving.served_model import ServedModel
from tests.data.templates import templated
from tests.tiny import checkpoint

DEADLINE_S = 60.0


def chatting(directory: Path) -> Path:
    """A tiny model with random weights, whose tokenizer has a chat template with tools."""
    tokenizer = templated("plain")
    sizes = {"vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.stop_ids[0]}
    checkpoint(directory, max_position_embeddings=1024, **sizes)
    tokenizer.save(directory)
    return directory


@contextlib.asynccontextmanager
async def endpoint_of(model: ServedModel, key: str | None = None, **options: Any) -> AsyncGenerator[PublicEndpoint]:
    """Serve a model on a free port."""
    services = model.services(ServingOptions(**options))
    endpoint = PublicEndpoint(services, model.name, host="127.0.0.1", port=0, key=key)
    await endpoint.start()
    try:
        yield endpoint
    finally:
        await endpoint.close()


def asked(
    model: ServedModel | Path, use: Callable[[httpx.AsyncClient, PublicEndpoint], Awaitable[Any]], **options: Any
) -> Any:
    """What `use` returns, which is given a client of the served model."""
    served = model if isinstance(model, ServedModel) else ServedModel(str(model), "m")

    async def run() -> Any:
        async with endpoint_of(served, **options) as endpoint:
            base = endpoint.url.removesuffix("/v1")
            async with httpx.AsyncClient(base_url=base, timeout=20) as client:
                return await asyncio.wait_for(use(client, endpoint), DEADLINE_S)

    return asyncio.run(run())
