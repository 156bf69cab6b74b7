"""Scores of conversations by a model with a scalar head: a reward model, or a head of the user's own."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ptf.compute.world import World
from ptf.data.batch import Batch
from ptf.data.document import Document
from ptf.data.encode import answer_sample
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import NoResult
from ptf.errors import UserError
from ptf.model.head import Scalar
from ptf.model.model import Model
from ptf.recipes.documents import ends
from ptf.rl.endpoint.http_message import HttpError, HttpRequest, HttpResponse, json_response
from ptf.rl.endpoint.http_server import Handle
from ptf.rl.forward_passes import per_document
from ptf.serving.batched_service import BatchedService

MOST = 1024  # conversations in a request
IN_A_BATCH = 32
FORMS = "give `messages` that end with the assistant's (or a list of such conversations), or `prompt` and `response`"


class ScoreService(BatchedService[tuple[Any, Any, Any], tuple[float, int] | NoResult]):
    """Scores conversations of at most `max_length` tokens. A score does not depend on what is scored beside it."""

    def __init__(self, model: Model, tokenizer: Tokenizer, name: str, device: torch.device, max_length: int) -> None:
        super().__init__(name, IN_A_BATCH, self.compute)
        self.model, self.tokenizer, self.max_length = model, tokenizer, max_length
        self.world = World(device=device)
        self.paths: Mapping[str, Handle] = {"/v1/score": self._score}

    def example(self) -> tuple[str, dict[str, Any]]:
        """Return a path and the body of a request that can be tried."""
        return "/v1/score", {"model": self.name, "prompt": "Hello", "response": "Good morning"}

    async def _score(self, request: HttpRequest) -> HttpResponse:
        given = self.body_of(request, "messages", "prompt", "response", "tools")
        conversations = [(*one, given.get("tools")) for one in conversations_of(given)]
        scores, tokens = list[float](), 0
        for i, one in enumerate(await self.computed(conversations)):
            if isinstance(one, NoResult):
                raise HttpError(400, f"conversation {i}: {one.reason}", "invalid_messages")
            score, length = one
            if not math.isfinite(score):
                raise HttpError(500, f"conversation {i}: the model's score is {score}")
            scores.append(score)
            tokens += length
        usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
        return json_response({"object": "scores", "model": self.name, "scores": scores, "usage": usage})

    def compute(self, items: Sequence[tuple[Any, Any, Any]]) -> list[tuple[float, int] | NoResult]:
        """Return the score of each conversation and its number of tokens, or why it has none.

        A conversation is what was before the response, the response, and tools.
        """
        results = [self._sample(*one) for one in items]
        samples = [result for result in results if isinstance(result, Document)]
        values = iter(per_document(self.model, samples, self.world, last_value, seq_len=0, micro_batch_sequences=1))
        return [(next(values), len(one)) if isinstance(one, Document) else one for one in results]

    def _sample(self, history: Any, answer: Any, tools: Any) -> Document | NoResult:
        try:
            sample = answer_sample(history, answer, self.tokenizer, "", tools, scored=True)
        except UserError as error:
            return NoResult(str(error))
        if len(sample) > self.max_length:
            return NoResult(f"it has {len(sample)} tokens; {self.max_length} are allowed (--max-length)")
        return sample


def conversations_of(given: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return what is to be scored, as (what was before the response, the response). Raises HttpError for other
    forms."""
    messages, prompt, response = (given.get(name) for name in ("messages", "prompt", "response"))
    if (messages is None) == (prompt is None) or (prompt is None) != (response is None):
        raise HttpError(400, FORMS, "messages")
    if messages is not None:
        if not isinstance(messages, list) or not messages:
            raise HttpError(400, FORMS, "messages")
        found = [(None, one) for one in messages] if isinstance(messages[0], list) else [(None, messages)]
    else:
        several = (
            response if isinstance(response, list) and all(isinstance(one, str) for one in response) else [response]
        )
        found = [(prompt, one) for one in several]
    if not 1 <= len(found) <= MOST:
        raise HttpError(400, f"{len(found)} conversations; 1 to {MOST} can be scored at once", "messages")
    return found


def last_value(model: Model, batch: Batch) -> torch.Tensor:
    """Return the head's value at the last token of each document, [documents]."""
    positions = ends(batch)

    def head_fn(x: torch.Tensor, head: Any) -> torch.Tensor:
        last = x.flatten(0, 1).index_select(0, positions)  # [documents, D]
        return head.values(last) if isinstance(head, Scalar) else head(last[:, None]).float().reshape(len(last))

    return model(batch.tokens, batch.positions, batch.segments, head_fn)


@torch.no_grad()
def raise_if_not_scalar(model: Model, device: torch.device, name: str) -> None:
    """Raise UserError unless the model's own head has one output at each position."""
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
    out = model(tokens, torch.arange(2, device=device)[None], torch.zeros_like(tokens), lambda x, head: head(x))
    if out.numel() != 2:
        raise UserError(
            f"{name} has a head of its own with {out.numel() // 2} outputs at each position and without `logits`: "
            "ptf serve serves heads with one output (/v1/score), or with `logits` (responses, /v1/rank)"
        )
