"""The head and its losses on a GPU in bf16: GEMMs with fp32 results, large chunks, few kernels and little memory."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ptf.model.chunked import cross_entropy, surrogate, tiles_of, token_logprobs
from ptf.model.divergence import divergence
from ptf.model.head import Head
from ptf.model.kernels.choice import Kernels
from ptf.model.sampling import Edges, LogitsProcessing, nucleus, restrict
from tests.gpu_rehearsal.host_syncs import HostSyncs
from tests.gpu_rehearsal.step import loss_kernel

VOCABULARY, TOKENS, WIDTH = 151_936, 4096, 64
MIB = 1 << 20


class Seen(TorchDispatchMode):
    """The operators called, and the tensors with a column for each token of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.wide: dict[int, Tensor] = {}  # by storage; a tensor is kept, so that no address is used again

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if not function.name().startswith("prim::"):
            self.operators[function.name()] += 1
        for t in (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)):
            if t.dim() == 2 and t.shape[1] == VOCABULARY and len(t) > 1:
                self.wide.setdefault(t.untyped_storage()._cdata, t)
        return out

    @property
    def bytes(self) -> int:
        """Bytes of all such tensors that were ever made."""
        return sum(t.untyped_storage().nbytes() for t in self.wide.values() if t.shape != (VOCABULARY, WIDTH))


def loss_of(name: str, x: Tensor, head: Head, softcap: float | None, top_p: float) -> Tensor:
    targets, weights = (
        torch.zeros(x.shape[:2], device="cuda", dtype=torch.int64),
        torch.ones(x.shape[:2], device="cuda"),
    )
    how = LogitsProcessing(0.7, top_p)
    if name == "cross_entropy":
        return cross_entropy(x, head, targets, weights)
    if name == "surrogate":
        return surrogate(x, head, targets, weights, weights, how)[0]
    if name == "token_logprobs":
        return token_logprobs(x, head, targets, weights, how).logprobs.sum()
    teacher = Head(head.weight.detach().clone(), VOCABULARY, softcap)
    return divergence(x, head, x.detach().clone(), teacher, weights)


def run(name: str, softcap: float | None = None, top_p: float = 1.0, gradients: bool = True) -> dict[str, Any]:
    """What a loss does on the pretend GPU."""
    with FakeTensorMode():
        x = torch.empty(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(VOCABULARY, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        head = Head(weight, VOCABULARY, softcap, kernels=Kernels(loss_of_rows=loss_kernel))
        with HostSyncs() as found, Seen() as seen, torch.set_grad_enabled(gradients):
            loss = loss_of(name, x, head, softcap, top_p)
            if gradients:
                loss.backward()
        return {
            "operators": dict(seen.operators),
            "bytes": seen.bytes,
            "chunks": len(list(tiles_of(TOKENS, head))),  # each is one block
            "syncs": dict(found.counts),
        }


def bytes_of(device: str) -> int:
    """Return the bytes of the fp32 logits of a chunk."""
    with FakeTensorMode():
        head = Head(torch.zeros(WIDTH, 1, device=device), WIDTH)
    return 4 * WIDTH * tiles_of(1 << 30, head).size


def test_a_chunk_is_as_large_as_its_device_needs(pretend_cuda):
    assert [bytes_of("cpu"), bytes_of("cuda")] == [64 * MIB, 1024 * MIB]


@pytest.mark.parametrize("name", ["cross_entropy", "surrogate", "token_logprobs"])
def test_the_gemms_put_out_fp32_and_there_are_three_a_chunk(pretend_cuda, name):
    found = pretend_cuda(run, name)
    operators, chunks = found["operators"], found["chunks"]
    assert chunks == 3
    again = 2 if name == "token_logprobs" else 1  # whose backward pass computes its logits anew
    assert operators["aten::mm.dtype_out"] == again * chunks, "logits"
    assert operators["aten::addmm.dtype_out"] == chunks, "the head's gradient, at once"
    assert operators["aten::mm.out"] == chunks, "the gradient of the hidden states"
    assert not {"aten::mm", "aten::addmm_"} & set(operators), "no GEMM whose result is rounded, or added later"
    assert found["syncs"] == {"nonzero": 1}


@pytest.mark.parametrize(
    ("name", "softcap", "buffers"),
    [
        ("cross_entropy", None, 1.5),
        ("cross_entropy", 30.0, 2.5),
        ("surrogate", None, 1.5 + 1 / 8),
        ("token_logprobs", None, 1 + 1 / 8 + 1.5),  # of the forward pass and, when they are gone, of the backward pass
        ("divergence", None, 4.5 / 5),
    ],
)
def test_a_loss_takes_the_memory_that_the_plan_counts(pretend_cuda, name, softcap, buffers):
    found = pretend_cuda(run, name, softcap)["bytes"] / (1024 * MIB)
    assert buffers <= found <= buffers + 0.05, "columns of targets included"


def test_without_gradients_there_is_no_buffer_for_them(pretend_cuda):
    found = pretend_cuda(run, "cross_entropy", None, 1.0, False)
    assert 1 <= found["bytes"] / (1024 * MIB) <= 1.02


def test_a_nucleus_is_found_in_small_blocks(pretend_cuda):
    assert pretend_cuda(run, "token_logprobs", None, 0.9, False)["operators"]["aten::sort"] > 30


def test_a_chunk_takes_few_kernels(pretend_cuda):
    found = pretend_cuda(run, "cross_entropy")
    views = {"aten::t", "aten::slice.Tensor", "aten::unsqueeze", "aten::squeeze.dim", "aten::detach"}
    kernels = sum(n for name, n in found["operators"].items() if name not in views and "empty" not in name)
    assert kernels <= 8 * found["chunks"] + 30


def sampled() -> tuple[str, dict[str, int], list[str]]:
    with FakeTensorMode():
        x = torch.empty(2, 3, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(32, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with Seen() as seen:
            logits = Head(weight, 31).logits(x)
            gradients = torch.autograd.grad(logits.sum(), (x, weight))
        assert logits.shape == (2, 3, 31)
        assert [g.shape for g in gradients] == [x.shape, weight.shape]
        return str(logits.dtype), dict(seen.operators), [str(g.dtype) for g in gradients]


def test_logits_that_are_sampled_from_are_not_rounded(pretend_cuda):
    dtype, operators, gradients = pretend_cuda(sampled)
    assert dtype == "torch.float32"
    assert operators["aten::mm.dtype"] == 1
    assert operators["aten::mm"] == 2, "of the gradients"
    assert gradients == ["torch.bfloat16"] * 2


def restricted() -> dict[str, int]:
    """Host syncs of logits that are restricted to a trie and to a nucleus."""
    host = Edges.of(torch.tensor([0, 2, 3]), torch.tensor([1, 4, 2]))
    with FakeTensorMode(allow_non_fake_inputs=True), HostSyncs() as syncs:
        logits = torch.empty(6, 8, device="cuda")
        edges = Edges(
            *(torch.empty(t.shape, device="cuda", dtype=t.dtype) for t in (host.starts, host.tokens)), host.most
        )
        restrict(logits, torch.zeros(6, 3, device="cuda", dtype=torch.int64), edges)
        nucleus(logits, 0.9, torch.zeros(6, device="cuda", dtype=torch.int64))
        assert (logits.shape, host.most) == ((6, 8), 2)
    return dict(+syncs.counts)


def test_the_host_does_not_wait_for_a_trie_or_a_nucleus(pretend_cuda):
    assert pretend_cuda(restricted) == {}
