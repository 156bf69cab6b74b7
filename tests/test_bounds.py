"""The bounds that tests of numbers rest on: of sums that cancel, of what is exact,
of operators that they do not know."""

import pytest
import torch
from torch import Tensor

from tests.bounds import ROUNDINGS, Traced, excess, traced


def test_the_terms_of_a_sum_that_cancels_are_its_addends() -> None:
    addends = torch.tensor([30000.1, 0.3, -30000.2, 7e-4, -0.2])
    exact = traced(addends).sum().detach()
    assert isinstance(exact, Traced)
    assert float(exact.terms) == pytest.approx(60000 * 5**0.5, rel=1e-4)
    total = torch.zeros(())
    for addend in addends:
        total = total + addend
    assert abs(float(total) / float(exact.value) - 1) > 1e-4, "a share of the sum would be no bound"
    assert excess([total], [exact]) <= ROUNDINGS
    assert excess([total + 1e-4 * addends.abs().sum()], [exact]) > 100 * ROUNDINGS


def test_backward_goes_through_the_same_rules() -> None:
    """A likelihood that is all but certain: p − 1 has terms of the size of 1,
    every other p has terms as small as it is."""

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(-(x * 3).log_softmax(0)[0], x)[0]  # 3 (p − 1) of the first, 3 p of the others

    logits = torch.tensor([6.0, 0.0, 0.5])
    exact, found = gradient(traced(logits)), gradient(logits.requires_grad_())
    assert isinstance(exact, Traced)
    assert exact.terms[0] > 3, "though the difference of p and 1 is 1e-8"
    assert excess([found], [exact]) <= ROUNDINGS < excess([found + torch.tensor([1e-4, 0, 0])], [exact])
    assert excess([found * torch.tensor([1, 1, 1 + 1e-4])], [exact]) > ROUNDINGS


def test_what_is_exact_must_be_equal() -> None:
    nothing = Traced(torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    assert excess([torch.zeros(3)], [nothing]) == 0
    assert excess([torch.full((3,), 1e-12)], [nothing]) == float("inf")
    with pytest.raises(AssertionError, match="no terms"):
        excess([torch.zeros(3)], [torch.zeros(3)])


def test_an_operator_without_a_rule_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"aten\.erfinv.* has no rule"):
        torch.erfinv(traced(torch.zeros(3)))
