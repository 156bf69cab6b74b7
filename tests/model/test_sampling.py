"""What was drawn from, again: nuclei against transformers', allowed tokens and both in losses against float64."""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TopPLogitsWarper

from ptf.model.chunked import surrogate, token_logprobs
from ptf.model.loss_workspace import LossWorkspace, Tiles
from ptf.model.sampling import NEVER, ROUNDING, Edges, LogitsProcessing, nucleus, restrict
from tests.bounds import ROUNDINGS, Traced, excess
from tests.model.ranks import two_ranks
from tests.model.test_chunked import Problem, gap

# state 0: any of six, 1: one alone, 2: three of them, the last token of all among them
ALLOWED = [[0, 3, 7, 11, 20, 30], [15], [2, 15, 30]]
EDGES = Edges.of(
    torch.tensor([0, *itertools.accumulate(map(len, ALLOWED))]), torch.tensor(list(itertools.chain(*ALLOWED)))
)


def drawn(problem: Problem, seed: int = 0) -> torch.Tensor:
    """Return trie states [B, T, 3]; every second one excludes two allowed tokens that are not the target. The
    problem's targets are replaced by tokens that these states allow."""
    states = torch.randint(0, 3, problem.targets.shape, generator=torch.Generator().manual_seed(seed))
    chosen = [
        ALLOWED[s][t % len(ALLOWED[s])]
        for s, t in zip(states.flatten().tolist(), problem.targets.flatten().tolist(), strict=True)
    ]
    problem.targets = torch.tensor(chosen).view_as(states)
    taken = [
        [t for t in ALLOWED[s] if t != target][-2:] if i % 2 else []
        for i, (s, target) in enumerate(zip(states.flatten().tolist(), chosen, strict=True))
    ]
    return torch.tensor(
        [[s, *t, *[-1] * (2 - len(t))] for s, t in zip(states.flatten().tolist(), taken, strict=True)]
    ).view(*states.shape, 3)


