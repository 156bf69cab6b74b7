"""Counts the operations for which a program waits for its GPU."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# their results, or the shapes of their results, are values that the host must know
VALUES = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
SHAPES = {aten.nonzero.default, aten.bincount.default, aten._unique2.default, aten.unique_dim.default}
SHAPES |= {aten.masked_select.default, aten.repeat_interleave.Tensor}
# they add values wherever an index says; these with `accumulate`
SUMS = {aten.index_add, aten.index_add_, aten.scatter_add, aten.scatter_add_, aten.scatter_reduce, aten.bincount}
PUTS = {aten.index_put, aten.index_put_, aten._unsafe_index_put, aten._index_put_impl_}


class HostSyncs(TorchDispatchMode):
    """Counts host syncs by the name of the operation, and gives a result to those that fake tensors have none for.

    Use it inside a FakeTensorMode. A scalar that the host reads is 1; `nonzero` finds every element.
    """

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()  # 0 for what was asked of the host's own values

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let torch.compile work inside this mode."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        from_gpu = any(isinstance(leaf, Tensor) and leaf.device.type == "cuda" for leaf in tree_leaves((args, kwargs)))
        if function in VALUES:
            self.counts[function.overloadpacket.__name__] += from_gpu
            return 1.0 if args[0].is_floating_point() else 1
        if function is aten.record_stream.default:  # fake tensors have no memory
            return None
        if not from_gpu:
            return function(*args, **kwargs)
        if function in SHAPES:
            self.counts[function.overloadpacket.__name__] += 1
            if function is aten.nonzero.default:
                return args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
            if function is aten.bincount.default:
                least = args[2] if len(args) > 2 else kwargs.get("minlength", 1)
                return args[0].new_empty(least, dtype=torch.int64)
        result = function(*args, **kwargs)
        # a copy that need not be complete is one to page-locked memory (`offload`)
        waits = function is aten._to_copy.default or (function is aten.copy_.default and not any(args[2:]))
        if waits and result.device.type == "cpu":
            self.counts["copy to the CPU"] += 1
        return result


class UnorderedSums(TorchDispatchMode):
    """Counts operations that add floating-point values wherever an index says, and all that were dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.all = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, self.all = function.overloadpacket, self.all + 1
        put = packet in PUTS and len(args) > 3 and args[3]
        one = packet in (aten.scatter_add, aten.scatter_add_) and args[2].shape[args[1]] == 1  # for each place
        if (packet in SUMS and args[0].is_floating_point() and not one) or put:
            self.counts[packet.__name__] += 1
        return function(*args, **(kwargs or {}))
