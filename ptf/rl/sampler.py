"""The role that generates: `Sampler`, an engine with its tokenizer and environments.

A response's seed depends only on the run's seed, the key (of a step or an evaluation), the prompt's index and the
response's number, not on the worker that generates it.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from typing_extensions import override

from ptf.compute.offload import release_freed_memory
from ptf.compute.world import World
from ptf.config.logprob_limits import LogprobLimits
from ptf.config.sections.rollout import RolloutConfig
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Generation, Group, Prompt, Trajectory
from ptf.data.trie import Trie
from ptf.rl.cluster import (
    Role,
    broadcast,
    replayed_broadcast,
    split_over_workers,
    summed_broadcast,
    unreplayable_broadcast,
)
from ptf.rl.engine_settings import EngineSettings
from ptf.rl.engines.protocol import Request, Sampling, answered
from ptf.rl.episodes import Episode, RolloutFunctions, run_episodes
from ptf.rl.event_loop import EventLoop, run_coroutine
from ptf.rl.policy.policy import Limits
from ptf.rl.weights.streamed import Transfer
from ptf.rl.weights.verification import Buckets, LogprobDifference, Manifest, Receipt, SyncError


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """What the role is made from."""

    engine: EngineSettings
    tokenizer: str
    rollout: RolloutConfig
    timeout_s: float
    vocabulary: int | None = None  # rows of the model's output; None: not known
    trie: Trie | None = None  # the allowed responses; None: any


class Sampler(Role):
    """A role with an engine that generates from the policy's weights."""

    uses_process_group: ClassVar[bool] = False

    def __init__(self, world: World, settings: SamplerSettings) -> None:
        self.world, self.settings, rollout = world, settings, settings.rollout
        self.tokenizer = Tokenizer.load(settings.tokenizer)
        self.rollout_functions = RolloutFunctions(self.tokenizer, rollout)
        self.close = self.rollout_functions.close  # ends the processes of the environments and of the harness
        self.episode_timeout_s = rollout.episode_timeout_s or (600.0 if rollout.harness else None)
        try:
            self.engine = settings.engine.start(world)
        except BaseException:
            self.close()
            raise

    @split_over_workers(cost=lambda prompt: len(prompt.tokens))
    def rollout(
        self, prompts: list[Prompt], version: int, key: str, n: int, max_new_tokens: int, temperature: float
    ) -> Iterator[list[tuple[int, Group]]]:
        """Yield (index of a prompt, its `n` responses) as soon as all responses to that prompt are generated, in lists
        of what became whole together.

        `key` identifies the step or evaluation; with the prompt's index and the response's number it seeds each
        response. Raises SyncError, before anything is generated, if the engine's weights do not have exactly this
        `version`.
        """
        self._raise_if_other_version(version)
        limits = self.limits(max_new_tokens, temperature)
        episodes = [
            Episode(
                prompt,
                limits,
                self.tokenizer,
                partial(seed_of, self.settings.engine.seed, key, prompt.index, i),
                self.rollout_functions.of(prompt.source),
                self.episode_timeout_s,
            )
            for prompt in prompts
            for i in range(n)
        ]
        responses: list[dict[int, Trajectory]] = [{} for _ in prompts]
        for ended in self._run_episodes(episodes):
            whole = list[tuple[int, Group]]()
            for number, trajectory in ended:
                which, i = divmod(number, n)
                responses[which][i] = trajectory
                if len(responses[which]) == n:
                    whole.append((which, tuple(responses[which][i] for i in range(n))))
            if whole:
                yield whole

    @split_over_workers(cost=len, queued=True)
    def sample_parts(self, batches: list[list[Request]], version: int) -> Iterator[list[tuple[int, list[Generation]]]]:
        """Yield (index of a batch, what was sampled for each of its requests); a batch is computed by itself, and is a
        list of its own.

        Raises SyncError, before anything is generated, if the engine's weights do not have exactly this `version`.
        """
        self._raise_if_other_version(version)

        async def sampled(requests: list[Request]) -> list[Generation]:
            asked = (answered(self.engine, request, self.settings.vocabulary) for request in requests)
            return list(await asyncio.wait_for(asyncio.gather(*asked), self.settings.timeout_s))

        for number, requests in enumerate(batches):
            yield [(number, run_coroutine(sampled(requests)))]

    def _raise_if_other_version(self, version: int) -> None:
        if self.engine.version != version:
            raise SyncError(
                f"the rollout engine has weights of version {self.engine.version}, the policy is at {version}: "
                "a sync was lost; nothing was generated"
            )

    def limits(self, max_new_tokens: int, temperature: float) -> Limits:
        """Return the limits of an episode, and how its responses are sampled."""
        settings = self.settings
        sampling = Sampling(max_new_tokens, temperature, self.tokenizer.stop_ids, settings.rollout.top_p, settings.trie)
        return Limits(sampling, settings.engine.max_length, settings.vocabulary)

    def _run_episodes(self, episodes: list[Episode]) -> Iterator[list[tuple[int, Trajectory]]]:
        """Yield what `run_episodes` yields. Raises TimeoutError after `timeout_s` seconds."""
        until, running = time.monotonic() + self.settings.timeout_s, run_episodes(self.engine, episodes)

        async def next_ended() -> list[tuple[int, Trajectory]] | None:
            return await asyncio.wait_for(anext(running, None), max(0.0, until - time.monotonic()))

        with contextlib.closing(EventLoop()) as loop:
            left = len(episodes)
            try:
                while (ended := loop.run(next_ended())) is not None:
                    left -= len(ended)
                    yield ended
            except TimeoutError:
                environments = self.rollout_functions.environments
                processes = f" in {sum(len(one.processes) for one in environments)} processes" if environments else ""
                raise TimeoutError(
                    f"{left} of {len(episodes)} episodes{processes} did not end within {self.settings.timeout_s:g} s "
                    "(compute.timeout_s): a step has too many responses or they are too long"
                    f"{', or rollout.reward_processes is too low' if environments else ''}"
                ) from None
        # closing the loop cancels unfinished episodes, and closes `running`

    @summed_broadcast
    def take_retries(self) -> int:
        """Return the number of requests to environments that were retried since the last call, of all replicas."""
        return self.rollout_functions.take_retries()

    @replayed_broadcast
    def load(self, buckets: Buckets, manifest: Manifest) -> Receipt:
        """Replace the engine's weights. Raises SyncError if they do not match the manifest."""
        return self.engine.load_weights(buckets, manifest)

    @unreplayable_broadcast
    def receive(self, transfer: Transfer, manifest: Manifest) -> Receipt:
        """Replace the engine's weights by those that the policy sends at the same time (`Learner.send`)."""
        with transfer.reporting_failure():
            return self.engine.load_weights(transfer, manifest)

    @replayed_broadcast
    def canary(self, tokens: list[np.ndarray], expected: list[np.ndarray], limits: LogprobLimits) -> float:
        """Return the largest difference between the engine's and the trainer's log-probs (`expected`) of fixed
        prompts and of responses in flight.

        Raises SyncError if the differences exceed the limits.
        """
        differences = [np.abs(a - b) for a, b in zip(self.engine.prompt_logprobs(tokens), expected, strict=True)]
        difference = LogprobDifference.of(np.concatenate(differences), limits.threshold)
        difference.raise_if_beyond(
            limits,
            f"after weight sync {self.engine.version} the engine's and the trainer's log-probs of fixed prompts "
            "and responses in flight (the canary)",
        )
        return difference.largest

    @broadcast
    def expect_weights(self) -> None:
        """Let the engine know that new weights come before it generates again."""
        if expect := getattr(self.engine, "expect_weights", None):  # which not every engine has a use for
            expect()

    @broadcast
    @override
    def offload(self) -> None:
        self.engine.sleep()
        release_freed_memory()

    @broadcast
    @override
    def onload(self) -> None:
        self.engine.wake()


def seed_of(seed: int, key: str, prompt: int, sample: int, turn: int = 0) -> int:
    """Return the seed of one turn of a response; turn -1 is the seed of its environment."""
    turns = [turn + 2] if turn else []
    return int(np.random.SeedSequence([seed, *key.encode(), prompt, sample, *turns]).generate_state(1, np.uint32)[0])
