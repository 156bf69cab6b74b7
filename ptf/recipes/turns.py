"""Credit for episodes of several turns: the rewards of turns, returns, and a baseline for each turn.

    R_t = Σ_{u≥t} γ^(u−t) r_u            what turn t is followed by, itself included
    A_t = R_t − b_t,                     b_t: the mean over the *other* episodes of the group of their R_t, or of their
                                         R at the last turn where they ended before turn t

b_t is a function of the other episodes alone, so it is independent of what this episode does at turn t, and
E[b_t ∇log π(a_t)] = 0: the policy gradient is unbiased, as in RLOO (tests/recipes/test_turns.py enumerates it). If only
the last turn has a reward and γ is 1, A_t is RLOO's. Two baselines that look alike are not:

* the mean over all episodes that reach turn t, this one included: it multiplies the gradient of the turn by 1 − 1/n,
  where n, the number of episodes that reach the turn, differs from turn to turn (over responses of one turn, n is the
  group's size, and the factor is a constant);
* Σ_{u≥t} of the mean rewards of the turns u that this episode reaches: how many terms it has depends on what this
  episode did, which rewards or punishes taking one more turn.
"""

from collections.abc import Sequence

import numpy as np

from ptf.data.trajectory import Reward, Trajectory


def rewards_of_turns(trajectory: Trajectory) -> np.ndarray:
    """Return the reward of each turn of an episode with a result, [turns], which add up to its outcome.

    The last turn has what the outcome has beyond `turn_rewards`: all of it where they are not known.
    """
    assert isinstance(trajectory.outcome, Reward)
    rewards = np.zeros(len(trajectory.generations))
    if trajectory.turn_rewards is not None:
        rewards += trajectory.turn_rewards
    if len(rewards):
        rewards[-1] += trajectory.outcome.value - rewards.sum()
    return rewards


def rewards_to_go(rewards: np.ndarray, discount: float) -> np.ndarray:
    """Return R_t of each turn, [turns], from the rewards of the turns."""
    returns = np.zeros(len(rewards))
    following = 0.0
    for t in reversed(range(len(rewards))):
        following = returns[t] = rewards[t] + discount * following
    return returns


def leave_one_out_by_turn(returns: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Subtract from each episode's returns, [turns] each, the mean over the other episodes at the same turn.

    There are at least two episodes. One that ended before a turn counts with the return of its last turn. To leave it
    out, or to count it as 0, is unbiased too, with larger advantages on the tree of tests/recipes/test_turns.py.
    """
    turns = max(map(len, returns))
    lasts = [own[-1] if len(own) else 0.0 for own in returns]
    padded = np.stack(
        [np.append(own, np.full(turns - len(own), last)) for own, last in zip(returns, lasts, strict=True)]
    )
    # [episodes, turns]: the mean of differences to the others, which is exactly 0 where all are equal
    advantages = (padded[:, None] - padded).sum(1) / (len(returns) - 1)
    return [of_episode[: len(own)] for of_episode, own in zip(advantages, returns, strict=True)]


def turn_ends(trajectory: Trajectory) -> np.ndarray:
    """Return the index of each turn's last token among the sampled tokens of the episode: [turns]."""
    return np.cumsum(trajectory.turn_lengths) - 1
