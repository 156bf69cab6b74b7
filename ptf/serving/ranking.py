"""Rankings of a catalogue after histories, by a model of events (docs/events.md)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Prompt
from ptf.errors import UserError
from ptf.events.catalogue import Catalogue
from ptf.events.histories import Basket, Split
from ptf.events.model_ranking import Ranker, top
from ptf.events.ranking_metrics import with_value
from ptf.events.serialize import HistorySerializer
from ptf.rl.endpoint.chat import whole_number
from ptf.rl.endpoint.http_message import HttpError, HttpRequest, HttpResponse, json_response
from ptf.rl.endpoint.http_server import Handle
from ptf.rl.engines.native import NativeEngine
from ptf.serving.batched_service import BatchedService

MOST = 1024  # histories in a request
IN_A_BATCH = 64
LARGEST_K = 1000
LARGEST_WEIGHT = 1000  # of values
LATEST = 1e15  # seconds
RAREST = 1e-9  # popularity of items that nobody had, whose logarithm would be −inf


@dataclass(frozen=True)
class RankOptions:
    """What a list may hold; items are indices of the catalogue."""

    k: int = 10
    new: bool = False  # only items that the history does not have
    share_new: float = 0.0  # of the k places, for items that the history does not have
    value_weight: float = 0.0
    candidates: Sequence[int] | None = None  # ascending; None: all items
    exclude: frozenset[int] = frozenset()
    now: float | None = None  # time of the request, in seconds


@dataclass(frozen=True)
class Asked:
    """A history after which items are to be ranked."""

    tokens: np.ndarray
    own: frozenset[int]  # its items
    unknown: int  # its items that are not in the catalogue
    options: RankOptions


def ranked(scores: np.ndarray, own: frozenset[int], options: RankOptions) -> list[int]:
    """Return at most k items, the highest score first; items whose score is not finite are left out.

    Of its places, ⌈share_new · k⌉ are for the best items that are not `own`, if there are so many.
    """
    most = options.k + len(own) + len(options.exclude)  # the list is among so many
    if options.candidates is None:
        best = top(scores, most)
    else:
        best = [options.candidates[i] for i in top(scores[options.candidates], most)]
    best = [item for item in best if item not in options.exclude]
    unseen = [item for item in best if item not in own]
    if options.new:
        return unseen[: options.k]
    # rounded: 0.07 · 100 is 7.000000000000001
    chosen = set(unseen[: math.ceil(round(options.share_new * options.k, 9))])
    chosen.update([item for item in best if item not in chosen][: options.k - len(chosen)])
    return [item for item in best if item in chosen]


class RankService(BatchedService[Asked, dict[str, Any]]):
    """Ranks the items of a catalogue after histories, which have at most `max_length` tokens: by the model, and by
    popularity where a history has no item of the catalogue.

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
        self.values = np.array([item.value for item in catalogue.items])
        self.popularity = np.log(np.maximum([item.popularity for item in catalogue.items], RAREST))
        self.paths: Mapping[str, Handle] = {"/v1/rank": self._rank}

    def example(self) -> tuple[str, dict[str, Any]]:
        """Return a path and the body of a request that can be tried."""
        item = self.catalogue.items[0]
        one = [{"time": 0, "items": [item.name]}] if self.serializer else f"<start>{item.text}<gap_0>"
        return "/v1/rank", {"model": self.name, "histories": [one], "k": 10}

    async def _rank(self, request: HttpRequest) -> HttpResponse:
        given = self.body_of(
            request, "histories", "k", "new", "share_new", "value_weight", "candidates", "exclude", "now"
        )
        histories = given.get("histories")
        if not isinstance(histories, list) or not 1 <= len(histories) <= MOST:
            raise HttpError(400, f"histories must be a list of 1 to {MOST} histories", "histories")
        options, unknown = self._options(given)
        rankings = await self.computed([self._history(i, history, options) for i, history in enumerate(histories)])
        return json_response({"object": "rankings", "model": self.name, "unknown": unknown, "rankings": rankings})

    def _options(self, given: Mapping[str, Any]) -> tuple[RankOptions, dict[str, int]]:
        """Return the options of a request, and how many names in its lists of items are unknown. Raises HttpError."""
        new, lists, unknown = given.get("new", False), dict[str, list[int]](), dict[str, int]()
        if not isinstance(new, bool):
            raise HttpError(400, "new must be true or false", "new")
        for name, least in (("candidates", 1), ("exclude", 0)):
            names = given.get(name)
            if names is None:
                continue
            if not isinstance(names, list) or len(names) < least or not all(isinstance(one, str) for one in names):
                raise HttpError(400, f"{name} must be a list of {least} or more names of items", name)
            known = [self.index_of[one] for one in names if one in self.index_of]
            lists[name], unknown[name] = sorted(set(known)), len(names) - len(known)
        now = given.get("now")
        if now is not None and not (self.serializer and self.serializer.request_time and is_time(now)):
            raise HttpError(400, "now must be a time in seconds, and only for a model of `request_time`", "now")
        options = RankOptions(
            whole_number(given, "k", most=LARGEST_K) or 10,
            new,
            number(given, "share_new", 1),
            number(given, "value_weight", LARGEST_WEIGHT),
            lists.get("candidates"),
            frozenset(lists.get("exclude", ())),
            now,
        )
        return options, unknown

    def compute(self, asked: Sequence[Asked]) -> list[dict[str, Any]]:
        """Return the ranking of each history."""
        by_model = [one for one in asked if one.own]
        scores = self.ranker([Prompt(one.tokens, {}, "", i) for i, one in enumerate(by_model)])
        found = {id(by_model[i]): self._ranking(by_model[i], of_items, "model") for i, of_items in scores}
        return [found.get(id(one)) or self._ranking(one, self.popularity, "popularity") for one in asked]

    def _ranking(self, asked: Asked, scores: np.ndarray, by: str) -> dict[str, Any]:
        scores = with_value(scores, self.values, asked.options.value_weight)
        best = ranked(scores, asked.own, asked.options)
        return {
            "items": [self.catalogue.items[i].name for i in best],
            "scores": scores[best].tolist(),
            "own": [i in asked.own for i in best],
            "unknown": asked.unknown,
            "by": by,
        }

    def _history(self, i: int, given: Any, options: RankOptions) -> Asked:
        """Return a history as the model reads it. It is given as text, or as baskets with their times. Raises
        HttpError."""
        if isinstance(given, str):
            text, names, unknown = given, [item.name for item in self.catalogue.read(given) if item is not None], 0
        else:
            text, names, unknown = self._written(i, given, options.now)
        try:
            tokens = np.array(self.tokenizer.render([{"role": "user", "content": text}], True), np.int32)
        except UserError as error:
            raise HttpError(400, f"histories[{i}]: {error}", "histories") from None
        if len(tokens) + self.ranker.longest > self.max_length:
            raise HttpError(
                400,
                f"histories[{i}] has {len(tokens)} tokens; {self.max_length} are allowed (--max-length)",
                "histories",
            )
        return Asked(tokens, frozenset(self.index_of[name] for name in names), unknown, options)

    def _written(self, i: int, given: Any, now: float | None) -> tuple[str, Sequence[str], int]:
        """Return the text of a history that is given as baskets, the items in it, and how many were unknown."""
        if given == []:
            return "", (), 0
        if self.serializer is None:
            raise HttpError(
                400,
                f"histories[{i}] must be a text: how this model's histories are written is known to its run or config; "
                "serve one of them to give baskets",
                "histories",
            )
        baskets, unknown, before = list[Basket](), 0, -LATEST
        for basket in given if isinstance(given, list) else [None]:
            time, names = map(basket.get, ("time", "items")) if isinstance(basket, dict) else (None, None)
            if (
                not is_time(time)
                or not isinstance(names, list)
                or not names
                or not all(isinstance(one, str) for one in names)
            ):
                raise HttpError(
                    400,
                    f'histories[{i}] must be a text, or baskets {{"time": SECONDS, "items": [NAME, …]}}',
                    "histories",
                )
            if time <= before:
                raise HttpError(400, f"histories[{i}]: the times of its baskets must increase", "histories")
            known, before = [name for name in names if name in self.index_of], time
            unknown += len(names) - len(known)
            if known:
                baskets.append(Basket(float(time), tuple(dict.fromkeys(known))))
        if self.serializer.request_time and (now is None or now < before):
            raise HttpError(
                400,
                "this model reads the time of the request (request_time): now must be given, in seconds, and be no "
                "earlier than the last basket",
                "now",
            )
        row = self.serializer.prompt("", Split(tuple(baskets), ()), now)
        return row["messages"][0]["content"], row["history"], unknown


def is_time(value: Any) -> TypeGuard[float]:
    """Return whether a value of a request is a time in seconds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LATEST


def number(given: Mapping[str, Any], name: str, most: int) -> float:
    """Return a field of a request, 0 where it is not given. Raises HttpError (400) for another value."""
    value = given.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise HttpError(400, f"{name} must be a number from 0 to {most}, not {str(value)[:40]}", name)
    return value
