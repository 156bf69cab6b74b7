"""What lies between the matrix products is compiled on a GPU: norms, gates and rotary embeddings of every family."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ptf.model.decoder import Block
from ptf.model.families import family_of
from ptf.model.kernels.choice import Kernels
from ptf.model.layers import LayerFactory
from ptf.model.rope import rotary, rotate

SHARE = 0.25  # of the pointwise operations, at most, are left: residuals, routing


class Pointwise(TorchDispatchMode):
    """Counts pointwise operations and reductions of norms that are dispatched outside compiled graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = self.graphs = self.depth = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let torch.compile work inside this mode."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pointwise = torch.Tag.pointwise in function.tags or "rms_norm" in function.name()
        self.outside += not self.depth and pointwise
        return function(*args, **(kwargs or {}))

    def backend(self) -> Any:
        """A compiler that runs its graphs as they are, and marks what they dispatch."""

        def compiler(graph: Any, inputs: Any) -> Any:
            def run(*values: Any) -> Any:
                self.graphs, self.depth = self.graphs + 1, self.depth + 1
                try:
                    return graph(*values)
                finally:
                    self.depth -= 1

            return make_boxed_func(run)

        return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)


def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Products through which gradients reach queries, keys and values; no attention."""
    return (q.transpose(1, 2) @ (k.transpose(1, 2).mT @ v.transpose(1, 2))[:, :1]).transpose(1, 2)


def counted(model_type: str, compiled: bool, rotates: bool = True) -> tuple[int, int]:
    """Pointwise operations outside compiled graphs, and the graphs that ran, of two layers forward and backward.

    `rotates`: whether rotary embeddings are compiled, too.
    """
    torch._dynamo.reset()
    torch.set_default_dtype(torch.bfloat16)
    try:
        family = family_of({"model_type": model_type})
        c = family.config(family.random_config(random.Random(3)))
        with FakeTensorMode(), Pointwise() as mode:
            kernels = Kernels()
            if compiled:
                kernels = kernels.compile(partial(torch.compile, dynamic=True, backend=mode.backend()))
            factory = LayerFactory(kernels=kernels if rotates else replace(kernels, rotate=rotate))
            with torch.device("cuda"):
                blocks = torch.nn.ModuleList(Block(c, i, factory, f"layers.{i}") for i in range(2))
                x = torch.randn(1, 64, c.dim, requires_grad=True)
                positions, real = torch.arange(64)[None], torch.ones(1, 64, dtype=torch.bool)
            table = rotary(positions, c.head_dim, c.layers[0].rope)
            mode.outside = 0
            y = x
            for block in blocks:
                y = block(y, table, attend, real)
            y.sum().backward()
            return mode.outside, mode.graphs
    finally:
        torch.set_default_dtype(torch.float32)


# graphs of a layer: two norms, a gate, queries and keys rotated; norms of queries and keys, norms after
@pytest.mark.long
@pytest.mark.parametrize(
    ("model_type", "parts"), [("qwen3", 7), ("qwen3_moe", 7), ("gpt_oss", 5), ("gemma3_text", 9), ("olmo2", 7)]
)
def test_few_operations_are_left_between_the_products(pretend_cuda, model_type, parts) -> None:
    plain, none = pretend_cuda(counted, model_type, False)
    outside, graphs = pretend_cuda(counted, model_type, True)
    print(model_type, plain, outside, graphs)
    assert none == 0
    assert graphs == 2 * 2 * parts  # two layers, forward and backward
    assert outside < SHARE * plain


@pytest.mark.long
def test_rotary_embeddings_that_are_not_compiled_are_found(pretend_cuda) -> None:
    all_compiled, _ = pretend_cuda(counted, "qwen3", True)
    outside, graphs = pretend_cuda(counted, "qwen3", True, False)
    assert graphs == 2 * 2 * 5
    assert outside >= all_compiled + 2 * 2 * 3  # two layers, queries and keys: two products and their sum


@pytest.mark.parametrize(("setting", "found"), [("auto", (False, True)), (True, (True, True)), (False, (False, False))])
def test_auto_compiles_on_a_gpu(setting, found) -> None:
    made = (Kernels.of(torch.device(device), "bf16", compiled=setting) for device in ("cpu", "cuda"))
    assert tuple(kernels.compiled for kernels in made) == found
