"""Rewards of a server that is sent rows and responses: a request for each response or for several, many at once."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ptf.errors import UserError
from ptf.rl.rewards.calls import EpisodeView
from ptf.rl.rewards.declarations import batched
from ptf.rl.rewards.server_reward import RequestFault, ServerReward, raise_if_less

BATCH = 32


@dataclass(kw_only=True, eq=False)
class HttpReward(ServerReward):
    """Send `{"row": …, "text": …}` to `url` by POST and return the number `reward` of the JSON object that it answers.

    `send_episode` adds `episode` to the object, the fields of EpisodeView. A number of the row that is not finite is
    sent as null. The other arguments are those of ServerReward.
    """

    send_episode: bool = False
    with_nulls: set[str] = field(init=False, default_factory=set)  # columns of which it was printed

    def __post_init__(self) -> None:
        if not isinstance(self.send_episode, bool):
            raise UserError(f"send_episode: it must be true or false, not {self.send_episode!r}")
        super().__post_init__()

    async def __call__(self, row: Mapping[str, Any], text: str, *, episode: EpisodeView | None = None) -> float:
        """Return the server's reward. Raises RequestFault."""
        reply = await self.post(self.body(row, text, episode))
        reward = reply.get("reward") if isinstance(reply, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise RequestFault(f'the reply is not {{"reward": NUMBER}}: {self.shown(str(reply))}')
        return reward

    def body(self, row: Mapping[str, Any], text: str, episode: EpisodeView | None) -> dict[str, Any]:
        """Return what is sent of a response. Raises RequestFault for a column that JSON cannot hold."""
        sent = {"episode": episode.as_json()} if self.send_episode and episode is not None else {}
        columns = dict(row)
        for name, value in row.items():
            try:
                json.dumps(value, allow_nan=False)
            except ValueError:
                if name not in self.with_nulls:
                    self.with_nulls.add(name)
                    print(f"reward: column {name!r} has numbers that JSON does not have, such as NaN: null is sent")
                columns[name] = json.loads(json.dumps(value), parse_constant=lambda _: None)
            except TypeError as error:
                raise RequestFault(f"the column {name!r} of the row cannot be written as JSON: {error}") from None
        return {"row": columns, "text": text, **sent}

    @staticmethod
    def sees_episodes(*, send_episode: bool = False, **_: Any) -> bool:
        """Return whether the episode is sent."""
        return send_episode


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
        raise_if_less("batch", self.batch, 1)
        super().__post_init__()

    async def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, items: Sequence[tuple[Mapping[str, Any], str]], *, episodes: Sequence[EpisodeView | None] | None = None
    ) -> list[Any]:
        """Return the server's rewards, which the caller checks one by one. Raises RequestFault."""
        views = episodes or [None] * len(items)
        bodies = [self.body(row, text, view) for (row, text), view in zip(items, views, strict=True)]
        reply = await self.post({"items": bodies})
        rewards = reply.get("rewards") if isinstance(reply, dict) else None
        if not isinstance(rewards, list):
            raise RequestFault(f'the reply is not {{"rewards": [NUMBER, …]}}: {self.shown(str(reply))}')
        return [f"{one}" if isinstance(one, bool) else one for one in rewards]  # true is no number
