"""The head's logits: soft-capped, biased, cut to the vocabulary, gathered over a group."""

import pytest
import torch
import torch.distributed as dist

from ptf.model import loss_workspace
from ptf.model.head import Head, Scalar
from ptf.model.sampling import LogitsProcessing
from tests.bounds import ROUNDINGS, excess, traced
from tests.model.ranks import two_ranks

ROWS, VOCAB, DIM = 40, 31, 8


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=g) for shape in ((2, 5, DIM), (ROWS, DIM), (ROWS,)))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("biased", [False, True])
def test_logits_equal_the_definition_and_have_its_gradients(softcap, biased):
    x, weight, bias = (t.requires_grad_() for t in problem())
    ours = Head(weight, VOCAB, softcap, bias if biased else None).logits(x)
    upstream = torch.randn(2, 5, VOCAB, generator=torch.Generator().manual_seed(1))
    exact = [traced(t) for t in (x, weight, bias)]
    dense = exact[0] @ exact[1][:VOCAB].t() + (exact[2][:VOCAB] if biased else 0)
    dense = dense if softcap is None else softcap * torch.tanh(dense / softcap)
    assert ours.shape == (2, 5, VOCAB)
    assert excess([ours], [dense.detach()]) <= ROUNDINGS < excess([ours * (1 + 1e-4)], [dense.detach()])
    leaves = (x, weight, bias) if biased else (x, weight)
    mine = torch.autograd.grad((ours * upstream).sum(), leaves)
    theirs = torch.autograd.grad((dense * traced(upstream)).sum(), exact[: len(leaves)])
    assert excess(mine, theirs) <= ROUNDINGS < excess([g * (1 + 1e-4) for g in mine], theirs)
    assert not mine[1][VOCAB:].any()
    assert mine[1][:VOCAB].any(1).all()


def test_logits_of_bf16_are_fp32():
    x, weight, _ = problem()
    logits = Head(weight.bfloat16(), VOCAB).logits(x.bfloat16())
    assert logits.dtype == torch.float32
    assert torch.equal(logits, (x.bfloat16() @ weight.bfloat16()[:VOCAB].t()).float())


@pytest.mark.parametrize(("first", "rows", "real"), [(0, 40, 31), (0, 20, 20), (20, 20, 11), (32, 8, 0), (0, 31, 31)])
def test_the_rows_of_a_rank_that_are_not_padding(first, rows, real):
    assert Head(torch.zeros(rows, DIM), VOCAB, vocab_start=first).real == real


def gathered(cut: int) -> torch.Tensor:
    x, weight, bias = problem()
    mine = slice(0, cut) if dist.get_rank() == 0 else slice(cut, ROWS)
    logits = Head(weight[mine].requires_grad_(), VOCAB, 2.0, bias[mine], mine.start, dist.group.WORLD).logits(x)
    assert not logits.requires_grad
    return logits


def several_cuts() -> list[torch.Tensor]:
    return [gathered(cut) for cut in (20, 13, 35)]


def test_a_group_gathers_the_whole_vocabulary_on_every_rank(tmp_path):
    x, weight, bias = problem()
    whole = Head(weight, VOCAB, 2.0, bias).logits(x)
    for rank in two_ranks(several_cuts, tmp_path):
        for logits in rank:
            torch.testing.assert_close(logits, whole, rtol=1e-6, atol=1e-6)


def test_values_of_a_scalar_head_are_no_view() -> None:
    """FSDP warns of each output that is one, and a change in place would then lose its gradient."""
    x, weight = torch.randn(2, 5, 8, requires_grad=True), torch.randn(1, 8)
    values = Scalar(weight).values(x)
    assert values._base is None
    assert torch.allclose(values, x @ weight[0], atol=1e-6)


def test_a_sum_over_a_group_is_that_of_its_ranks_and_alone_the_value(monkeypatch):
    asked = []
    monkeypatch.setattr(dist, "all_reduce", lambda value, group: asked.append(group) or value.mul_(2))
    value = torch.ones(3)
    assert loss_workspace.summed(value, None) is value
    assert value.tolist() == [1, 1, 1]
    assert loss_workspace.summed(value, "a group") is value  # type: ignore[arg-type]
    assert value.tolist() == [2, 2, 2]
    assert asked == ["a group"]


def test_a_nucleus_needs_the_whole_vocabulary_and_nothing_else_does():
    head = Head(torch.zeros(ROWS, DIM), VOCAB, group=object())  # type: ignore[arg-type]
    x, chunks = torch.zeros(2, DIM), loss_workspace.Tiles(2, 2, 2)
    assert loss_workspace.LossWorkspace(x, head, chunks).head is head
    with pytest.raises(NotImplementedError, match=r"rollout\.top_p.*sharded over ranks"):
        loss_workspace.LossWorkspace(x, head, chunks, LogitsProcessing(top_p=0.5))
