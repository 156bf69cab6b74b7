"""Playing episodes: policy and environment take turns until the environment is done, or there is no more room. An answer without an environment is an
episode of one turn.

The one idea: what the policy sampled stays as it was sampled. The next context is what a server would send, the conversation rendered anew; as long as
that text begins with what was served and said, its ids are those of the call before, the sampled ones, and of the new text alone. Where the template
rewrites what was said, the context is encoded from its text, and a new sample begins there (`ptf.data.trajectory.merged`).
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ptf.data.chat import clean
from ptf.data.context import refuse_unseen
from ptf.data.rendering import row_arguments
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Call, NoResult, Prompt, Reward, Trajectory
from ptf.errors import UserError
from ptf.rl.engine import Request, RolloutEngine, Sampling
from ptf.rl.env import EnvironmentFault, Environments, Message, Played


@dataclass(frozen=True, slots=True)
class Limits:
    sampling: Sampling  # of one call
    max_length: int  # tokens of a context with what is sampled after it
    max_turns: int = 1
    vocabulary: int | None = None  # ids that the model has


@dataclass
class Episode:
    """One conversation, between two calls: `context` is what the policy is shown next."""

    prompt: Prompt
    limits: Limits
    tokenizer: Tokenizer
    seed_of: Callable[[int], int]  # of a turn; of -1, the environment's
    environments: Environments | None = None
    context: np.ndarray = field(init=False)
    calls: list[Call] = field(default_factory=list)
    reward: float = 0.0
    failed: str | None = None
    over: bool = False  # there is no further call
    complete: bool = False  # it ended by itself, not at a limit
    _played: Played | None = None
    _messages: list[dict[str, Any]] = field(default_factory=list)
    _tools: Any = None
    _text: str = ""  # what `context` is the ids of

    async def begin(self) -> None:
        self.context = self.prompt.tokens
        if self.environments is None:
            return None
        try:
            self._played, shown, self._tools = await self.environments.begin(self.prompt.row, self.seed_of(-1))
        except EnvironmentFault as error:
            return self._fail(str(error))
        try:
            self._messages = clean(list(shown))
            self._text = self._render()
            self.context = np.array(self.tokenizer.encode(self._text), np.int32)
        except UserError as error:
            return self._fail(f"what the environment shows first: {error}")
        if self._full():
            shown, most = len(self.context), self.limits.max_length
            self._fail(f"what the environment shows first has {shown} tokens, which leaves no room for an answer in data.seq_len ({most})")

    def _render(self, since: int = 0) -> str:
        """What the policy is shown. Raises UserError where the template leaves out a message from number `since` on."""
        arguments = row_arguments(self.prompt.row)
        text = self.tokenizer.render_text(self._messages, True, self._tools, arguments)
        refuse_unseen(self._messages, text, self.tokenizer, self._tools, arguments, since=since if text.startswith(self._text) else 0)
        return text

    def _full(self) -> bool:
        """Whether there is no room for another answer; where only some are allowed, for the longest of them."""
        trie = self.limits.sampling.trie
        return len(self.context) + (1 if trie is None else trie.longest) > self.limits.max_length

    def _fail(self, why: str) -> None:
        """It has no result."""
        self.failed, self.over, self.complete = why, True, False

    def request(self) -> Request:
        s = self.limits.sampling
        room = min(s.max_new_tokens, self.limits.max_length - len(self.context))
        return Request(self.context, replace(s, max_new_tokens=room), self.seed_of(len(self.calls)))

    async def hear(self, call: Call) -> None:
        """What the policy said; afterwards `context` goes on from there, or it is over."""
        self.calls.append(call)
        if self.environments is None or self._played is None:
            self.over, self.complete = True, call.finished
            return None
        said = self.tokenizer.decode(call.sampled[:-1] if call.finished else call.sampled)
        try:
            turn = await self.environments.act(self._played, said)
        except EnvironmentFault as error:
            return self._fail(str(error))
        self.reward += float(turn.reward)
        self.complete = turn.done
        self.over = turn.done or len(self.calls) == self.limits.max_turns
        if self.over:
            return None
        try:
            self._go_on(call, [turn.said or {"role": "assistant", "content": said}, *turn.messages])
        except UserError as error:
            self._fail(f"what the environment answers: {error}")

    def _go_on(self, call: Call, more: Sequence[Message]) -> None:
        served = self._text + self.tokenizer.decode(call.sampled)
        known = len(self._messages)
        self._messages = clean([*self._messages, *more])
        if self._messages[-1]["role"] == "assistant":
            raise UserError("the environment is not done, but gave no message to answer to")
        self._text = self._render(known)
        if self._text.startswith(served):
            ids = [*call.context, *call.sampled, *self.tokenizer.encode(self._text[len(served) :])]
        else:
            ids = self.tokenizer.encode(self._text)
        self.context = np.array(ids, np.int32)
        self.over = self._full()

    async def trajectory(self) -> Trajectory:
        """Its outcome is the environment's; without one it is scored later."""
        if self._played and self.environments:
            await self.environments.end(self._played)
        if self.environments is None:
            (call,) = self.calls
            said = self.tokenizer.decode(call.sampled[:-1] if call.finished else call.sampled)
            return Trajectory(self.prompt, (call,), said, streams=self._streams(), complete=self.complete)
        outcome = NoResult(self.failed) if self.failed is not None else Reward(self.reward)
        return Trajectory(self.prompt, tuple(self.calls), self._told(), outcome, self._streams(), self.complete)

    def _streams(self) -> dict[str, np.ndarray]:
        """Of all sampled tokens: where only some were allowed, what of the trie each was drawn from."""
        trie = self.limits.sampling.trie
        return {} if trie is None else {"states": np.concatenate([np.zeros((0, trie.width), np.int32), *(trie.walked(c.sampled) for c in self.calls)])}

    def _told(self) -> str:
        """All that was said after the first context, by both sides; where a template rewrites an answer later, also as it then stands."""
        ids = list[int]()
        for call, later in itertools.pairwise([*self.calls, None]):
            assert call is not None
            after = later.context if later else np.zeros(0, np.int32)
            here = np.concatenate([call.context, call.sampled])[: len(after)]
            apart = np.flatnonzero(here != after[: len(here)])
            ids += [*call.sampled, *after[min(int(apart[0]), len(call.context)) if len(apart) else len(here) :]]
        return self.tokenizer.decode(ids)


