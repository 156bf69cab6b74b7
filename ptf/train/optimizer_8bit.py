"""AdamW's moments in 8 bits (`train.optimizer: adamw_8bit`; Dettmers et al. 2022, arXiv 2110.02861): blocks of 64
values along a row share a scale in fp32, and each value is one of 256 numbers whose distances grow with their size.

Between steps, `optimizer.state` has codes and scales in place of the moments. For each bucket of parameters, a step
dequantises the moments, updates the parameters in fp32, and quantises the new moments; bitsandbytes converts. No block
crosses the end of a row of a rank's shard, so codes and scales are sharded like their parameter, and a checkpoint has
the same codes on any number of ranks. (Where tensor parallelism cuts rows to a length that is no multiple of 64, the
moments are in fp32, so such a checkpoint is refused with another `compute.mesh`.)
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from ptf.compute.checkpoint import first_error
from ptf.errors import UserError
from ptf.model.bitsandbytes_functions import bitsandbytes_functions
from ptf.train.optimizer_offload import BUCKET_BYTES, buckets, local

SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # names in torch's AdamW; whether the moment has negative values
BLOCK = 64  # values
FEWEST = 4096  # values; the moments of smaller parameters are kept in fp32
_functions = functools.partial(bitsandbytes_functions, "train.optimizer: adamw_8bit")


def is_quantised(parameter: Tensor) -> bool:
    """Return whether the moments of a parameter are in 8 bits; those of vectors, of small matrices, and of shards whose
    rows are no multiple of 64 values are kept in fp32."""
    return parameter.dim() > 1 and parameter.numel() >= FEWEST and local(parameter).shape[-1] % BLOCK == 0


def moment_bytes(parameter: Tensor) -> float:
    """Return the bytes of both moments of this rank's shard, between steps."""
    return 2.0 * local(parameter).numel() * (1 + 4 / BLOCK if is_quantised(parameter) else 4)


@dataclass(frozen=True, slots=True)
class _AsItIs:
    """A tensor that torch's optimizer does not convert to the dtype of its parameter while it loads a state."""

    tensor: Tensor


def _wrap_codes(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
    states = {
        key: {n: _AsItIs(v) if isinstance(v, Tensor) and v.dtype == torch.uint8 else v for n, v in state.items()}
        for key, state in loaded["state"].items()
    }
    return {**loaded, "state": states}


def _unwrap_codes(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state.update({name: value.tensor for name, value in state.items() if isinstance(value, _AsItIs)})


class QuantisedMoments:
    """The state of an optimizer, whose large moments are in 8 bits except while their bucket is updated."""

    def __init__(self, optimizer: torch.optim.Optimizer, limit: int = BUCKET_BYTES) -> None:
        _functions()  # raises here, not in the first step
        self.optimizer = optimizer
        optimizer.register_load_state_dict_pre_hook(_wrap_codes)
        optimizer.register_load_state_dict_post_hook(_unwrap_codes)
        # with the number of the group, not the group, because loading a state replaces the groups
        self.buckets = [
            (number, parameters)
            for number, group in enumerate(optimizer.param_groups)
            for parameters in buckets(group["params"], limit)
        ]

    def step(self) -> None:
        """Make one step of the optimizer, bucket by bucket."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        try:
            for number, parameters in self.buckets:
                for parameter in parameters:
                    _dequantise(state[parameter], parameter)
                self.optimizer.param_groups = [{**groups[number], "params": parameters}]
                self.optimizer.step()
                for parameter in parameters:
                    _quantise(state[parameter], parameter)
        finally:
            self.optimizer.param_groups = groups

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Run a block that saves or loads the state."""
        for parameter in (p for _, parameters in self.buckets for p in parameters):
            if not self.optimizer.state[parameter]:  # loading compares with what is there
                zeros = {name: torch.zeros_like(parameter, requires_grad=False) for name in SIGNED}
                step = torch.zeros((), device=local(parameter).device)
                self.optimizer.state[parameter] = {"step": step, **zeros}
                _quantise(self.optimizer.state[parameter], parameter)
        try:
            yield
        except (Exception, CheckpointException) as error:
            if "exp_avg" in (first := first_error(error)):
                raise UserError(
                    "the moments of this checkpoint (train.optimizer: adamw_8bit) do not fit the shards of this run; "
                    f"resume with the compute.workers and compute.mesh of before ({first})"
                ) from error
            raise


@functools.cache
def _values(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 numbers, from −1 or 0 to 1."""
    return _functions().create_dynamic_map(signed=signed).to(device)


def _quantise(state: dict[str, Any], parameter: nn.Parameter) -> None:
    """Put codes and scales in the place of the moments."""
    if not is_quantised(parameter):
        return
    for name, signed in SIGNED.items():
        moment = local(state.pop(name)).contiguous()
        values = _values(signed, moment.device)
        scales_shape = (*moment.shape[:-1], moment.shape[-1] // BLOCK)
        if moment.numel():
            codes, found = _functions().quantize_blockwise(moment.view(-1), code=values, blocksize=BLOCK)
            scales = found.absmax.view(scales_shape)
        else:  # a kernel of a GPU needs a value
            codes, scales = moment.to(torch.uint8), moment.new_empty(scales_shape)
        state[f"{name}_codes"] = _like(parameter, codes.view(moment.shape), parameter.shape[-1])
        state[f"{name}_scales"] = _like(parameter, scales, parameter.shape[-1] // BLOCK)


def _dequantise(state: dict[str, Any], parameter: nn.Parameter) -> None:
    """Put moments in the place of codes and scales, if there are any: before the first step there are none."""
    for name, signed in SIGNED.items():
        if f"{name}_codes" not in state:
            continue
        codes, scales = local(state.pop(f"{name}_codes")), local(state.pop(f"{name}_scales"))
        moment = scales.new_empty(codes.shape)
        if codes.numel():
            moment = _functions().dequantize_blockwise(
                codes.reshape(-1), absmax=scales.reshape(-1), code=_values(signed, codes.device), blocksize=BLOCK
            )
        state[name] = _like(parameter, moment.view(codes.shape), parameter.shape[-1])


def _like(parameter: nn.Parameter, shard: Tensor, width: int) -> Tensor:
    """Return a shard as a tensor that is sharded as the parameter is, and has `width` columns."""
    if not isinstance(parameter, DTensor):
        return shard
    shape = (*parameter.shape[:-1], width)
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(
        shard, parameter.device_mesh, parameter.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