def dense(problem: Problem, how: LogitsProcessing, states: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs of the targets and the entropies, [B, T] float64, computed from all logits."""
    head = problem.head
    logits = problem.x.double() @ head.weight.double().t()[:, : head.vocab] + head.bias.double()[: head.vocab]
    logits = logits / how.temperature
    if states is not None:
        barred = torch.ones(3, head.vocab, dtype=torch.bool)
        for state, tokens in enumerate(ALLOWED):
            barred[state, tokens] = False
        out = barred[states[..., 0]] | (
            torch.nn.functional.one_hot(states[..., 1:] + 1, head.vocab + 1)[..., 1:].sum(-2) > 0
        )
        logits = logits.masked_fill(out, -torch.inf)
    if how.top_p < 1:
        found = logits.value if isinstance(logits, Traced) else logits
        flat = TopPLogitsWarper(how.top_p)(None, found.detach().flatten(0, 1)).view_as(found)
        logits = logits.masked_fill(flat == -torch.inf, -torch.inf)
    logp = logits.log_softmax(-1)
    picked = logp.gather(-1, problem.targets[..., None]).squeeze(-1)
    return picked, -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0)).sum(-1)


@given(
    st.integers(0, 10_000),
    st.integers(1, 5),
    st.integers(2, 40),
    st.floats(0.01, 0.999),
    st.sampled_from([0.3, 1.0, 4.0]),
)
@settings(deadline=None)
def test_a_nucleus_is_that_of_transformers(seed, n, vocab, top_p, spread):
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread
    ours = logits.log_softmax(-1).float()
    slack = nucleus(ours, top_p)
    theirs = TopPLogitsWarper(top_p)(None, logits.clone()).log_softmax(-1)
    for mine, other, loose in zip(ours, theirs, slack, strict=True):
        if loose == 0:
            assert torch.equal(mine > NEVER / 2, other > -torch.inf)
            torch.testing.assert_close(mine[mine > NEVER / 2].double(), other[other > -torch.inf], rtol=1e-5, atol=1e-5)


def test_where_rounding_may_end_a_nucleus_elsewhere_the_slack_says_what_that_is_worth():
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    found = []
    for top_p in (0.8 - ROUNDING[torch.float32] / 2, 0.8 + ROUNDING[torch.float32] / 2):
        logprobs = probabilities.log()
        slack = nucleus(logprobs, top_p)
        found.append(logprobs[0, 0].item())
        assert slack.item() == pytest.approx(np.log(0.95 / 0.8), rel=1e-5)
    assert abs(found[0] - found[1]) == pytest.approx(slack.item(), rel=1e-5)  # one token more
    assert nucleus(probabilities.log(), 0.7).item() == 0  # the control: well inside


def test_what_was_drawn_is_in_its_nucleus_wherever_that_ends():
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 4)
    logprobs = probabilities.log()
    slack = nucleus(logprobs, torch.tensor([0.79, 0.79, 0.79, 0.92]), torch.tensor([1, 2, 3, 3]), rounding=0.02)
    torch.testing.assert_close(logprobs.exp()[0], torch.tensor([0.5, 0.3, 0, 0]) / 0.8)
    torch.testing.assert_close(logprobs.exp()[1], torch.tensor([0.5, 0.3, 0.15, 0]) / 0.95)
    assert logprobs[2, 3] == NEVER, "no rounding brings what is so far outside into a nucleus: the run stops"
    torch.testing.assert_close(logprobs.exp()[3], probabilities[3])
    torch.testing.assert_close(slack[:2], torch.tensor([0.95, 0.95]).log() - torch.tensor([0.8, 0.8]).log())


def test_each_row_has_a_nucleus_of_its_own():
    logprobs = torch.randn(3, 20, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    together, whole = logprobs.clone(), logprobs[1].clone()
    nucleus(together, torch.tensor([0.3, 1.0, 0.8]))
    for row, top_p in ((0, 0.3), (2, 0.8)):
        alone = logprobs[row : row + 1].clone()
        nucleus(alone, top_p)
        assert torch.equal(alone[0], together[row])
    assert torch.equal(together[1], whole)


def test_only_what_is_allowed_keeps_its_logit():
    logits = torch.randn(7, 31)
    states = torch.tensor([0, 1, 2, 2, 1, 0, 0])
    found = restrict(logits.clone(), states[:, None], EDGES)
    for row, was, state in zip(found, logits, states.tolist(), strict=True):
        assert row.nonzero().numel()
        assert (row > NEVER).nonzero().squeeze(1).tolist() == ALLOWED[state]
        assert torch.equal(row[ALLOWED[state]], was[ALLOWED[state]])


def test_what_is_taken_out_is_not_drawn():
    logits = torch.randn(3, 31)
    found = restrict(logits.clone(), torch.tensor([[0, 7, 30], [2, -1, -1], [2, 2, 15]]), EDGES)
    assert [(row > NEVER).nonzero().squeeze(1).tolist() for row in found] == [[0, 3, 11, 20], ALLOWED[2], [30]]
    # of a vocabulary over ranks
    half = restrict(logits[:, 10:20].clone(), torch.tensor([[0, 7, 11], [1, 3, 25], [2, -1, 15]]), EDGES, 10)
    assert [(row > NEVER).nonzero().squeeze(1).tolist() for row in half] == [[], [5], []]


HOWS = {
    "allowed": LogitsProcessing(edges=EDGES),
    "allowed, cold": LogitsProcessing(0.7, edges=EDGES),
    "nucleus": LogitsProcessing(0.8, 0.9),
    "both": LogitsProcessing(1.3, 0.8, EDGES),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", HOWS)
def test_losses_and_gradients_are_those_of_the_distribution_sampled_from(name, dtype):
    how, problem = HOWS[name], Problem(3, dtype=dtype)
    states = drawn(problem) if how.edges else None
    exact = problem.traced()
    leaves, kept = problem.leaves(), problem.weights != 0
    picked, entropy = dense(exact, how, states)
    kept &= picked.detach() > -torch.inf  # this problem's targets are not all in their nuclei
    problem.weights = problem.weights * kept
    said = token_logprobs(problem.x, problem.head, problem.targets, problem.weights, how, states)
    assert (
        excess([said.logprobs[kept], said.entropy[kept]], [picked[kept].detach(), entropy[kept].detach()]) <= ROUNDINGS
    )
    coefficients = problem.upstream * kept
    expected = torch.autograd.grad((picked[kept] * problem.upstream[kept]).sum(), exact.leaves(), retain_graph=True)
    mine = torch.autograd.grad((said.logprobs * coefficients).sum(), leaves, retain_graph=True)
    assert excess(mine, expected) <= ROUNDINGS
    assert excess([g * (1 + 1e-4) for g in mine], expected) > ROUNDINGS
    loss, _ = surrogate(problem.x, problem.head, problem.targets, problem.weights, coefficients, how, states)
    assert excess(torch.autograd.grad(-loss, leaves), expected) <= ROUNDINGS
    expected = torch.autograd.grad((entropy[kept] * problem.upstream[kept]).sum(), exact.leaves())
    mine = torch.autograd.grad((said.entropy * coefficients).sum(), leaves)
    assert excess(mine, expected) <= ROUNDINGS
    assert excess([g * (1 + 1e-4) for g in mine], expected) > ROUNDINGS
    # the control: without what was done to the logits, they are others
    plain = token_logprobs(problem.x, problem.head, problem.targets, problem.weights, LogitsProcessing(how.temperature))
    assert (plain.logprobs - said.logprobs).abs().max() > 1e-2


def allowed_problem() -> tuple[Problem, torch.Tensor]:
    problem = Problem(5, dtype=torch.float32)
    return problem, drawn(problem)


def cut() -> tuple[float, list[torch.Tensor]]:
    """Compute the loss on one of two ranks, each of which holds half of the head."""
    problem, states = allowed_problem()
    rank = torch.distributed.get_rank()
    problem.rows(slice(0, 20) if rank == 0 else slice(20, 40))
    return allowed_loss(problem, states)


def allowed_loss(problem: Problem, states: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    leaves = problem.leaves()
    loss = (
        token_logprobs(problem.x, problem.head, problem.targets, problem.weights, HOWS["allowed"], states).logprobs
        * problem.upstream
    ).sum()
    return loss.item(), list(torch.autograd.grad(loss, leaves))


def test_allowed_tokens_of_a_vocabulary_over_two_ranks(tmp_path):
    (value_0, (dx_0, *head_0)), (value_1, (_, *head_1)) = two_ranks(cut, tmp_path)
    value, (dx, *head) = allowed_loss(*allowed_problem())
    assert value_0 == value_1 == pytest.approx(value, rel=1e-6)
    assert gap([dx_0, *map(torch.cat, zip(head_0, head_1, strict=True))], [dx, *head]) <= 1e-5


def test_what_cannot_be_is_refused():
    problem = Problem(dtype=torch.float32)
    ask = partial(token_logprobs, problem.x, problem.head, problem.targets, problem.weights)
    with pytest.raises(ValueError, match="states"):
        ask(HOWS["allowed"])
    with pytest.raises(NotImplementedError, match=r"rollout\.top_p"):
        LossWorkspace(problem.x.flatten(0, 1), replace(problem.head, group=object()), Tiles(0, 1, 1), HOWS["nucleus"])