async def played(engine: RolloutEngine, episodes: Sequence[Episode]) -> AsyncGenerator[tuple[int, Trajectory]]:
    """Each of them with its number, as soon as it is over. No conversation waits for another's turn, but with an engine that answers in batches (so
    that each of its batches is the same whenever it is played)."""
    if engine.in_batches:
        await asyncio.gather(*(episode.begin() for episode in episodes))
        while live := [episode for episode in episodes if not episode.over]:
            calls = await asyncio.gather(*(_asked(engine, episode) for episode in live))
            await asyncio.gather(*(episode.hear(call) for episode, call in zip(live, calls, strict=True)))
    playing = [asyncio.create_task(_numbered(engine, i, episode)) for i, episode in enumerate(episodes)]
    try:
        for ended in asyncio.as_completed(playing):
            yield await ended
    finally:
        for task in playing:
            task.cancel()


async def play(engine: RolloutEngine, episodes: Sequence[Episode]) -> list[Trajectory]:
    """All of them to their ends, in their order."""
    found = dict([one async for one in played(engine, episodes)])
    return [found[i] for i in range(len(episodes))]


async def _numbered(engine: RolloutEngine, number: int, episode: Episode) -> tuple[int, Trajectory]:
    if not engine.in_batches:
        await episode.begin()
        while not episode.over:
            await episode.hear(await _asked(engine, episode))
    return number, await episode.trajectory()


async def _asked(engine: RolloutEngine, episode: Episode) -> Call:
    """Its next call. Raises EngineFault for one that no engine may give, UserError if the engine refuses the request."""
    request = episode.request()
    try:
        call = await engine.generate(request)
    except ValueError as error:
        if type(error) is not ValueError:  # a kind of its own is a fault inside it
            raise
        raise UserError(f"the rollout engine {engine.name} cannot serve what is asked of it: {error}") from error
    refuse_garbage(call, request, engine, episode.limits.vocabulary)
    return call


class EngineFault(RuntimeError):
    """An engine gave what it may not: it is broken, whatever else it says."""


def followed(call: Call, request: Request) -> bool:
    """Whether it was allowed."""
    try:
        if request.sampling.trie is not None:
            request.sampling.trie.walked(call.sampled)
    except ValueError:
        return False
    return True


def refuse_garbage(call: Call, request: Request, engine: RolloutEngine, vocabulary: int | None) -> None:
    """Raises EngineFault unless the call is an answer to the request: its context, and tokens of the vocabulary, each with a log-prob and the version
    of the engine's weights."""
    try:
        found = wrong(call, request, engine.version, vocabulary)
    except (AttributeError, TypeError, ValueError) as error:
        found = [f"what is no call, a {type(call).__name__} ({error})"]
    if found:
        raise EngineFault(f"the rollout engine {engine.name} answered with {' and '.join(found)}")


def wrong(call: Call, request: Request, version: int, vocabulary: int | None) -> list[str]:
    """What may not be so in a call; where it is of other types than a call's, whatever error that makes."""
    sampled, logprobs, most = call.sampled, call.logprobs, request.sampling.max_new_tokens
    if sampled.dtype.kind not in "iu" or logprobs.dtype.kind != "f":
        return [f"tokens of type {sampled.dtype} and log-probs of type {logprobs.dtype}"]
    faults = {
        "another context than was asked": not np.array_equal(call.context, request.context),
        f"{len(sampled)} tokens of at most {most}": not 1 <= len(sampled) <= most,
        "a token that was not allowed": not followed(call, request),
        "a token that is not in the vocabulary": bool(((sampled < 0) | (sampled >= (vocabulary or np.inf))).any()),
        "log-probs that are not numbers of at most 0, one a token": len(logprobs) != len(sampled)
        or not bool(((np.abs(logprobs) <= np.finfo(np.float32).max) & (logprobs <= 1e-3)).all()),
        f"tokens of other weights than it holds, {version}": len(call.versions) != len(sampled) or bool((call.versions != version).any()),
    }
    return [fault for fault, there in faults.items() if there]
