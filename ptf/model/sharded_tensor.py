"""Tensors that may be sharded: filled with what this process owns, and gathered."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ptf.model.checkpoint_mapping import Slices


def fill(parameter: Tensor, read: Callable[[Slices], Tensor]) -> None:
    """Fill a parameter with what `read` returns for the slices that this process owns."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            shape, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            part = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            if 0 not in shape:
                parameter.to_local().copy_(read(part))
        else:
            parameter.copy_(read(tuple(slice(0, n) for n in parameter.shape)))


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
