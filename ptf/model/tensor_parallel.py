"""Tensor parallelism: every rank of a group holds a slice of the heads, of the MLP's width, of the experts and of the
vocabulary (Megatron-LM, Shoeybi et al. 2019).

A parameter is a DTensor to whatever stores it (FSDP, the optimizer, checkpoints, the bridge) and its local slice to
whatever computes with it, so the modules stay those of one device. How each parameter is sharded is a `ParallelStyle`,
and sharding.py says which module has which.

Between two projections that are sharded over the group every rank holds T / ranks of the positions (sequence
parallelism: Korthikanti et al., Reducing Activation Recomputation, 2022), so norms and residuals cost and keep that
much less. Inputs are gathered, and outputs are summed and sliced again; each is the other's backward.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ptf.errors import UserError
from ptf.model.config import DecoderConfig
from ptf.model.decoder import Decoder
from ptf.varlen import Varlen

Exchange = Callable[[Tensor, ProcessGroup], Tensor]


def _gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """Gather [B, t, D] of each rank to [B, t · ranks, D]."""
    x = x.transpose(0, 1).contiguous()
    whole = x.new_empty(len(x) * group.size(), *x.shape[1:])
    dist.all_gather_single(whole, x, group=group)
    return whole.transpose(0, 1).contiguous()


def _summed_slice(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum [B, T, D] over the ranks and return this rank's [B, T / ranks, D] of the sum."""
    x = x.transpose(0, 1).contiguous()
    part = x.new_empty(len(x) // group.size(), *x.shape[1:])
    dist.reduce_scatter_single(part, x, group=group)
    return part.transpose(0, 1).contiguous()


def own_slice(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's [B, T / ranks, ..] of [B, T, ..]."""
    return x.chunk(group.size(), 1)[group.rank()].contiguous()


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks; x stays as it is."""
    whole = x.clone()
    dist.all_reduce(whole, group=group)
    return whole


class _Exchange(Function):
    """An exchange between the ranks of a group, and that of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, exchange: Exchange, backward: Exchange) -> Tensor:
        ctx.group, ctx.exchange = group, backward
        return exchange(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.exchange(grads[0], ctx.group), None, None, None


def exchange(x: Tensor, group: ProcessGroup, forward: Exchange, backward: Exchange) -> Tensor:
    """Return what an exchange makes of x; its gradient takes the exchange `backward`."""
    return cast("Tensor", _Exchange.apply(x, group, forward, backward))


def all_gather(x: Tensor, group: ProcessGroup, whole_gradient: bool = False) -> Tensor:
    """Gather [B, t, D] to [B, t · ranks, D].

    In the backward pass the gradient is summed over the ranks and cut (reduce-scatter), because each has a part of it.
    With `whole_gradient` each rank has the whole gradient already, which is only cut.
    """
    return exchange(x, group, _gathered, own_slice if whole_gradient else _summed_slice)


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum [B, T, D] over the ranks and return this rank's [B, T / ranks, D]. T must be a multiple of the ranks."""
    return exchange(x, group, _summed_slice, _gathered)


@dataclass(frozen=True, slots=True)
class ParamSharding:
    """How the ranks hold one parameter."""

    dim: int | None = None  # each rank has a slice along this dimension; None: each has all of it
    partial: bool = False  # each has all of it, and its gradient is a part of a sum
    once: bool = False  # used on the first rank only, because it is added to a part of a sum

    def local(self, parameter: Tensor) -> Tensor:
        """Return what this rank computes with, of a parameter that FSDP has gathered over its own ranks.

        A parameter that is not gathered is returned as it is: nothing computes with it.
        """
        if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim > 1:
            return parameter
        here = parameter.to_local(grad_placements=[Partial() if self.partial else parameter.placements[-1]])
        return here * 0 if self.once and parameter.device_mesh.get_local_rank() else here


@dataclass(frozen=True, slots=True)
class ParallelStyle:
    """How a module works over the group. Parameters that are not in `shardings` are whole on every rank."""

    shardings: Mapping[str, ParamSharding] = field(default_factory=dict)
    # the first input is gathered along the sequence; the output, a part of a sum, is summed and sliced again
    sequence_parallel: bool = False
    # replaces the module's forward: called with the module, its own forward, the group and the inputs
    forward: Callable[..., Tensor] | None = None


def embed(module: nn.Module, own: Callable[..., Tensor], group: ProcessGroup, tokens: Tensor) -> Tensor:
    """Look up the tokens whose rows this rank has, and sum over ranks: [B, T] → [B, T / ranks, D]."""
    weight = cast("Tensor", module.weight)
    here = tokens - group.rank() * len(weight)
    mine = (here >= 0) & (here < len(weight))
    return reduce_scatter(F.embedding(torch.where(mine, here, 0), weight) * mine[..., None], group)


def normalise_and_gather(module: nn.Module, own: Callable[..., Tensor], group: ProcessGroup, x: Tensor) -> Tensor:
    """Apply the last norm and gather; the head gives every rank the whole gradient."""
    return all_gather(own(x), group, whole_gradient=True)


def normalise_width(module: Any, own: Callable[..., Tensor], group: ProcessGroup, x: Tensor) -> Tensor:
    """Normalise over a width of which each rank has a slice: [B, T, n / ranks] is divided by the root mean square of
    all n."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # each rank goes on with the sum in its own way: so are its gradients summed
    total = exchange(wide.square().mean(-1, keepdim=True), group, summed, summed)
    return module.weight * (wide * torch.rsqrt(total / group.size() + module.eps)).to(x.dtype)


def mix(module: Any, own: Callable[..., Tensor], group: ProcessGroup, x: Tensor, real: Tensor) -> Tensor:
    """Run a mixture of experts.

    Every rank routes all tokens, and sorts its own experts' rows to the front. All ranks compute the balance loss,
    which must count once.
    """
    module.first = group.rank() * (module.config.experts // group.size())
    out = own(x, real)
    probability = module.routing.probability
    if probability.requires_grad:  # each rank has the whole gradient, and the ranks' gradients will be summed
        probability.register_hook(lambda gradient: gradient / group.size())
    return out


def own_experts(
    module: nn.Module, own: Callable[..., Tensor], group: ProcessGroup, x: Tensor, ends: Tensor, expert: Tensor
) -> Tensor:
    """Return the outputs of the rows of x that go to this rank's experts, and zeros for the other rows.

    The rank's own rows come first. How many they are is known on the device alone: slicing would make the host wait for
    it in every layer. Grouped products skip the rows of other ranks; elementwise operations between them process these
    rows too, and the results are discarded.
    """
    count = len(ends) // group.size()
    ends = ends[:count]
    mine = (torch.arange(len(x), device=x.device) < ends[-1])[:, None]
    return torch.where(mine, own(torch.where(mine, x, 0), ends, expert.clamp(max=count - 1)), 0)


@functools.cache
def _localised(kind: type[nn.Module], shardings: tuple[tuple[str, ParamSharding], ...]) -> type[nn.Module]:
    """Return a subclass whose parameters read as this rank's part.

    FSDP and the optimizer use `_parameters` and see DTensors.
    """

    def part(name: str, cut: ParamSharding) -> property:
        def get(module: nn.Module) -> Tensor | None:
            value = module._parameters[name]
            return None if value is None else cut.local(value)

        return property(get)

    return type(kind.__name__, (kind,), {name: part(name, cut) for name, cut in shardings})


def style_of(name: str, plan: Mapping[str, ParallelStyle]) -> ParallelStyle | None:
    """Return the style of the first entry whose pattern matches; a `*` stands for one word."""
    fitting = (s for pattern, s in plan.items() if pattern.count(".") == name.count(".") and fnmatchcase(name, pattern))
    return next(fitting, None)


def raise_if_indivisible(c: DecoderConfig, ranks: int) -> None:
    """Raise UserError with everything that a tensor group of this size does not divide."""
    sizes = {"attention heads": c.heads, "key-value heads": c.kv_heads}
    if not all(kind.moe for kind in c.layers):
        sizes["columns of the MLP"] = c.intermediate_size
    if c.moe and any(kind.moe for kind in c.layers):
        sizes["experts"] = c.moe.experts
        if c.moe.shared_intermediate_size:
            sizes["columns of the shared expert"] = c.moe.shared_intermediate_size
    if c.head == "lm":
        sizes["rows of the vocabulary"] = c.padded
    if wrong := [f"{n} {what}" for what, n in sizes.items() if n % ranks]:
        fitting = [n for n in range(1, ranks) if not any(size % n for size in sizes.values())]
        raise UserError(
            f"compute.mesh.tensor_parallel_size: {ranks} does not divide the model's {', '.join(wrong)}; "
            f"set it to one of {', '.join(map(str, fitting))}"
        )


def cut(model: Decoder, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    """Shard the model over a mesh of one dimension. Raise UserError for a mesh that does not divide the model, and for
    a parameter that is not in the plan."""
    raise_if_indivisible(model.config, mesh.size())
    group = mesh.get_group()
    unknown = [f"{path} (model.replace)" for path in model.factory.constructors if path != "head"]
    sharded: dict[int, nn.Parameter] = {}  # by the parameter's id: a tied head stays one parameter with the embedding
    for name, module in model.named_modules():
        if isinstance(module, nn.Identity):  # a norm that this family does not have
            continue
        style = style_of(name, plan)
        if style is None:
            unknown += [f"{name}.{p}" if name else p for p, _ in module.named_parameters(recurse=False)]
            continue
        shardings = tuple((p, style.shardings.get(p, ParamSharding())) for p in module._parameters)
        for p, cut_of_p in shardings:
            whole = module._parameters[p]
            if whole is not None:
                if id(whole) not in sharded:
                    placed = distribute_tensor(
                        whole, mesh, [Replicate() if cut_of_p.dim is None else Shard(cut_of_p.dim)]
                    )
                    sharded[id(whole)] = nn.Parameter(placed, requires_grad=whole.requires_grad)
                module._parameters[p] = sharded[id(whole)]
        if shardings:
            module.__class__ = _localised(type(module), shardings)  # type: ignore[assignment]
        own = module.forward
        inner = own if style.forward is None else functools.partial(style.forward, module, own, group)
        if style.sequence_parallel:
            module.forward = functools.partial(_of_sequence_parallel, inner, group)  # type: ignore[method-assign]
        elif style.forward is not None:
            module.forward = inner
    if unknown:
        raise UserError(
            f"compute.mesh.tensor_parallel_size: ptf/model/sharding.py does not say how to shard {', '.join(unknown)}; "
            "set compute.mesh.tensor_parallel_size: 1"
        )
    model.group, model.vocab_start = group, 0
    if model.config.head == "lm":
        model.vocab_start = group.rank() * (model.config.padded // group.size())
    _fill_up(model, group)


def _of_sequence_parallel(inner: Callable[..., Tensor], group: ProcessGroup, x: Tensor, *more: Any) -> Tensor:
    """Run a forward on whole sequences, and return this rank's part of the sum."""
    return reduce_scatter(inner(all_gather(x, group), *more), group)


def _fill_up(model: Decoder, group: ProcessGroup) -> None:
    """Pad sequences whose length the group does not divide; the loss does not get the padding.

    The batch's `varlen` is of sequences without it: where some is added, a fused attention finds the documents itself.
    """
    own = model.forward

    def forward(
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor,
        head_fn: Callable[..., Any],
        attend: Any = None,
        varlen: Varlen | None = None,
        **inputs: Any,
    ) -> Any:
        length, more = tokens.shape[1], (0, -tokens.shape[1] % group.size())
        assert attend is None or not more[1], "an attend is of sequences without padding"
        return own(
            F.pad(tokens, more),
            F.pad(positions, more),
            F.pad(segments, more, value=-1),
            lambda x, head: head_fn(x[:, :length], head),
            attend,
            None if more[1] else varlen,
            **inputs,
        )

    model.forward = forward
