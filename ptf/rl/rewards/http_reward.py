"""Rewards that a server computes: a request for each response or for several, many at once."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ptf.errors import UserError
from ptf.rl.rewards.decorators import batched
from ptf.rl.rewards.episode_view import EpisodeView
from ptf.rl.rewards.json_endpoint import JsonEndpoint, RequestFault

BATCH = 32


def raise_if_no_count(name: str, value: Any) -> None:
    """Raise UserError unless an argument is a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name}: it must be a whole number above 0, not {value!r}")


def finite(value: Any) -> Any:
    """Return a value with None for each number in it that is not finite."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(kw_only=True, eq=False)
class ServerReward:
    """What rewards that ask a server share.

    `headers_from_env` maps headers to the environment variables that hold their values, `timeout_s` limits one request,
    and `max_concurrent_calls` is how many are made at once in a process. Connections that fail and replies with status
    408, 429 or 5xx are tried again up to `retries` times, after `wait_s` seconds, then twice as long, or after
    `Retry-After`; at most 30 s. Any other status is a fault, redirects too. A reply has at most `max_bytes`.
    """

    url: str
    headers_from_env: Mapping[str, str] | None = None
    timeout_s: float | None = None
    retries: int = 3
    wait_s: float = 0.5
    max_bytes: int = 1 << 20
    max_concurrent_calls: int = 64

    def endpoint_at(self, url: str, bearer_from_env: str | None = None) -> JsonEndpoint:
        """Return the endpoint at an address, with these limits. Raises UserError for values that cannot be used."""
        raise_if_no_count("max_concurrent_calls", self.max_concurrent_calls)
        limits = self.timeout_s, self.retries, self.wait_s, self.max_bytes
        return JsonEndpoint(url, self.headers_from_env or {}, *limits, bearer_from_env)

    @classmethod
    def check_arguments(cls, **args: Any) -> None:
        """Raise UserError if these arguments cannot be used."""
        cls(**args)


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
        self.endpoint = self.endpoint_at(self.url)

    async def __call__(self, row: Mapping[str, Any], text: str, *, episode: EpisodeView | None = None) -> float:
        """Return the server's reward. Raises RequestFault."""
        reply = await self.endpoint.post(self.body(row, text, episode))
        reward = reply.get("reward") if isinstance(reply, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise RequestFault(f'the reply is not {{"reward": NUMBER}}: {self.endpoint.shown(str(reply))}')
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
                columns[name] = finite(value)
            except TypeError as error:
                raise RequestFault(f"the column {name!r} of the row cannot be written as JSON: {error}") from None
        return {"row": columns, "text": text, **sent}

    @classmethod
    def first_lines(cls, **args: Any) -> list[str]:
        """Return the first line that a run prints about the reward. Raises UserError if it cannot be used here."""
        reward = cls(**args)
        reward.endpoint.raise_if_unusable()
        address, most = reward.endpoint.address, reward.max_concurrent_calls
        return [f"reward: rows and responses are sent to {address}, up to {most} at once"]

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
