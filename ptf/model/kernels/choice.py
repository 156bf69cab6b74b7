"""The kernels of a model: the functions that its modules are built with, chosen once for a device and the settings of a
run. Nothing replaces them afterwards; parallelism comes from outside, and wraps the forward of modules or an `Attend`.

The defaults are PyTorch's, and take from a tensor what depends on its device alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ptf.model.kernels import matrix_product
from ptf.model.kernels.delta_rule import Chunks, chunked
from ptf.model.kernels.elementwise import clamped, compiled_loss, gated, normalised
from ptf.model.kernels.fused import Flash, Flash4, Setting, fla_rule, liger_gate, packages_of
from ptf.model.rope import Table, rotate

ROTATIONS = 64  # compiled at most: for each number of heads, width and dtype, and with and without gradients


def by_inductor(function: Callable[..., Tensor]) -> Any:
    """Compile a function for any shape; rotations for any number of rows, because compiled for any shape they
    took almost five times what their bytes need (docs/gpu_status.md)."""
    if function is not rotate:
        return torch.compile(function, dynamic=True)
    compiler: Any = torch.compile  # whose type knows no recompile_limit yet
    return compiler(function, dynamic=False, recompile_limit=ROTATIONS)


def _rows(x: Tensor) -> Tensor:
    """Return [B, T, ..] as [B·T, ..], whose number of rows a compiled function takes as it is."""
    rows = x.flatten(0, 1)
    torch._dynamo.maybe_mark_dynamic(rows, 0)
    return rows


@dataclass(frozen=True, slots=True)
class Kernels:
    """What the modules of a model compute with."""

    linear: Callable[..., Tensor] = matrix_product.linear  # of x, a weight [out, in], and a bias if there is one
    multiply: Callable[..., None] = matrix_product.multiply  # of two matrices, to where a third one is
    loss_of_rows: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = compiled_loss  # on a GPU, in 16 bits
    normalise: Callable[[Tensor, Tensor, float, bool], Tensor] = normalised
    gate: Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor] = gated
    clamped_gate: Callable[[float, Tensor, Tensor], Tensor] = clamped
    rotate: Callable[[Tensor, Table], Tensor] = rotate
    delta_rule: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Chunks], tuple[Tensor, Tensor]] = chunked
    flash: type[Flash] | None = None  # softmax attention, of the models that it can compute
    compiled: bool = False
    # what they come from beside PyTorch, with versions: a run does not continue with others
    packages: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        device: torch.device,
        precision: str,
        *,
        compiled: bool | Literal["auto"] = False,
        fused: Setting = (),
    ) -> "Kernels":
        """Choose the kernels of a device; `compiled` and `fused` are `train.compile` and `train.fused`.

        Raises UserError for a package that is asked for by name and cannot be used.
        """
        packages = packages_of(fused, device, precision)
        made = cls(packages=packages | matrix_product.record(device, precision))
        if device.type == "cuda" if compiled == "auto" else compiled:
            made = made.compile()
        return replace(
            made,
            gate=liger_gate if "liger_kernel" in packages else made.gate,
            delta_rule=fla_rule if "fla" in packages else made.delta_rule,
            flash=Flash4 if "flash_attn_4" in packages else Flash if "flash_attn" in packages else None,
        )

    def compile(self, compiler: Callable[[Callable[..., Tensor]], Any] = by_inductor) -> "Kernels":
        """Return the same with what lies between the matrix products (norms, gates, rotary embeddings) compiled.

        Attention is compiled where that is faster (attention.py), and the whole model never, because the number of
        documents differs from step to step. One function serves all layers: torch compiles at most 8 variants of a
        function, and would run the other layers uncompiled. So tensors are given as rows, [B·T, ..]: a batch of one
        sequence, and the norms of heads and of layers, are no variants of their own. `compiler` is given each function.
        """
        norm_of_rows, gate_of_rows, rotate_rows = compiler(normalised), compiler(gated), compiler(rotate)

        def normalise(x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
            return norm_of_rows(x.flatten(0, -2), weight, eps, offset).view(x.shape)

        def gate(activate: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
            return gate_of_rows(activate, gate.flatten(0, -2), up.flatten(0, -2)).view(gate.shape)

        def turn(x: Tensor, table: Table) -> Tensor:
            return rotate_rows(_rows(x), tuple(map(_rows, table[:2]))).view(x.shape)

        return replace(self, normalise=normalise, gate=gate, clamped_gate=compiler(clamped), rotate=turn, compiled=True)

    @property
    def compilation(self) -> str:
        """What `train.compile` does, and `train.fused` with it, for a run's first lines."""
        compiled = "compiled" if self.compiled else "not compiled"
        liger = self.packages.get("liger_kernel")
        return (
            f"norms and rotary {compiled}, gates by liger_kernel {liger}"
            if liger
            else f"norms, gates and rotary {compiled}"
        )


PLAIN = Kernels()
TORCH = Kernels(linear=F.linear)  # where two definitions of a model are compared, and not two libraries of products
