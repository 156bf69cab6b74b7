"""The rollout function of an environment: policy and environment take turns until one is done or no room is left."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ptf.data.chat import clean
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Generation, NoResult, Prompt, Reward, Trajectory
from ptf.errors import UserError
from ptf.rl.environments.protocol import EnvironmentFault, Environments, EpisodeState, Message
from ptf.rl.policy.policy import NoRoom, Policy


@dataclass(frozen=True)
class EnvironmentRollout:
    """Plays episodes with environments, of at most `max_turns` responses each.

    The outcome is the sum of the turns' rewards. An episode that ends at a limit keeps the rewards of its turns so far;
    one whose environment fails has no result.
    """

    environments: Environments
    max_turns: int
    weight: float = 1.0  # factor on the rewards

    async def __call__(self, prompt: Prompt, policy: Policy) -> Trajectory:
        """Play one episode."""
        state, rewards = None, list[float]()
        try:
            state, messages, tools = await self.environments.reset(prompt.row, policy.seed)
            outcome, complete = await self._take_turns(state, messages, tools, policy, rewards)
        except EnvironmentFault as error:
            outcome, complete = NoResult(str(error)), False
        finally:
            if state is not None:
                await self.environments.end(state)
        text = transcript([call.generation for call in policy.calls], policy.tokenizer)
        return policy.trajectory(outcome, turn_rewards=rewards, text=text, complete=complete)

    async def _take_turns(
        self, state: EpisodeState, messages: Sequence[Message], tools: object, policy: Policy, rewards: list[float]
    ) -> tuple[Reward | NoResult, bool]:
        """Return the outcome, and whether the environment ended the episode; append each turn's reward to `rewards`.

        Raises EnvironmentFault.
        """
        reward, what = 0.0, "the environment's first messages"
        for turn in range(self.max_turns):
            try:
                messages = clean(list(messages))
                if turn and messages[-1]["role"] == "assistant":
                    raise UserError("the environment is not done, but returned no message for the policy to answer")
                context = policy.context(messages, tools)  # pyright: ignore[reportArgumentType]
            except UserError as error:
                if turn and isinstance(error, NoRoom):
                    return Reward(reward), False
                return NoResult(f"{what}: {error}"), False
            call = await policy.generate(context)
            result = await self.environments.step(state, call.text)
            rewards.append(self.weight * float(result.reward))
            reward += rewards[-1]
            if result.done:
                return Reward(reward), True
            own = result.policy_message or {"role": "assistant", "content": call.text}
            messages, what = [*messages, own, *result.environment_messages], "the environment's reply"
        return Reward(reward), False


def transcript(generations: Sequence[Generation], tokenizer: Tokenizer) -> str:
    """Return all text after the first context, of both sides.

    If the template rewrites a response later, the rewritten form is included too.
    """
    ids = list[int]()
    for generation, later in itertools.pairwise([*generations, None]):  # there may be none
        assert generation is not None
        after = later.context if later else np.zeros(0, np.int32)
        here = np.concatenate([generation.context, generation.sampled_ids])[: len(after)]
        different = np.flatnonzero(here != after[: len(here)])
        start = min(int(different[0]), len(generation.context)) if len(different) else len(here)
        ids += [*generation.sampled_ids, *after[start:]]
    return tokenizer.decode(ids)
