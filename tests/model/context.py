"""Models of which ranks compute a part of each sequence, beside one rank: in fp64, where only rounding may differ, and
with mistakes of which each must show."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ptf.config.sections.compute import MeshSizes
from ptf.data.batch import Batch
from ptf.data.document import Document
from ptf.data.prefixes import pack_shared
from ptf.meshes import Meshes
from ptf.model import bridge, context_parallel
from ptf.model.head import Scalar
from ptf.model.tensor_parallel import exchange, summed
from tests.model.parallel import checkpoint
from tests.tiny import packed

EXACT = 1e-13
# query heads > key-value heads > 1: with 4 ranks two of them share a key-value head
FAMILIES: dict[str, Mapping[str, Any]] = {
    "qwen3": {},
    "gemma2": {},  # windows and soft-caps
    "gpt_oss": {},  # windows and sinks, experts
    "deepseek_v3": {},  # latent attention, experts
    "qwen2_moe": {},  # the balance of experts
    "qwen3_5_text": {  # gated delta
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
BALANCE = 0.01
# sequences of documents of these lengths, and the length of a sequence; 2 ranks cut 48 at 24, 4 at 12, 24 and 36
LAYOUTS: dict[str, tuple[list[list[int]], int]] = {
    "documents over every cut": ([[7, 7, 14, 20]], 48),
    "one document": ([[48]], 48),
    "short documents": ([[3, 5, 2, 7, 1, 9, 4, 6, 2, 8, 1]], 48),
    "two sequences": ([[20, 28], [31, 17]], 48),
    "an uneven end, and padding": ([[9, 30], [41]], 47),
}
PREFIX = "a shared prefix over a cut"


def layout(name: str) -> Batch:
    """The batch of a layout."""
    if name != PREFIX:
        sequences, width = LAYOUTS[name]
        return packed(sequences, width, seed=7)
    rng = np.random.default_rng(3)
    prompt, units = rng.integers(0, 131, 40), []
    for n in (5, 9, 3):
        tokens = np.concatenate([prompt, rng.integers(0, 131, n)]).astype(np.int32)
        units.append((Document(tokens, (np.arange(len(tokens)) >= len(prompt)).astype(np.float32)),))
    batch = Batch.of(pack_shared(units, 64), 64)
    assert max(batch.prefix_lengths) > 32
    return batch


def made(directory: Path, family: str) -> str:
    """Write a small model of a family whose heads four ranks divide."""
    return checkpoint(directory / family, family, **FAMILIES[family])


def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """The grouped product, of which torch has none in fp64: [n, k] × [groups, k, m], and [k, n] × [n, m]."""
    spans = [*pairwise([0, *offs.tolist()])]
    if b.dim() == 2:
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in spans])
    parts = [a[i:j] @ b[e] for e, (i, j) in enumerate(spans)]
    return torch.cat([*parts, a.new_zeros(len(a) - spans[-1][1], b.shape[-1])])


@dataclass(frozen=True)
class Step:
    """The loss of a batch, and the gradients of all parameters."""

    loss: float
    gradients: Mapping[str, Tensor]


def loss_of(x: Tensor, head: Any, batch: Batch) -> Tensor:
    """The loss in fp64: the cross-entropy of the rows of the vocabulary that all ranks have, of which each has the
    whole gradient of x; or the square of what a scalar head says at the trained tokens."""
    if isinstance(head, Scalar):
        return ((x @ head.weight.t()).squeeze(-1) ** 2 * batch.loss_weights).sum()

    def everywhere(t: Tensor) -> Tensor:
        return t if head.group is None else exchange(t, head.group, summed, lambda gradient, group: gradient)

    if head.group is not None:
        x = exchange(x, head.group, lambda t, group: t.clone(), summed)
    z = x @ head.weight.t()
    if head.softcap is not None:
        z = head.softcap * (z / head.softcap).tanh()
    z = z.masked_fill(torch.arange(z.shape[-1]) >= head.real, float("-inf"))  # a rank may have padding alone
    here = batch.targets - head.vocab_start
    mine = (here >= 0) & (here < head.real)
    picked = z.gather(-1, torch.where(mine, here, 0)[..., None]).squeeze(-1)
    picked = everywhere(torch.where(mine, picked, 0))
    return ((everywhere(z.exp().sum(-1)).log() - picked) * batch.loss_weights).sum()


def step(model: Any, batch: Batch, group: dist.ProcessGroup | None = None) -> Step:
    """The step of one rank, or of the ranks of a group, whose gradients are parts."""
    loss = batch.through(model, partial(loss_of, batch=batch))
    if (balance := model.load_balancing_loss()) is not None:
        loss = loss + BALANCE * balance * batch.loss_weights.sum()
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    gradients = {n: g.clone() for n, g in zip(names, found, strict=True) if g is not None}
    for gradient in gradients.values() if group is not None else ():
        dist.all_reduce(gradient, group=group)
    return Step(float(loss.detach()), gradients)


def apart(a: Step, b: Step) -> tuple[float, float]:
    """The relative difference of the losses; that of the gradients, its norm over theirs."""

    def norm(tensors: Iterator[Tensor]) -> float:
        return float(torch.cat([t.flatten() for t in tensors]).norm())

    assert a.gradients.keys() == b.gradients.keys()
    change = norm(a.gradients[n] - b.gradients[n] for n in a.gradients)
    return abs(a.loss - b.loss) / abs(a.loss), change / norm(iter(a.gradients.values()))


_swapped, own_slice, all_gather = context_parallel._swapped, context_parallel.own_slice, context_parallel.all_gather


def _strides_kept(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What a collective into a tensor made like one that is not contiguous finds: the numbers in another order."""
    return torch.as_strided(_swapped(x, group), x.shape, x.stride())


