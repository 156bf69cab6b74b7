"""Credit of turns beside its exact expectation: all groups of episodes of a small tree are enumerated."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ptf.data.trajectory import Generation, NoResult, Prompt, Reward, Trajectory, samples_of, token_column
from ptf.recipes.grpo.recipe import GRPO, leave_one_out
from ptf.recipes.turns import leave_one_out_by_turn, rewards_of_turns, rewards_to_go
from tests.recipes.of_keys import of_keys

STOP, ACTIONS, TURNS, GROUP = 0, 3, 3, 3
TURN_CREDIT = {"credit_level": "turn", "baseline": "leave_one_out", "scale_by_std": False}


def ends(path: tuple[int, ...]) -> bool:
    """Return whether an episode ends with these actions."""
    return path[-1] == STOP or len(path) == TURNS or (len(path) == 2 and path[-1] == 2)


def histories() -> list[tuple[int, ...]]:
    """Return the states of the tree: the actions so far."""
    tuples = (h for t in range(TURNS) for h in itertools.product(range(ACTIONS), repeat=t))
    return [h for h in tuples if not any(ends(h[: t + 1]) for t in range(len(h)))]


def paths() -> list[tuple[int, ...]]:
    """Return the actions of each episode."""
    return [(*h, a) for h in histories() for a in range(ACTIONS) if ends((*h, a))]


RNG = np.random.default_rng(5)
STATES, PATHS = histories(), paths()
LOGITS = torch.tensor(RNG.normal(size=(len(STATES), ACTIONS)), dtype=torch.float64)
# whole numbers, so that float32 holds the advantages exactly; an episode that goes on mostly gets more
REWARDS = {(*h, a): float(RNG.integers(-2, 5) + 2 * (a != STOP)) for h in STATES for a in range(ACTIONS)}


@dataclass(frozen=True)
class Episode:
    """One path through the tree, as the recipe gets it."""

    path: tuple[int, ...]

    @property
    def rewards(self) -> np.ndarray:
        return np.array([REWARDS[self.path[: t + 1]] for t in range(len(self.path))])

    @property
    def probability(self) -> float:
        return float(np.prod([PROBABILITIES[s, a] for s, a in self.steps]))

    @property
    def steps(self) -> list[tuple[int, int]]:
        return [(STATES.index(self.path[:t]), a) for t, a in enumerate(self.path)]

    def trajectory(self) -> Trajectory:
        """Each turn is one token; the third turn has a context of its own, so that the episode is split."""
        generations = []
        for t, action in enumerate(self.path):
            context = np.array([7, *itertools.chain(*((a, 8) for a in self.path[:t]))] if t < 2 else [6], np.int32)
            zero = np.zeros(1)
            generations.append(
                Generation(context, np.array([action], np.int32), np.float32(zero), np.int32(zero), True)
            )
        prompt = Prompt(np.array([7], np.int32), {}, "a", 0)
        rewards = self.rewards
        return Trajectory(prompt, tuple(generations), "", Reward(float(rewards.sum())), turn_rewards=rewards)


PROBABILITIES = LOGITS.softmax(-1).numpy()
EPISODES = [Episode(path) for path in PATHS]
MADE = [episode.trajectory() for episode in EPISODES]


def score(state: int, action: int) -> np.ndarray:
    """Return ∇ log π(action | state) with respect to all logits."""
    gradient = np.zeros(LOGITS.shape)
    gradient[state] = -PROBABILITIES[state]
    gradient[state, action] += 1
    return gradient


def policy_gradient(discount: float) -> np.ndarray:
    """Return Σ_t E[R_t ∇log π(a_t)], without a baseline."""
    return sum(
        e.probability * R * score(*step)
        for e in EPISODES
        for R, step in zip(rewards_to_go(e.rewards, discount), e.steps, strict=True)
    )


def expected(advantages_of) -> np.ndarray:
    """Return the expectation of the mean over a group of Σ_t A_t ∇log π(a_t), over all groups.

    `advantages_of` maps the numbers of a group's episodes to the advantages of their turns.
    """
    mean = [np.zeros(len(e.path)) for e in EPISODES]
    for numbers, probability in GROUPS:
        for i, advantages in zip(numbers, advantages_of(numbers), strict=True):
            mean[i] += probability * advantages / GROUP
    return sum(A * score(*s) for e, of in zip(EPISODES, mean, strict=True) for A, s in zip(of, e.steps, strict=True))


P = [e.probability for e in EPISODES]
# each group once, whatever the order of its episodes, with the probability of all orders
GROUPS = [
    (numbers, len({*itertools.permutations(numbers)}) * float(np.prod([P[i] for i in numbers])))
    for numbers in itertools.combinations_with_replacement(range(len(EPISODES)), GROUP)
]


def recipes(recipe: GRPO):
    """Return the advantages that a recipe's samples have, by turn."""
    counts = [len(samples_of(t)) for t in MADE]

    def advantages_of(numbers):
        units = iter(recipe.compute_advantages([tuple(MADE[i] for i in numbers)]))
        for i in numbers:
            values = [sample.token_columns["advantages"] for (sample,) in itertools.islice(units, counts[i])]
            yield token_column(MADE[i], values)

    return advantages_of


