"""Episodes: policy and environment take turns until the environment is done or the context is full. An answer without
an environment is an episode of one turn.

Sampled tokens are never changed. The next context is the one that a server would send: the whole conversation, rendered
again. If that text begins with the text of the last context and its answer, its ids are the ids of that context, the
sampled ids, and the ids of the new text. If the template rewrites an earlier answer, the context is encoded from its
text, and a new training sample begins there (`ptf.data.trajectory.group_into_documents`).
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ptf.data.chat import clean
from ptf.data.context import raise_if_unseen
from ptf.data.rendering import row_arguments
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Generation, NoResult, Prompt, Reward, Trajectory
from ptf.errors import UserError
from ptf.rl.engines.protocol import Request, RolloutEngine, Sampling
from ptf.rl.environments.protocol import EnvironmentFault, Environments, EpisodeState, Message


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings for sampling answers, and limits at which an episode ends."""

    sampling: Sampling  # for one generation
    max_length: int  # tokens of a context with its answer
    max_turns: int = 1
    vocabulary: int | None = None  # number of the model's token ids


@dataclass
class Episode:
    """One conversation, between two generations: `context` is the next input of the policy."""

    prompt: Prompt
    limits: Limits
    tokenizer: Tokenizer
    seed_of: Callable[[int], int]  # turn → seed; -1: the environment's seed
    environments: Environments | None = None
    context: np.ndarray = field(init=False)
    generations: list[Generation] = field(default_factory=list)
    reward: float = 0.0
    failure: str | None = None  # the reason if the episode has no result
    done: bool = False  # whether the episode has ended
    complete: bool = False  # whether it ended by itself, not at a limit
    _state: EpisodeState | None = None
    _messages: list[dict[str, Any]] = field(default_factory=list)
    _tools: Any = None
    _text: str = ""  # the text of `context`

    async def begin(self) -> None:
        """Start the environment, if there is one, and set the first context."""
        self.context = self.prompt.tokens
        if self.environments is None:
            return None
        try:
            self._state, messages, self._tools = await self.environments.reset(self.prompt.row, self.seed_of(-1))
        except EnvironmentFault as error:
            return self._fail(str(error))
        try:
            self._messages = clean(list(messages))
            self._text = self._render()
            self.context = np.array(self.tokenizer.encode(self._text), np.int32)
        except UserError as error:
            return self._fail(f"the environment's first messages: {error}")
        if self._full():
            self._fail(
                f"the environment's first messages have {len(self.context)} tokens, which leaves no room for an answer "
                f"in data.seq_len ({self.limits.max_length})"
            )

    def _render(self, since: int = 0) -> str:
        """Return the conversation as text. Raises UserError if the template omits a message from number `since` on."""
        arguments = row_arguments(self.prompt.row)
        text = self.tokenizer.render_text(self._messages, True, self._tools, arguments)
        raise_if_unseen(
            self._messages,
            text,
            self.tokenizer,
            self._tools,
            arguments,
            since=since if text.startswith(self._text) else 0,
        )
        return text

    def _full(self) -> bool:
        """Return whether there is no room for a further answer; with a trie, for the longest allowed answer."""
        trie = self.limits.sampling.trie
        return len(self.context) + (1 if trie is None else trie.longest) > self.limits.max_length

    def _fail(self, reason: str) -> None:
        """End the episode without a result."""
        self.failure, self.done, self.complete = reason, True, False

    def request(self) -> Request:
        """Return the request for the policy's next answer."""
        s = self.limits.sampling
        room = min(s.max_new_tokens, self.limits.max_length - len(self.context))
        return Request(self.context, replace(s, max_new_tokens=room), self.seed_of(len(self.generations)))

    def _answer_text(self, generation: Generation) -> str:
        """Return the text of an answer without its end-of-turn token."""
        return self.tokenizer.decode(generation.sampled_ids[:-1] if generation.finished else generation.sampled_ids)

    async def add(self, generation: Generation) -> None:
        """Add the policy's answer, get the environment's reply, and set the next context or end the episode."""
        self.generations.append(generation)
        if self.environments is None or self._state is None:
            self.done, self.complete = True, generation.finished
            return None
        text = self._answer_text(generation)
        try:
            result = await self.environments.step(self._state, text)
        except EnvironmentFault as error:
            return self._fail(str(error))
        self.reward += float(result.reward)
        self.complete = result.done
        self.done = result.done or len(self.generations) == self.limits.max_turns
        if self.done:
            return None
        try:
            own = result.policy_message or {"role": "assistant", "content": text}
            self._extend(generation, [own, *result.environment_messages])
        except UserError as error:
            self._fail(f"the environment's reply: {error}")

    def _extend(self, generation: Generation, messages: Sequence[Message]) -> None:
        """Set the next context, after a generation and the environment's messages.

        Raises UserError if the messages are invalid.
        """
        served = self._text + self.tokenizer.decode(generation.sampled_ids)
        known = len(self._messages)
        self._messages = clean([*self._messages, *messages])
        if self._messages[-1]["role"] == "assistant":
            raise UserError("the environment is not done, but returned no message for the policy to answer")
        self._text = self._render(known)
        if self._text.startswith(served):
            ids = [*generation.context, *generation.sampled_ids, *self.tokenizer.encode(self._text[len(served) :])]
        else:
            ids = self.tokenizer.encode(self._text)
        self.context = np.array(ids, np.int32)
        self.done = self._full()

    async def trajectory(self) -> Trajectory:
        """Return the trajectory of the finished episode. Without an environment, scoring sets its outcome later."""
        if self._state and self.environments:
            await self.environments.end(self._state)
        if self.environments is None:
            (generation,) = self.generations
            text = self._answer_text(generation)
            return Trajectory(self.prompt, (generation,), text, token_columns=self._streams(), complete=self.complete)
        outcome = NoResult(self.failure) if self.failure is not None else Reward(self.reward)
        return Trajectory(
            self.prompt, tuple(self.generations), self._transcript(), outcome, self._streams(), self.complete
        )

    def _streams(self) -> dict[str, np.ndarray]:
        """Return the trie's state from which each sampled token was drawn; an empty dict without a trie."""
        trie = self.limits.sampling.trie
        if trie is None:
            return {}
        states = [trie.walked(generation.sampled_ids) for generation in self.generations]
        return {"trie_states": np.concatenate([np.zeros((0, trie.width), np.int32), *states])}

    def _transcript(self) -> str:
        """Return all text after the first context, of both sides.

        If the template rewrites an answer later, the rewritten form is included too.
        """
        ids = list[int]()
        for generation, later in itertools.pairwise([*self.generations, None]):
            assert generation is not None
            after = later.context if later else np.zeros(0, np.int32)
            here = np.concatenate([generation.context, generation.sampled_ids])[: len(after)]
            different = np.flatnonzero(here != after[: len(here)])
            start = min(int(different[0]), len(generation.context)) if len(different) else len(here)
            ids += [*generation.sampled_ids, *after[start:]]
        return self.tokenizer.decode(ids)