class _PositionsOfParts:
    """Cuts tokens, positions and segments, in this order, and begins the positions of each part at 0."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        self.calls += 1
        part = own_slice(x, group)
        return part - part[:, :1] if self.calls % 3 == 2 else part


def _of_rank_0(self: Any, rows: Tensor) -> Tensor:
    return rows.chunk(self.group.size())[0]


def _in_turn(self: Tensor, copies: int, dim: int) -> Tensor:
    return torch.cat([self] * copies, dim)


def _without(name: str) -> Callable[..., Any]:
    return lambda **values: SimpleNamespace(**{**values, name: None})


@dataclass(frozen=True)
class Mistake:
    """What is wrong, and a family that shows it."""

    family: str
    at: Any
    name: str
    wrong: Any
    least: int = 2  # ranks

    @contextmanager
    def made(self) -> Iterator[None]:
        with patch.object(self.at, self.name, self.wrong):
            yield


HERE = context_parallel
MISTAKES = {
    "no exchange": Mistake("qwen3", HERE, "_swapped", lambda x, group: x),
    "ranks in reverse order": Mistake("qwen3", HERE, "_swapped", lambda x, group: _swapped(x, group).flip(0)),
    "strides of a tensor that is not contiguous": Mistake("qwen3", HERE, "_swapped", _strides_kept),
    "key-value heads in turn, not in groups": Mistake("qwen3", Tensor, "repeat_interleave", _in_turn, least=4),
    "positions from 0 on each rank": Mistake("qwen3", HERE, "own_slice", _PositionsOfParts()),
    "the head's gradient summed": Mistake(
        "qwen3", HERE, "all_gather", lambda x, group, whole_gradient=False: all_gather(x, group)
    ),
    "sinks of rank 0": Mistake("gpt_oss", HERE.ContextAttend, "_own", _of_rank_0),
    "convolution of rank 0": Mistake("qwen3_5_text", HERE.ContextAttend, "_own", _of_rank_0),
    "window lost": Mistake("gemma2", HERE, "SimpleNamespace", _without("window")),
    "soft-cap lost": Mistake("gemma2", HERE, "SimpleNamespace", _without("softcap")),
    "gradients not summed": Mistake("qwen3", dist, "all_reduce", lambda tensor, **more: None),
    "balance of one rank": Mistake("qwen2_moe", HERE, "_sum_routings", lambda model, group: None),
    "a scalar head of each rank": Mistake("scalar", HERE, "_counted_once", lambda value, group: value),
}


Found = dict[tuple[str, str], tuple[float, float]]  # (family, layout or mistake) → what `apart` returns


def exact(directories: Mapping[str, str], ranks: int, layouts: Sequence[str]) -> Found:
    """What each of the ranks calls: for every family and layout, and for every mistake in the place of the layout, how
    far the ranks are from one rank."""
    F.grouped_mm = grouped_mm  # type: ignore[assignment]
    meshes, found = Meshes.of("cpu", MeshSizes(context=ranks)), Found()
    for family in [*directories, "scalar"]:
        directory = Path(directories["qwen3" if family == "scalar" else family])
        model = bridge.load(directory, head="scalar" if family == "scalar" else "lm").double()
        divided = deepcopy(model)
        context_parallel.context_parallel(divided, meshes)
        mistakes = {n: m for n, m in MISTAKES.items() if m.family == family and ranks >= m.least}
        for name in [*layouts, *mistakes]:
            if name == PREFIX and not model.supports_shared_prefixes:
                continue
            batch = layout(next(iter(layouts)) if name in mistakes else name)
            with mistakes[name].made() if name in mistakes else nullcontext():
                found[family, name] = apart(step(model, batch), step(divided, batch, meshes.context))
    return found