def reaching(returns, t):
    return [r[t] for r in returns if len(r) > t]


def mean_with_itself(numbers):
    """The natural baseline of a turn: the mean over the episodes that reach it."""
    returns = [rewards_to_go(EPISODES[i].rewards, 1.0) for i in numbers]
    return [np.array([R - np.mean(reaching(returns, t)) for t, R in enumerate(own)]) for own in returns]


def normalised(numbers):
    """The same, divided by the standard deviation at the turn."""
    returns = [rewards_to_go(EPISODES[i].rewards, 1.0) for i in numbers]
    return [
        np.array(
            [(R - np.mean(reaching(returns, t))) / (np.std(reaching(returns, t)) + 1e-6) for t, R in enumerate(own)]
        )
        for own in returns
    ]


def sums_of_centred_rewards(numbers):
    """The sum of what follows, each reward less the mean of the *others* at its turn: a baseline with as many terms as
    the episode has turns."""
    rewards = [EPISODES[i].rewards for i in numbers]
    out = []
    for i, own in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i]
        out.append(rewards_to_go(np.array([r - np.mean(reaching(others, t) or [0.0]) for t, r in enumerate(own)]), 1.0))
    return out


def off(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference of any multiple of what was found; a factor is no bias but a learning rate."""
    factor = float((found * wanted).sum() / (found * found).sum())
    return float(np.abs(factor * found - wanted).max())


def test_turn_credit_is_the_policy_gradient_and_natural_baselines_are_not():
    logits = LOGITS.clone().requires_grad_()
    log_pi = logits.log_softmax(-1)
    value = sum(torch.stack([log_pi[s, a] for s, a in e.steps]).sum().exp() * float(e.rewards.sum()) for e in EPISODES)
    (wanted,) = torch.autograd.grad(value, logits)
    assert sum(probability for _, probability in GROUPS) == pytest.approx(1.0)
    assert max(len(samples_of(t)) for t in MADE) == 2
    assert np.abs(policy_gradient(1.0) - wanted.numpy()).max() <= 1e-9

    found = expected(recipes(of_keys(GRPO, **TURN_CREDIT)))
    assert np.abs(found - wanted.numpy()).max() <= 1e-6
    for biased in (mean_with_itself, normalised, sums_of_centred_rewards):
        assert off(expected(biased), wanted.numpy()) >= 1e-2, biased.__name__
    # the reward of the whole episode is unbiased too: with its own reward in the mean, up to a factor
    for recipe, factor in (
        (of_keys(GRPO, baseline="leave_one_out", scale_by_std=False), 1),
        (of_keys(GRPO, scale_by_std=False), 2 / 3),
    ):
        assert np.abs(expected(recipes(recipe)) - factor * wanted.numpy()).max() <= 1e-6
    assert off(expected(recipes(of_keys(GRPO))), wanted.numpy()) >= 1e-2  # the group's standard deviation


@pytest.mark.parametrize("discount", [0.0, 0.5])
def test_discounted_returns_have_the_expectation_that_they_have_without_a_baseline(discount):
    found = expected(recipes(of_keys(GRPO, **TURN_CREDIT, turn_discount=discount)))
    assert np.abs(found - policy_gradient(discount)).max() <= 1e-6
    assert np.abs(found - policy_gradient(1.0)).max() >= 1e-2


def left_out(numbers):
    """Leave one out, without the episodes that ended before the turn."""
    returns = [rewards_to_go(EPISODES[i].rewards, 1.0) for i in numbers]
    for i, own in enumerate(returns):
        others = [r for j, r in enumerate(returns) if j != i]
        yield np.array([R - np.mean(reaching(others, t) or [0.0]) for t, R in enumerate(own)])


def counted_as_nothing(numbers):
    """Leave one out, with a return of 0 for the episodes that ended before the turn."""
    returns = [rewards_to_go(EPISODES[i].rewards, 1.0) for i in numbers]
    for i, own in enumerate(returns):
        others = [r for j, r in enumerate(returns) if j != i]
        yield np.array([R - sum(reaching(others, t)) / len(others) for t, R in enumerate(own)])


def test_turn_credit_is_smaller_than_the_outcome_and_than_with_other_unbiased_baselines():
    """Their expectations are the same, so smaller squares are less noise. A reward before a turn is noise to it."""

    def squares(advantages_of) -> float:
        return sum(p * sum(float((a**2).sum()) for a in advantages_of(numbers)) for numbers, p in GROUPS)

    found = squares(recipes(of_keys(GRPO, **TURN_CREDIT)))
    for of in (recipes(of_keys(GRPO, baseline="leave_one_out", scale_by_std=False)), left_out, counted_as_nothing):
        assert np.abs(expected(of) - policy_gradient(1.0)).max() <= 1e-6
        assert found < 0.95 * squares(of)


episodes = st.lists(st.lists(st.floats(-4, 4), min_size=1, max_size=4).map(np.array), min_size=2, max_size=5)


@given(episodes)
def test_a_baseline_does_not_depend_on_its_own_episode(returns):
    changed = [returns[0] * 2 + 1, *returns[1:]]
    before, after = leave_one_out_by_turn(returns)[0], leave_one_out_by_turn(changed)[0]
    assert returns[0] - before == pytest.approx(changed[0] - after)
    longer = [np.append(returns[0], 3.0), *returns[1:]]
    assert leave_one_out_by_turn(longer)[0][:-1] == pytest.approx(before)


@given(st.lists(st.tuples(st.floats(-4, 4), st.integers(1, 4)), min_size=2, max_size=6))
def test_a_reward_at_the_end_is_credited_as_the_outcome(ends):
    returns = [rewards_to_go(np.append(np.zeros(turns - 1), r), 1.0) for r, turns in ends]
    wanted = leave_one_out(np.array([r for r, _ in ends]))
    for advantages, a, (_, turns) in zip(leave_one_out_by_turn(returns), wanted, ends, strict=True):
        assert advantages == pytest.approx(np.full(turns, a), abs=1e-9)


def test_returns_by_hand():
    assert rewards_to_go(np.array([1.0, 0.0, 4.0]), 1.0).tolist() == [5, 4, 4]
    assert rewards_to_go(np.array([1.0, 0.0, 4.0]), 0.5).tolist() == [2, 2, 4]
    assert rewards_to_go(np.array([1.0, 0.0, 4.0]), 0.0).tolist() == [1, 0, 4]
    a, b, c = leave_one_out_by_turn([np.array([5.0, 4.0]), np.array([1.0]), np.array([3.0, 2.0, 7.0])])
    assert a.tolist() == [5 - 2, 4 - (1 + 2) / 2]  # the second episode counts with its only turn
    assert b.tolist() == [1 - 4]
    assert c.tolist() == [3 - 3, 2 - (4 + 1) / 2, 7 - (4 + 1) / 2]


def test_what_the_outcome_has_beyond_its_turns_is_in_the_last_turn():
    t = MADE[PATHS.index((1, 1, STOP))]
    assert rewards_of_turns(t).tolist() == t.turn_rewards.tolist()
    more = Trajectory(t.prompt, t.generations, "", Reward(t.outcome.value + 0.5), turn_rewards=t.turn_rewards)
    assert (rewards_of_turns(more) - t.turn_rewards).tolist() == [0, 0, 0.5]
    assert rewards_of_turns(Trajectory(t.prompt, t.generations, "", Reward(2.0))).tolist() == [0, 0, 2]
    assert rewards_of_turns(Trajectory(t.prompt, (), "", Reward(2.0))).tolist() == []


def test_a_kl_in_the_reward_is_at_its_turn_and_failed_episodes_enter_no_baseline():
    columns = {"old_logprobs": np.array([-1.0, -2.0, -3.0], np.float32), "reference_logprobs": -np.ones(3, np.float32)}
    t = MADE[PATHS.index((1, 1, STOP))]
    t = Trajectory(t.prompt, t.generations, "", t.outcome, columns, turn_rewards=t.turn_rewards)
    recipe = of_keys(GRPO, **TURN_CREDIT, kl_coef=0.5, kl_in="reward", kl_estimator="k1")
    assert recipe.turn_rewards(t) - t.turn_rewards == pytest.approx([0, 0.5, 1.0])
    assert recipe.turn_rewards(t).sum() == pytest.approx(recipe.reward(t))
    failed = Trajectory(t.prompt, t.generations[:1], "", NoResult("crashed"))
    plain, group = of_keys(GRPO, **TURN_CREDIT), (MADE[0], MADE[-1])
    found = [
        [u[0].token_columns["advantages"].tolist() for u in plain.compute_advantages([g])]
        for g in (group, (*group, failed))
    ]
    assert found[0] == found[1]
