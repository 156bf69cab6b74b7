"""Compilation before the first step. On a GPU, FlexAttention is compiled for each shape of a batch, with gradients and
without; so are norms, gates and rotary embeddings (`train.compile`). A pass over documents of token 0 compiles what the
run needs, so no step and no validation is longer than the others, and a shape that cannot be compiled ends the run at
its start.
"""

import time
from collections.abc import Iterable
from itertools import product

import torch
from torch import Tensor

from ptf.compute.world import World
from ptf.model.kernels.fused import varlen_of
from ptf.model.model import Model
from ptf.train.trainer import discard_gradients, forget_forwards


def in_passes(sequences: int, micro_batch_sequences: int) -> set[int]:
    """Return the numbers of sequences that the passes of a step with `sequences` of them have."""
    return {min(sequences, micro_batch_sequences), sequences % micro_batch_sequences} - {0}


def warm_up(
    model: Model,
    world: World,
    seq_len: int,
    *,
    trained: Iterable[int] = (),
    scored: Iterable[int] = (),
    share_prefixes: bool = False,
) -> None:
    """Run a pass for each shape of batch of a run, on a GPU; on a CPU, and in models of transformers, attention is not
    compiled.

    `trained` and `scored` are the numbers of sequences in a pass with gradients, and in a pass without. With
    `share_prefixes`, the attention of documents that share a prefix is compiled as well, where it is another one
    (kernels/fused.py). Weights, buffers and gradients are as before.
    """
    if world.device.type == "cuda" and model.supports_compilation:
        began = time.perf_counter()
        held = [buffer.clone() for buffer in model.buffers()]
        both = (False, True) if share_prefixes and model.kernels.flash is not None else (False,)
        for sequences, shared in product(trained, both):
            result = _forward(model, world, sequences, seq_len, shared)
            if result.requires_grad:  # otherwise the head alone trains
                result.backward()
            discard_gradients(model)
        with torch.no_grad():
            for sequences, shared in product(scored, both):
                _forward(model, world, sequences, seq_len, shared)
            for buffer, before in zip(model.buffers(), held, strict=True):  # of components of the user's own
                buffer.copy_(before)
        forget_forwards(model)
        if world.leads:
            print(f"compiled for sequences of {seq_len} tokens in {time.perf_counter() - began:.0f} s", flush=True)


def _forward(model: Model, world: World, sequences: int, seq_len: int, shared: bool) -> Tensor:
    """Return a number that depends on all layers, in sequences that hold one document each; `shared`: with the
    attention of documents that share a prefix."""
    tokens = torch.zeros(sequences, seq_len, dtype=torch.int64, device=world.device)
    positions = torch.arange(seq_len, device=world.device).expand_as(tokens).contiguous()
    segments = torch.arange(sequences, device=world.device)[:, None].expand_as(tokens).contiguous()
    varlen = varlen_of(segments, positions)._replace(shares_prefix=True) if shared else None
    return model(tokens, positions, segments, lambda hidden, _: hidden.float().sum(), varlen=varlen)
