"""What the plan counts of norms, gates and rotary embeddings, beside what torch.compile saves of them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from ptf.model import moe
from ptf.model.activation_memory import TOKENS, CountedAttend, activation_bytes, as_compiled
from ptf.model.kernels.choice import Kernels
from ptf.model.kernels.elementwise import clamped, gated, gelu_tanh, normalised
from ptf.model.rope import rotary, rotate
from tests.train.live_bytes import inductor_backend
from tests.train.test_budget import small_decoder

DIM, HEADS, HEAD_DIM = 512, 8, 64


def saved_bytes(call: Callable[[], Any], besides: list[Tensor]) -> int:
    """Return the bytes of the storages that autograd saves of a call, but for those of the tensors `besides`."""
    own, saved = {t.untyped_storage()._cdata for t in besides}, {}

    def pack(t: Tensor) -> Tensor:
        # torch.compile saves the numbers of a graph, such as a clamp's limits, as tensors of one element
        if t.dim() and t.untyped_storage()._cdata not in own:
            saved[t.untyped_storage()._cdata] = t
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        out = call()
    assert any(t.requires_grad for t in tree_leaves(out) if isinstance(t, Tensor))
    return sum(t.untyped_storage().nbytes() for t in saved.values())


def rows(*shape: int) -> Tensor:
    return torch.randn(TOKENS, *shape, dtype=torch.bfloat16, requires_grad=True)


def weight(dim: int, trained: bool = True) -> Tensor:
    return torch.randn(dim, dtype=torch.bfloat16, requires_grad=trained)


def table(rotated: int) -> tuple[Tensor, Tensor]:
    return torch.randn(TOKENS, 1, rotated), torch.randn(TOKENS, 1, rotated)


# the function, and what makes its arguments
CALLS: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "norm": (normalised, lambda: (rows(DIM), weight(DIM), 1e-6, False)),
    "norm of heads": (normalised, lambda: (rows(HEADS, HEAD_DIM).flatten(0, 1), weight(HEAD_DIM), 1e-6, False)),
    "norm with a frozen weight": (normalised, lambda: (rows(DIM), weight(DIM, False), 1e-6, False)),
    "Gemma's norm": (normalised, lambda: (rows(DIM), weight(DIM), 1e-6, True)),
    "SwiGLU": (gated, lambda: (F.silu, rows(DIM), rows(DIM))),
    "GeGLU": (gated, lambda: (gelu_tanh, rows(DIM), rows(DIM))),
    "GPT-OSS's gate": (clamped, lambda: (7.0, rows(DIM), rows(DIM))),
    "rotation": (rotate, lambda: (rows(HEADS, HEAD_DIM), table(HEAD_DIM))),
    "rotation of a part": (rotate, lambda: (rows(HEADS, HEAD_DIM), table(HEAD_DIM // 2))),
}


@pytest.fixture
def as_inductor() -> Iterator[Callable[[Any], Any]]:
    """Give a compiler whose graphs save what Inductor's do."""
    torch._dynamo.reset()
    yield partial(torch.compile, dynamic=True, backend=inductor_backend())
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_function_saves_what_is_planned(as_inductor, name) -> None:
    function, make = CALLS[name]
    args = make()
    parameters = [args[1]] if function is normalised else []
    real = saved_bytes(lambda: as_inductor(function)(*args), parameters)
    planned = saved_bytes(lambda: as_compiled(function)(*args), parameters)
    assert planned == pytest.approx(real, rel=0.02)
    if function is not rotate:  # whose operations save the same tables
        assert saved_bytes(lambda: function(*args), parameters) > 1.3 * real, "negative control"


# beside Qwen3: experts, shared ones, sinks and clamped gates, more and fewer norms, norms of the width, a part that is
# rotated, latent attention
FAMILIES = ("qwen3", "qwen3_moe", "gpt_oss", "gemma3_text", "olmo2", "glm4_moe", "deepseek_v3")


@pytest.mark.long
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_compiled_layer_saves_as_much_less_as_is_planned(as_inductor, monkeypatch, model_type, adapted) -> None:
    # a CPU pads the rows of experts, by as much as their tokens need
    monkeypatch.setattr(moe, "_filled_up", lambda x, ends, expert: (x, ends, expert, None))
    model = small_decoder(model_type, adapted)
    config, factory = model.config, model.factory
    turns = rotary(torch.arange(TOKENS)[None], config.rotary_dim, config.layers[0].rope)
    x = torch.randn(1, TOKENS, config.dim, dtype=torch.bfloat16, requires_grad=True)
    inputs = x, turns, CountedAttend(TOKENS, "cpu"), torch.ones(1, TOKENS, dtype=torch.bool)
    planned, real = [], []
    for compiled in (False, True):
        if compiled:
            model = small_decoder(model_type, adapted, Kernels().compile(as_inductor))
        block = model.layers[0].to(torch.bfloat16)
        found = activation_bytes(config, 0, factory, torch.bfloat16, 1, block, compiled=compiled)
        planned.append(found.everything)
        real.append(saved_bytes(partial(block, *inputs), list(block.parameters())) / TOKENS)
    assert planned[0] - planned[1] == pytest.approx(real[0] - real[1], rel=0.02)
    assert planned[0] > planned[1]
    assert planned[1] == pytest.approx(real[1], rel=0.1)  # of experts, the routing is estimated
