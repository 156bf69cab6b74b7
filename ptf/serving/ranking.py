"""Rankings of a catalogue after histories, by a model of events (docs/events.md)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Prompt
from ptf.errors import UserError
from ptf.events.catalogue import Catalogue
from ptf.events.histories import Basket, Split
from ptf.events.model_ranking import Ranker, top
from ptf.events.serialize import HistorySerializer
from ptf.rl.endpoint.chat import whole_number
from ptf.rl.endpoint.http_message import HttpError, HttpRequest, HttpResponse, json_response
from ptf.rl.endpoint.http_server import Handle
from ptf.rl.engines.native import NativeEngine
from ptf.serving.batched_service import BatchedService

MOST = 1024  # histories in a request
IN_A_BATCH = 64
LARGEST_K = 1000


class RankService(BatchedService[np.ndarray, np.ndarray]):
    """Ranks the items of a catalogue after histories, which have at most `max_length` tokens.

    `serializer` writes histories as the model was trained on; None: its settings are not known, and histories must be
    given as texts.
    """

    def __init__(
        self,
        engine: NativeEngine,
        tokenizer: Tokenizer,
        name: str,
        catalogue: Catalogue,
        serializer: HistorySerializer | None,
        *,
        beam: int,
        max_length: int,
    ) -> None:
        super().__init__(name, IN_A_BATCH, self.compute)
        self.tokenizer, self.catalogue, self.serializer = tokenizer, catalogue, serializer
        self.max_length = max_length
        self.index_of = {item.name: i for i, item in enumerate(catalogue.items)}
        self.ranker = Ranker(engine, catalogue, tokenizer, beam)
        self.paths: Mapping[str, Handle] = {"/v1/rank": self._rank}

    def example(self) -> tuple[str, dict[str, Any]]:
        """Return a path and the body of a request that can be tried."""
        item = self.catalogue.items[0]
        one = [{"time": 0, "items": [item.name]}] if self.serializer else f"<start>{item.text}<gap_0>"
        return "/v1/rank", {"model": self.name, "histories": [one], "k": 10}

    async def _rank(self, request: HttpRequest) -> HttpResponse:
        given = self.body_of(request, "histories", "k", "new")
        histories, new = given.get("histories"), given.get("new", False)
        if not isinstance(histories, list) or not 1 <= len(histories) <= MOST:
            raise HttpError(400, f"histories must be a list of 1 to {MOST} histories", "histories")
        k = whole_number(given, "k", most=LARGEST_K) or 10
        if not isinstance(new, bool):
            raise HttpError(400, "new must be true or false", "new")
        read = [self._history(i, history) for i, history in enumerate(histories)]
        rankings = []
        for (_, items), scores in zip(read, await self.computed([tokens for tokens, _ in read]), strict=True):
            if new:
                scores[items] = -np.inf
            best = top(scores, k)
            rankings.append({"items": [self.catalogue.items[i].name for i in best], "scores": scores[best].tolist()})
        return json_response({"object": "rankings", "model": self.name, "rankings": rankings})

    def compute(self, items: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the scores of all items of the catalogue after each history."""
        scores = dict(self.ranker([Prompt(tokens, {}, "", i) for i, tokens in enumerate(items)]))
        return [scores[i] for i in range(len(items))]

    def _history(self, i: int, given: Any) -> tuple[np.ndarray, list[int]]:
        """Return a history as the model reads it, and the indices of the items in it. It is given as text, or as
        baskets with their times. Raises HttpError."""
        if isinstance(given, str):
            text, items = given, [self.index_of[item.name] for item in self.catalogue.read(given) if item is not None]
        else:
            text, items = self._written(i, given)
        try:
            tokens = np.array(self.tokenizer.render([{"role": "user", "content": text}], True), np.int32)
        except UserError as error:
            raise HttpError(400, f"histories[{i}]: {error}", "histories") from None
        if len(tokens) + self.ranker.trie.longest > self.max_length:
            raise HttpError(
                400,
                f"histories[{i}] has {len(tokens)} tokens; {self.max_length} are allowed (--max-length)",
                "histories",
            )
        return tokens, items

    def _written(self, i: int, given: Any) -> tuple[str, list[int]]:
        """Return the text of a history that is given as baskets, and its items."""
        if self.serializer is None:
            raise HttpError(
                400,
                f"histories[{i}] must be a text: how this model's histories are written is known to its run or config; "
                "serve one of them to give baskets",
                "histories",
            )
        baskets = list[Basket]()
        for basket in given if isinstance(given, list) and given else [None]:
            time, names = (basket.get(key) if isinstance(basket, dict) else None for key in ("time", "items"))
            if isinstance(time, bool) or not isinstance(time, int | float) or not isinstance(names, list) or not names:
                raise HttpError(
                    400,
                    f'histories[{i}] must be a text, or baskets {{"time": SECONDS, "items": [NAME, …]}}',
                    "histories",
                )
            if unknown := [name for name in names if not isinstance(name, str) or name not in self.index_of]:
                raise HttpError(400, f"histories[{i}]: {str(unknown[0])[:80]!r} is not in the catalogue", "histories")
            if baskets and time <= baskets[-1].time:
                raise HttpError(400, f"histories[{i}]: the times of its baskets must increase", "histories")
            baskets.append(Basket(float(time), tuple(dict.fromkeys(names))))
        row = self.serializer.prompt("", Split(tuple(baskets), ()))
        return row["messages"][0]["content"], [self.index_of[name] for name in row["history"]]