async def run_episodes(engine: RolloutEngine, episodes: Sequence[Episode]) -> AsyncGenerator[tuple[int, Trajectory]]:
    """Yield (index, trajectory) of each episode as soon as it ends.

    Episodes do not wait for each other, except with an engine that answers in batches: then all take their turns
    together, so that the batches are the same in every run.
    """
    if engine.in_batches:
        await asyncio.gather(*(episode.begin() for episode in episodes))
        while live := [episode for episode in episodes if not episode.done]:
            generations = await asyncio.gather(*(_next_generation(engine, episode) for episode in live))
            await asyncio.gather(
                *(episode.add(generation) for episode, generation in zip(live, generations, strict=True))
            )
    tasks = [asyncio.create_task(_run_one(engine, i, episode)) for i, episode in enumerate(episodes)]
    try:
        for ended in asyncio.as_completed(tasks):
            yield await ended
    finally:
        for task in tasks:
            task.cancel()


async def run_all(engine: RolloutEngine, episodes: Sequence[Episode]) -> list[Trajectory]:
    """Run all episodes to their ends; return their trajectories in order."""
    trajectories = dict([one async for one in run_episodes(engine, episodes)])
    return [trajectories[i] for i in range(len(episodes))]


async def _run_one(engine: RolloutEngine, number: int, episode: Episode) -> tuple[int, Trajectory]:
    if not engine.in_batches:
        await episode.begin()
        while not episode.done:
            await episode.add(await _next_generation(engine, episode))
    return number, await episode.trajectory()


async def _next_generation(engine: RolloutEngine, episode: Episode) -> Generation:
    """Generate an episode's next answer.

    Raises EngineFault if the answer breaks the protocol, UserError if the engine refuses the request.
    """
    request = episode.request()
    try:
        generation = await engine.generate(request)
    except ValueError as error:
        if type(error) is not ValueError:  # a subclass is a fault inside the engine
            raise
        raise UserError(f"the rollout engine {engine.name} cannot serve this run's requests: {error}") from error
    raise_if_garbage(generation, request, engine, episode.limits.vocabulary)
    return generation


class EngineFault(RuntimeError):
    """An engine gave an answer that breaks the protocol."""


def follows_trie(generation: Generation, request: Request) -> bool:
    """Return whether the request's trie allows the answer."""
    try:
        if request.sampling.trie is not None:
            request.sampling.trie.walked(generation.sampled_ids)
    except ValueError:
        return False
    return True


def raise_if_garbage(generation: Generation, request: Request, engine: RolloutEngine, vocabulary: int | None) -> None:
    """Raise EngineFault unless the generation is an answer to the request.

    A generation must have the request's context, and tokens of the vocabulary, each with a log-prob and the version of
    the engine's weights.
    """
    try:
        faults = generation_errors(generation, request, engine.version, vocabulary)
    except (AttributeError, TypeError, ValueError) as error:
        faults = [f"a {type(generation).__name__}, which is not a valid generation ({error})"]
    if faults:
        raise EngineFault(f"the rollout engine {engine.name} answered with {' and '.join(faults)}")


def generation_errors(generation: Generation, request: Request, version: int, vocabulary: int | None) -> list[str]:
    """Return the faults of a generation, in words. May raise any error if its attributes have wrong types."""
    sampled, logprobs, most = generation.sampled_ids, generation.logprobs, request.sampling.max_new_tokens
    if sampled.dtype.kind not in "iu" or logprobs.dtype.kind != "f":
        return [f"tokens of type {sampled.dtype} and log-probs of type {logprobs.dtype}"]
    faults = {
        "a context that is not the request's": not np.array_equal(generation.context, request.context),
        f"{len(sampled)} tokens of at most {most}": not 1 <= len(sampled) <= most,
        "a token that was not allowed": not follows_trie(generation, request),
        "a token that is not in the vocabulary": bool(((sampled < 0) | (sampled >= (vocabulary or np.inf))).any()),
        "log-probs that are not numbers of at most 0, one per token": len(logprobs) != len(sampled)
        or not bool(((np.abs(logprobs) <= np.finfo(np.float32).max) & (logprobs <= 1e-3)).all()),
        f"tokens whose version is not that of its weights, {version}": len(generation.versions) != len(sampled)
        or bool((generation.versions != version).any()),
    }
    return [fault for fault, present in faults.items() if present]
