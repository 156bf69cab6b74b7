"""A mixture of experts on a GPU: the host waits for nothing, and no sum depends on the order that a GPU adds in."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ptf.model.config import DecoderConfig, Layer, MoE, Rope
from ptf.model.layers import LayerFactory
from ptf.model.lora import Lora
from ptf.model.moe import MixtureOfExperts
from ptf.model.tensor_parallel import own_experts
from tests.gpu_rehearsal.host_syncs import HostSyncs, UnorderedSums


class Group:
    """The second of two ranks, without processes."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


class Former(MixtureOfExperts):
    """The negative control: what a mixture did before."""

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        c, shape = self.config, x.shape
        x = x.flatten(0, 1)
        share, chosen = self.router(x).softmax(-1, dtype=torch.float32).topk(c.top_k, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        expert, token = chosen.flatten()[order], order // c.top_k
        ends = torch.bincount(expert, minlength=c.experts).cumsum(0).to(torch.int32)
        y = self.experts(x[token], ends, expert) * share.to(x.dtype).flatten()[order, None]
        return torch.zeros_like(x).index_add(0, token, y).view(shape)


def layer(kind: type[MixtureOfExperts], gpt_oss: bool, rank: int = 4) -> MixtureOfExperts:
    moe = MoE(experts=8, top_k=4, intermediate_size=64, bias=gpt_oss, clamp=7.0 if gpt_oss else None)
    config = DecoderConfig(64, 64, 1, 1, 8, 16, 1e-6, 64, True, (Layer(Rope(1e4), moe=True),), moe=moe)
    return kind(config, LayerFactory(lora=Lora(rank=rank, targets=("moe.*_proj",))), "moe")


def watched(kind: type[MixtureOfExperts], gpt_oss: bool, shared: bool) -> tuple[dict[str, int], dict[str, int], int]:
    """Host syncs and unordered sums of a forward and a backward pass, and the number of operations."""
    with FakeTensorMode(), HostSyncs() as syncs, UnorderedSums() as sums:
        with torch.device("cuda"):
            mixture = layer(kind, gpt_oss)
            replaced = {name: p.to(torch.bfloat16) for name, p in mixture.named_parameters()}
            for name, value in replaced.items():
                module, _, own_name = name.rpartition(".")
                mixture.get_submodule(module).register_parameter(own_name, torch.nn.Parameter(value.detach()))
            x = torch.randn(2, 256, 64, dtype=torch.bfloat16, requires_grad=True)
            real = torch.ones(2, 256, dtype=torch.bool)
        if shared:  # this rank's half of the experts
            experts: Any = mixture.experts
            for name, p in list(experts._parameters.items()):
                experts._parameters[name] = None if p is None else torch.nn.Parameter(p.detach()[:4])
            own = experts.forward
            experts.forward = lambda *inputs: own_experts(experts, own, Group(), *inputs)  # type: ignore[arg-type]
        y = mixture(x, real)
        loss = y.sum().float() + (0.0 if kind is Former else mixture.routing.probability.sum())  # type: ignore[union-attr]
        loss.backward()
        assert all(p.grad is not None for p in mixture.parameters())
        assert x.grad is not None
    return dict(syncs.counts), dict(sums.counts), sums.all


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("gpt_oss", [False, True])
def test_a_mixture_waits_for_nothing_and_adds_in_a_fixed_order(pretend_cuda, gpt_oss, shared) -> None:
    waits, sums, operations = pretend_cuda(watched, MixtureOfExperts, gpt_oss, shared)
    assert operations > 50  # the backward pass is seen
    assert waits == {}
    assert sums == {}


def test_what_a_mixture_did_before_is_found(pretend_cuda) -> None:
    waits, sums, _ = pretend_cuda(watched, Former, False, False)
    assert waits == {"bincount": 1}
    assert sums.keys() >= {"index_add", "index_put"}
