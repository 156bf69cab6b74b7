"""A reward that a server computes for several responses in one request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ptf.rl.rewards.decorators import batched
from ptf.rl.rewards.episode_view import EpisodeView
from ptf.rl.rewards.http_reward import HttpReward, raise_if_no_count
from ptf.rl.rewards.json_endpoint import RequestFault

BATCH = 32


@batched(lambda *, batch=BATCH, **_: batch)
@dataclass(kw_only=True, eq=False)
class HttpBatchReward(HttpReward):
    """Send `{"items": [{"row": …, "text": …}, …]}` to `url` by POST and return the numbers `rewards` of the JSON object
    that it answers, one for each item, in their order.

    `batch` is the largest number of responses in a request. A value that is no number, such as null, concerns its own
    response. After a request that fails, its responses are sent again one by one. The other arguments are those of
    HttpReward; the field `episode` is added to each item.
    """

    batch: int = BATCH

    def __post_init__(self) -> None:
        raise_if_no_count("batch", self.batch)
        super().__post_init__()

    async def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, items: Sequence[tuple[Mapping[str, Any], str]], *, episodes: Sequence[EpisodeView | None] | None = None
    ) -> list[Any]:
        """Return the server's rewards, which the caller checks one by one. Raises RequestFault."""
        views = episodes or [None] * len(items)
        bodies = [self.body(row, text, view) for (row, text), view in zip(items, views, strict=True)]
        reply = await self.endpoint.post({"items": bodies})
        rewards = reply.get("rewards") if isinstance(reply, dict) else None
        if not isinstance(rewards, list):
            raise RequestFault(f'the reply is not {{"rewards": [NUMBER, …]}}: {self.endpoint.shown(str(reply))}')
        return [f"{one}" if isinstance(one, bool) else one for one in rewards]  # true is no number
