"""An engine without a model, whose responses are texts of a script: for trials of environments and rewards."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import numpy as np

from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Generation
from ptf.errors import UserError
from ptf.rl.engines.protocol import Progress, Request


class ScriptedEngine:
    """StreamingEngine whose responses are texts, each with the token that ends a turn.

    `answer` is called with the seed of a request, which identifies the call, and with the text of its context. A
    response that is longer than the request allows is truncated, as a model's would be. All log-probs are 0.
    """

    name = "scripted"
    in_batches = False
    version = 0

    def __init__(self, tokenizer: Tokenizer, answer: Callable[[int, str], str]) -> None:
        if not tokenizer.stop_ids:
            raise UserError(
                f"the tokenizer {tokenizer.template_name} has no token that ends a response, so none can be given"
            )
        self.tokenizer, self.answer = tokenizer, answer

    async def generate(self, request: Request) -> Generation:
        """See RolloutEngine."""
        await asyncio.sleep(0)
        text = self.answer(request.seed, self.tokenizer.decode(request.context))
        ids = [*self.tokenizer.encode(text), self.tokenizer.stop_ids[0]]
        end = next(i for i, token in enumerate(ids) if token in self.tokenizer.stop_ids)  # the text may contain one
        ids = ids[: min(end + 1, request.sampling.max_new_tokens)]
        return Generation(
            request.context,
            np.array(ids, np.int32),
            np.zeros(len(ids), np.float32),
            np.full(len(ids), self.version, np.int32),
            ids[-1] in self.tokenizer.stop_ids,
        )

    async def stream(self, request: Request) -> AsyncGenerator[Progress]:
        """See StreamingEngine. The whole response comes at once."""
        generation = await self.generate(request)
        yield Progress(0, generation.sampled_ids, generation.logprobs, generation)

    def prompt_logprobs(self, tokens: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Raise UserError: there is no model."""
        raise UserError("a scripted engine has no model, so there are no log-probs of given tokens")
