"""How far a result in lower precision may be from the same result in float64: a few times ε · Σ|terms|,
where the terms are what was summed.

A share of the result is no bound: where the terms of a sum cancel, the result is small and its rounding is that of the
terms. So every element here carries, beside its value, the sum of all magnitudes that were rounded on the way to it
(running error analysis: Wilkinson 1986; Higham 2002, section 3.3). `Traced` is a float64 tensor that does this below
autograd, so that the same lines that compute a loss and its gradients also say how large their terms were:

    x, weight = traced(problem.x), traced(problem.weight)
    grads = torch.autograd.grad(dense(x, weight), [x, weight])
    assert excess(ours, grads) <= ROUNDINGS
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# 1,000 random problems of each of the 11 losses over a vocabulary stay below 0.7,
# mistakes of 1e-4 in some reach 2.7 to 200
ROUNDINGS = 2
# of any distance: ptf raises log-probs to −64 (loss_workspace.FLOOR), also of tokens that are barred by a logit of −1e9
UNDERFLOW = 1e-17

aten = torch.ops.aten


class Traced(Tensor):
    """A float64 value, and the magnitudes that were rounded on the way to it, both of the same shape."""

    value: Tensor
    terms: Tensor

    @staticmethod
    def __new__(cls, value: Tensor, terms: Tensor) -> "Traced":
        made = Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device
        )  # type: ignore[attr-defined]
        made.value, made.terms = value, terms
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Traced({self.value}, terms={self.terms})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket
        if name in FREE:
            return func(*values_of(args), **values_of(kwargs))
        if name in LINEAR:
            return Traced(func(*values_of(args), **kwargs), func(*terms_of(args), **kwargs))
        if name not in RULES:
            raise NotImplementedError(f"{func} has no rule in tests/bounds.py")
        return RULES[name](*args, **kwargs)


def traced(exact: Tensor) -> Tensor:
    """A leaf that is known exactly."""
    exact = exact.detach().double()
    return Traced(exact, torch.zeros_like(exact)).requires_grad_()


def excess(ours: Sequence[Tensor], traced: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> float:
    """The largest distance of any element, in units of the rounding of `dtype` times the sum of its terms; anything
    else than 0 where there are none is infinitely far."""
    unit = torch.finfo(dtype).eps / 2

    def of(mine: Tensor, exact: Tensor) -> float:
        assert isinstance(exact, Traced), "no terms are known of this"
        assert mine.shape == exact.shape
        far = (mine.detach().double() - exact.value).abs() - UNDERFLOW
        return float(torch.where(far > 0, far / (unit * exact.terms), 0.0).max()) if far.numel() else 0.0

    return max(of(mine, exact) for mine, exact in zip(ours, traced, strict=True))


def values_of(tree: Any) -> Any:
    return _map(tree, lambda t: t.value if isinstance(t, Traced) else t)


def terms_of(tree: Any) -> Any:
    """Of tensors of whole numbers (indices), themselves; of what is known exactly, 0."""
    return _map(
        tree, lambda t: t.terms if isinstance(t, Traced) else torch.zeros_like(t) if t.is_floating_point() else t
    )


def _map(tree: Any, of: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return of(tree)
    if isinstance(tree, list | tuple):
        return type(tree)(_map(part, of) for part in tree)
    return {key: _map(part, of) for key, part in tree.items()} if isinstance(tree, dict) else tree


def _split(operand: Any) -> tuple[Any, Any]:
    """Value, and terms, of what may be a number."""
    if isinstance(operand, Traced):
        return operand.value, operand.terms
    return (operand.double() if isinstance(operand, Tensor) else operand), 0.0


def _rounded(value: Tensor, terms: Tensor) -> Traced:
    """One rounding more, of the result. What is barred (a log-prob of −∞) is so exactly."""
    terms = terms + value.abs()
    return Traced(value, torch.where(terms.isfinite(), terms, 0.0))


def _add(a: Any, b: Any, *, alpha: float = 1) -> Traced:
    (a, of_a), (b, of_b) = _split(a), _split(b)
    value = a + alpha * b
    return _rounded(value, torch.zeros_like(value) + of_a + abs(alpha) * of_b)


def _mul(a: Any, b: Any) -> Traced:
    (a, of_a), (b, of_b) = _split(a), _split(b)
    return _rounded(a * b, abs(a) * of_b + abs(b) * of_a)


def _div(a: Any, b: Any) -> Traced:
    (a, of_a), (b, of_b) = _split(a), _split(b)
    return _rounded(a / b, of_a / abs(b) + abs(a) * of_b / b**2)


def _mm(a: Any, b: Any) -> Traced:
    (a, of_a), (b, of_b) = _split(a), _split(b)
    # n partial sums are rounded, in random directions (Higham and Mary 2019)
    sizes = (a.abs() @ b.abs()) * a.shape[-1] ** 0.5
    return Traced(
        a @ b,
        sizes
        + (of_a @ b.abs() if isinstance(of_a, Tensor) else 0.0)
        + (a.abs() @ of_b if isinstance(of_b, Tensor) else 0.0),
    )


def _sum(a: Traced, *args: Any, **kwargs: Any) -> Traced:
    value = a.value.sum(*args, **kwargs)
    sizes = a.value.abs().sum(*args, **kwargs) * (a.value.numel() / max(value.numel(), 1)) ** 0.5
    return Traced(value, sizes + a.terms.sum(*args, **kwargs))


def _mean(a: Traced, *args: Any, **kwargs: Any) -> Tensor:
    total = _sum(a, *args, **kwargs)
    return total / (a.value.numel() / total.numel())


def _through(
    function: Callable[[Tensor], Tensor], slope: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Traced], Traced]:
    """Of a function of single elements; `slope` is of its input and its output."""

    def rule(a: Traced) -> Traced:
        value = function(a.value)
        return _rounded(value, slope(a.value, value).abs() * a.terms)

    return rule


def _masked_fill(a: Traced, mask: Tensor, fill: Any) -> Traced:
    return Traced(a.value.masked_fill(mask, fill), a.terms.masked_fill(mask, 0.0))


def _log_softmax(a: Traced, dim: int, _: bool) -> Traced:
    """logits − log Σ exp(logits): the rounding of every logit comes back as that of the sum, by its share,
    and so does one of the sum itself."""
    value = a.value.log_softmax(dim)
    return _rounded(value, a.terms + (value.exp() * a.terms).sum(dim, keepdim=True) + 1)


def _log_softmax_backward(grad: Tensor, out: Traced, dim: int, _: Any) -> Tensor:
    return grad - out.exp() * grad.sum(dim, keepdim=True)


def _scatter(a: Any, dim: int, index: Tensor, fill: float) -> Traced:
    return Traced(a.value.scatter(dim, index, fill), a.terms.scatter(dim, index, 0.0))


# the result is made of the same elements, and so are its terms
LINEAR = {
    aten.view,
    aten._unsafe_view,
    aten.t,
    aten.expand,
    aten.slice,
    aten.select,
    aten.unsqueeze,
    aten.squeeze,
    aten.gather,
    aten.cat,
    aten.detach,
    aten.alias,
    aten.slice_backward,
    aten.select_backward,
    aten.index,
    aten.scatter_add,
    aten.new_zeros,
}
FREE = {aten.ones_like, aten.gt, aten.lt, aten.eq}  # nothing of the result is rounded
RULES: dict[Any, Callable[..., Tensor]] = {
    aten.add: _add,
    aten.sub: lambda a, b, *, alpha=1: _add(a, b, alpha=-alpha),
    aten.rsub: lambda a, b, alpha=1: _add(b, a, alpha=-alpha),
    aten.neg: lambda a: Traced(-a.value, a.terms),
    aten.mul: _mul,
    aten.div: _div,
    aten.mm: _mm,
    aten.mv: _mm,
    aten.sum: _sum,
    aten.mean: _mean,
    aten.exp: _through(torch.exp, lambda _, y: y),
    aten.log: _through(torch.log, lambda x, _: 1 / x),
    aten.tanh: _through(torch.tanh, lambda _, y: 1 - y * y),
    aten.tanh_backward: lambda grad, out: grad * (1 - out * out),
    aten._log_softmax: _log_softmax,
    aten._log_softmax_backward_data: _log_softmax_backward,
    aten.masked_fill: _masked_fill,
    aten.scatter: _scatter,
}
