"""What rounding decides in a reference computation: choices between values that are nearly equal, and the last digits.

Both are found by running transformers' model as it is, under a mode of torch that sees the functions it calls.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

FACTOR = 4.0  # times a model's own rounding is rounding still


class Margins(TorchFunctionMode):
    """The margins of the choices (`topk`) that are made while the mode is on.

    A margin is the difference between the last value that is chosen and the first that is not, relative to the largest
    finite magnitude of its row; infinite where that one is −∞, and if nothing is chosen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []  # of each choice, a margin for each of its rows

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            self.seen.append(_margins(*args, **kwargs))
        return func(*args, **kwargs)

    @property
    def smallest(self) -> float:
        """The smallest of all; infinite where nothing was chosen."""
        return min((float(margins.min()) for margins in self.seen if margins.numel()), default=float("inf"))


@torch.no_grad()
def _margins(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Tensor:
    """Return the margins of the rows of a `topk`, whose arguments these are."""
    if k >= input.shape[dim]:
        return torch.full_like(input.select(dim, 0), float("inf"))
    best = input.topk(k + 1, dim, largest).values.unbind(dim)
    scale = torch.where(input.isfinite(), input, 0).abs().amax(dim).clamp(min=torch.finfo(input.dtype).tiny)
    return (best[k - 1] - best[k]).abs() / scale


class Double(TorchFunctionMode):
    """Computation in fp64 wherever the code of a model in fp64 asks for fp32, as norms and routers do."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(_widened, args), **{name: _widened(value) for name, value in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def bound_of(error: float, bound: float, own: Callable[[], float]) -> float:
    """Return the bound that an error in bf16 is judged by: the given one, and where it is beyond that, `FACTOR` times
    the model's `own` rounding, if that is more. `own` is called only then."""
    return bound if error <= bound else max(bound, FACTOR * own())


def difference(found: Any, wanted: Any) -> float:
    """Return the largest difference between two lists of log-probs, or of a head's values.

    One that is beyond the bound of its precision is measured beside the model's own rounding in bf16 (`bound_of`):
    SmolLM2-135M, trained in bf16, gives random tokens up to 26 nats, 0.8 from fp32; transformers' bf16 is 0.5 from it.
    """
    one, other = (torch.as_tensor(values, dtype=torch.float64) for values in (found, wanted))
    return float((one - other).abs().max())
