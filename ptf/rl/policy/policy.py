"""The policy as one episode sees it: `Policy.generate` answers a conversation, and records the call."""

import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from ptf.config.plugin import own_copy
from ptf.data.chat import clean
from ptf.data.rendering import row_arguments
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Generation, NoResult, Prompt, Reward, Trajectory, is_reward
from ptf.errors import UserError
from ptf.rl.engines.protocol import Progress, Request, Sampling
from ptf.rl.policy.calls import Call, CallHistory, CallInput, Message, NoRoom

Generate = Callable[[Request], Coroutine[Any, Any, Generation]]
Stream = Callable[[Request], AsyncGenerator[Progress]]
Messages = Sequence[Message] | Sequence[int] | np.ndarray
Tools = Sequence[Mapping[str, Any]] | None  # JSON schemas
TOLERANCE = 1e-6  # of the difference between an outcome and the sum of its turns, relative to the rewards' sizes


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings for sampling responses, and the limits of an episode."""

    sampling: Sampling  # for one generation
    max_length: int  # tokens of a context with its response
    vocabulary: int | None = None  # number of the model's token ids


class Policy:
    """The policy in one episode.

    `generate` is called with each request, and `stream`, if the engine has it, with those whose tokens are wanted as
    they are sampled. `seed_of` returns the seed of a call by its number, and of the episode's environment for -1.
    `version` is the step of the policy's weights.
    """

    def __init__(
        self,
        prompt: Prompt,
        limits: Limits,
        tokenizer: Tokenizer,
        seed_of: Callable[[int], int],
        generate: Generate,
        version: int = -1,
        stream: Stream | None = None,
    ) -> None:
        self.prompt, self.limits, self.tokenizer, self.version = prompt, limits, tokenizer, version
        self.seed_of, self._generate, self._stream = seed_of, generate, stream
        self.begin_again()
        self.failure: Exception | None = None  # of the engine, which ends the step and not only the episode

    def begin_again(self) -> None:
        """Forget all calls: the next ones have the seeds of the first."""
        self.history = CallHistory(self.tokenizer, row_arguments(self.prompt.row), self.limits.max_length)
        self.calls, self.numbers = self.history.calls, itertools.count()

    @property
    def seed(self) -> int:
        """Return the seed for everything that is random in the episode beside the policy."""
        return self.seed_of(-1)

    async def generate(
        self, context: "CallInput | Messages", *, tools: Tools = None, max_tokens: int | None = None
    ) -> Call:
        """Return the policy's response to messages, or to token ids.

        `max_tokens` can lower the limit of the job. Raises NoRoom if the context leaves no room for a response, and
        UserError if the chat template refuses the messages.
        """
        made = context if isinstance(context, CallInput) else self.context(context, tools)
        return await self.answer(made, next(self.numbers), max_tokens)

    def context(
        self, context: "Messages", tools: Tools = None, template_arguments: Mapping[str, Any] | None = None
    ) -> CallInput:
        """Return the context of the next response; `template_arguments` are further ones than those of the row. Raises
        as `generate`."""
        if len(context) and isinstance(context[0], Mapping):
            # copies, because the caller may change its messages and tools after the call
            messages, tools = own_copy((list(cast("Sequence[Message]", context)), list(tools) if tools else None))
            made = self.history.context(clean(messages), tools, template_arguments)
        else:
            tokens = np.asarray(context, np.int32)
            made = CallInput(tokens, self.tokenizer.decode(tokens))
        trie = self.limits.sampling.trie
        if len(made.tokens) + (1 if trie is None else trie.longest) > self.limits.max_length:
            raise NoRoom(
                f"the context has {len(made.tokens)} tokens, which leaves no room for a response in data.seq_len "
                f"({self.limits.max_length})"
            )
        return made

    def request(self, context: CallInput, number: int, max_tokens: int | None = None) -> Request:
        """Return the request of call `number`."""
        sampling = self.limits.sampling
        longest = min(sampling.max_new_tokens, self.limits.max_length - len(context.tokens))
        if max_tokens is not None:
            longest = min(longest, max_tokens)
        return Request(context.tokens, replace(sampling, max_new_tokens=longest), self.seed_of(number))

    async def answer(self, context: CallInput, number: int, max_tokens: int | None = None) -> Call:
        """Return the response to a context as call `number`, and record it."""
        try:
            generation = await self._generate(self.request(context, number, max_tokens))
        except Exception as error:
            self.failure = error
            raise
        call = self.call_of(context, number, generation)
        self.history.add(call)
        return call

    async def stream(self, request: Request) -> AsyncGenerator[Progress]:
        """Yield the tokens of a response as they are sampled, or all at once if the engine gives whole responses only.

        The call is not recorded.
        """
        try:
            if self._stream is None:
                generation = await self._generate(request)
                yield Progress(0, generation.sampled_ids, generation.logprobs, generation)
                return
            async with contextlib.aclosing(self._stream(request)) as news:
                async for progress in news:
                    yield progress
        except Exception as error:
            self.failure = error
            raise

    def call_of(self, context: CallInput, number: int, generation: Generation) -> Call:
        """Return a call that is not recorded yet; its message is the response's text."""
        ids = generation.sampled_ids
        text = self.tokenizer.decode(ids[:-1] if generation.finished else ids)
        message = {"role": "assistant", "content": text}
        raw = self.tokenizer.decode(ids) if context.text else ""
        return Call(number, context, generation, text, raw, generation.finished, True, message)

    def trajectory(
        self,
        outcome: float | Reward | NoResult | None = None,
        *,
        turn_rewards: Sequence[float] | np.ndarray | None = None,
        text: str | None = None,
        calls: Sequence[Call] | None = None,
        complete: bool | None = None,
        counts: Mapping[str, float] | None = None,
    ) -> Trajectory:
        """Return the episode as a trajectory.

        `outcome` is its reward; with None, `rollout.reward` scores `text`, by default the last response. `turn_rewards`
        has the reward of each trained call, in the order of the calls; their sum is the outcome, which may then be left
        out. `calls` are those that are trained, by default all. `complete`: whether the episode ended by itself, not at
        a limit; by default, whether the last response did. The means of `counts` over all episodes are metrics,
        `episode/NAME`. Raises UserError if `turn_rewards` do not fit the calls or the outcome.
        """
        if isinstance(outcome, float | int | np.floating | np.integer):
            value = float(outcome)
            outcome = Reward(value) if is_reward(value) else NoResult(f"the reward of the episode is {outcome!r}")
        elif outcome is not None and not isinstance(outcome, Reward | NoResult):
            raise UserError(f"the reward of the episode is of the type {type(outcome).__name__}, which is no number")
        given = self.calls if calls is None else calls
        chosen = [call for call in sorted(given, key=lambda call: call.number) if call.trained]
        last = chosen[-1] if chosen else None
        rewards, trie, columns = None, self.limits.sampling.trie, dict[str, np.ndarray]()
        if turn_rewards is not None:
            outcome, rewards = with_turns(outcome, turn_rewards, len(chosen))
        if trie is not None:  # the state from which each sampled token was drawn
            states = [trie.walked(call.generation.sampled_ids) for call in chosen]
            columns["trie_states"] = np.concatenate([np.zeros((0, trie.width), np.int32), *states])
        return Trajectory(
            self.prompt,
            tuple(call.generation for call in chosen),
            text if text is not None else last.text if last else "",
            outcome,
            columns,
            complete if complete is not None else bool(last and last.complete),
            dict(counts or {}),
            rewards,
        )


def with_turns(
    outcome: Reward | NoResult | None, given: Sequence[float] | np.ndarray, turns: int
) -> tuple[Reward | NoResult, np.ndarray | None]:
    """Return an episode's outcome and the rewards of its `turns` turns, [turns] float64 or None without a result.

    Without an outcome it is the sum of the rewards. Raises UserError if the number of rewards is not that of the turns,
    or if they do not add up to the outcome.
    """
    if isinstance(outcome, NoResult):
        return outcome, None
    rewards = np.asarray(given, np.float64)
    if rewards.shape != (turns,):
        raise UserError(
            f"turn_rewards has the shape {rewards.shape}, but {turns} calls of the episode are trained: give one "
            "reward for each of them, in order"
        )
    if not all(map(is_reward, rewards)):
        return NoResult(f"the rewards of the turns are {rewards.tolist()}"), None
    total = float(rewards.sum())
    if outcome is None:
        return Reward(total), rewards
    if abs(outcome.value - total) > TOLERANCE * max(1.0, float(np.abs(rewards).sum())):
        raise UserError(
            f"the reward of the episode is {outcome.value:g}, but turn_rewards add up to {total:g}: add the rest to "
            "the turn that earned it, or leave the reward out"
        )
    return outcome, rewards
