"""What a loss over logits works in: the output projection is applied to hidden states chunk by chunk, gives log-probs,
and takes the gradients of logits back.

The same few buffers serve every chunk, and everything after the GEMM happens in them in place, on a CPU a block of
rows at a time, which its cache holds from the logits to their gradients. With 16 bits on CUDA,
the GEMMs themselves give logits and add up the head's gradient in fp32 (`sums_in_fp32`); on a CPU they round, and fp32
comes after them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ptf.model.head import Head, sums_in_fp32
from ptf.model.sampling import NEVER, NO_LOGITS_PROCESSING, ROUNDING, LogitsProcessing, nucleus, restrict

# logits of a thread that are a block on a CPU: its cache holds them. Probabilities that entropies are summed over at a
# time are as many; on CUDA they are an eighth of a chunk, which keeps the buffer small, and each of their kernels takes
# about ten times as long as its launch
BLOCK_BYTES = 1 << 20
CUDA_BLOCK_BYTES = 128 << 20
# logits whose nucleus is found at a time: it takes about ten times their memory
NUCLEUS_BYTES = 64 << 20
# rows of a 16-bit head's gradient that a CPU multiplies and adds at a time: its caches hold them
BLOCK = 4096
# the least log-prob on a CPU: a GEMM over denormals took 40 times as long, and e⁻⁶⁴ is lost in any fp32 sum
FLOOR = -64.0


def summed(value: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over the ranks of the group, in place; without a group return the value unchanged."""
    if group is not None:
        dist.all_reduce(value, group=group)
    return value


def blocks(values: Tensor, size: int) -> list[slice]:
    """Return the blocks of rows of fp32 values [n, V] that take at most `size` bytes, or one row each."""
    few = max(1, size // (4 * values.shape[1]))
    return [slice(i, min(i + few, len(values))) for i in range(0, len(values), few)]


def columns_of(ids: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Return the columns of tokens in this rank's part of the vocabulary and 1; any column and 0 where another rank has
    a token."""
    here = ids - head.vocab_start
    at = here if head.group is None else here.clamp(0, len(head.weight) - 1)
    return at, (here == at).float()


def rows_of_a_block(columns: int) -> int:
    """Return how many rows of logits the caches of a CPU's threads hold, at least one each."""
    return torch.get_num_threads() * max(1, BLOCK_BYTES // (4 * columns))


@dataclass(frozen=True, slots=True)
class Tiles:
    """Positions in chunks of `size`, whose logits one GEMM computes, and each chunk in blocks of `rows`.

    Iteration yields the blocks.
    """

    positions: int
    size: int
    rows: int

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, self.positions, self.size):
            stop = min(start + self.size, self.positions)
            yield from (slice(i, min(i + self.rows, stop)) for i in range(start, stop, self.rows))


class LossWorkspace:
    """The buffers of a head that is applied to x [N, D] chunk by chunk, and the gradients that come back.

    `targets` [N] are the tokens that are measured, and `trie_states` [N, 1 + k] those of the trie `processing.edges`.
    The blocks of `tiles` are taken once each, in their order: the first of a chunk computes the chunk's logits, the
    last one adds the chunk's gradients.

    Its buffers are made once: on a CPU, the page faults of a fresh 64 MiB cost as much as two passes over it (28 ms
    against 10 ms for a copy).
    """

    def __init__(
        self,
        x: Tensor,
        head: Head,
        tiles: Tiles,
        processing: LogitsProcessing = NO_LOGITS_PROCESSING,
        targets: Tensor | None = None,
        trie_states: Tensor | None = None,
        needs: tuple[bool, ...] = (False, False, False),
    ) -> None:
        if processing.top_p < 1 and head.group is not None:
            raise NotImplementedError(
                "nucleus sampling (rollout.top_p) does not work with a head that is sharded over ranks: "
                "set compute.mesh.tensor_parallel_size and context_parallel_size to 1"
            )
        if processing.edges is not None and trie_states is None and len(x):
            raise ValueError(
                "rollout.constrained_decoding is set, but no `trie_states` were given: pass "
                "batch.token_columns['trie_states']"
            )
        self.x, self.head, self.processing, self.targets, self.trie_states = x, head, processing, targets, trie_states
        self.edges = None if processing.edges is None else processing.edges.to(x.device)
        if targets is not None:
            self.at, self.counts = columns_of(targets, head)
        # of every position, after all blocks (`nucleus`); 0 without a nucleus
        self.slack = torch.zeros(len(x), dtype=torch.float32, device=x.device)
        self.tiles, self.chunk = tiles, slice(0, 0)  # the chunk whose logits the buffer holds,
        self.place = slice(0, 0)  # and in it the rows of the block that was taken last
        size, rows = min(tiles.size, len(x)), len(head.weight)
        self.fused = sums_in_fp32(x)
        # what the GEMMs read and write; where they write logits in fp32, they read gradients only
        self.narrow = x.new_empty(size if any(needs) or not self.fused else 0, rows)
        # whether one kernel can compute the loss: nothing changes the logits, and no other rank has a part of them
        changed = head.softcap is not None or head.bias is not None or head.group is not None
        self.fuses_loss = self.fused and not changed and processing is NO_LOGITS_PROCESSING and len(self.narrow) > 0
        self.rows = size if self.fused else min(tiles.rows, size)
        # of a block's logits in fp32
        self.wide = self.narrow if x.dtype == torch.float32 else x.new_empty(self.rows, rows, dtype=torch.float32)
        self.spare: Tensor | None = None  # a block of probabilities
        self.slope = self.new_block() if head.softcap is not None and any(needs) else None
        sums = torch.promote_types(x.dtype, torch.float32)
        self.dx = torch.empty_like(x) if needs[0] else None
        # the first chunk overwrites it, where GEMMs sum in its dtype
        fresh = torch.empty_like if len(x) and sums == x.dtype else torch.zeros_like
        self.dweight = fresh(head.weight, dtype=sums) if needs[1] else None
        self.dbias = torch.zeros_like(head.bias, dtype=sums) if needs[2] and head.bias is not None else None

    def new_block(self) -> Tensor:
        """Return an uninitialised tensor for a block of logits, fp32 [rows, V]."""
        return torch.empty_like(self.wide[: self.rows])

    def measure(self, weights: Tensor | None = None, *, entropies: bool = True) -> tuple[Tensor, ...]:
        """Return the targets' log-probs, and with `entropies` the entropies and the slacks, fp32 [N] each; with
        `weights` [N], add the gradients of −Σ weights · log-prob."""
        head, picked = self.head, torch.empty(len(self.x), dtype=torch.float32, device=self.x.device)
        entropy = torch.empty_like(picked)
        for block in self.tiles:
            if weights is not None and not entropies and self.fuses_loss:
                logits = self._logits(block)
                out = self.narrow[self.place]
                picked[block] = head.kernels.loss_of_rows(logits, self.at[block], weights[block], out)
                self._add_after(block)
                continue
            logprobs = self.logprobs(block)
            picked[block] = logprobs.gather(1, self.at[block, None]).squeeze(1) * self.counts[block]
            if entropies:
                entropy[block] = self.entropies(logprobs, leave_probabilities=weights is not None)
            elif weights is not None:
                self.probabilities(logprobs, out=logprobs)
            if weights is not None:
                self.accumulate(block, self.subtract_targets(block, logprobs), weights[block])
        picked = summed(picked, head.group)
        return (picked, summed(entropy, head.group), self.slack) if entropies else (picked,)

    def subtract_targets(self, block: slice, values: Tensor) -> Tensor:
        """Subtract 1 at each target of `values` [n, V], in place."""
        return values.scatter_add_(1, self.at[block, None], -self.counts[block, None])

    def logprobs(self, block: slice) -> Tensor:
        """Return the log-probs of a block, fp32 [n, V], of the distribution that is sampled from.

        They lie in a buffer that a later block overwrites.
        """
        logprobs, group = self._logits(block), self.head.group
        if group is None:
            torch.log_softmax(logprobs, -1, out=logprobs)
        else:
            here = logprobs.logsumexp(-1)  # [n]
            most = here.clone()
            dist.all_reduce(most, dist.ReduceOp.MAX, group)
            logprobs.sub_((most + summed((here - most).exp_(), group).log_())[:, None])
        if self.processing.top_p < 1:
            drawn, slack = None if self.targets is None else self.targets[block], self.slack[block]
            for part in blocks(logprobs, NUCLEUS_BYTES):
                of_part = None if drawn is None else drawn[part]
                slack[part] = nucleus(logprobs[part], self.processing.top_p, of_part, ROUNDING[self.x.dtype])
        return logprobs

    def _logits(self, block: slice) -> Tensor:
        """Return the logits of a block, fp32 [n, V], as they are sampled from, in the buffer."""
        head, n = self.head, block.stop - block.start
        if not self.chunk.start <= block.start < self.chunk.stop:  # the first of a chunk
            self.chunk = slice(block.start, min(block.start + self.tiles.size, self.tiles.positions))
            x = self.x[self.chunk]
            if self.fused:
                torch.mm(x, head.weight.t(), out_dtype=torch.float32, out=self.wide[: len(x)])
            else:
                head.kernels.multiply(x, head.weight.t(), self.narrow[: len(x)])
        self.place = slice(block.start - self.chunk.start, block.stop - self.chunk.start)
        if self.fused or self.wide is self.narrow:
            logits = self.wide[self.place]
        else:
            logits = self.wide[:n].copy_(self.narrow[self.place])
        if head.bias is not None:
            logits += head.bias
        if head.softcap is not None:
            logits.div_(head.softcap).tanh_()
            if self.slope is not None:
                torch.mul(logits, logits, out=self.slope[:n]).neg_().add_(1)
        scale = (head.softcap or 1.0) / self.processing.temperature
        if scale != 1.0:
            logits *= scale
        if self.edges is not None and self.trie_states is not None:
            restrict(logits, self.trie_states[block], self.edges, head.vocab_start)
        logits[:, head.real :] = NEVER
        return logits

    def probabilities(self, logprobs: Tensor, out: Tensor) -> Tensor:
        """Write the probabilities of `logprobs` to `out`, which may be `logprobs`, and return it."""
        floored = torch.clamp(logprobs, min=FLOOR, out=out) if out.device.type == "cpu" else logprobs
        torch.exp(floored, out=out)
        out[:, self.head.real :] = 0
        return out

    def entropies(self, logprobs: Tensor, *, leave_probabilities: bool) -> Tensor:
        """Return this rank's part of the entropy of each row [n].

        Afterwards the buffer holds the log-probs, or the probabilities if `leave_probabilities`: they are computed
        anyway.
        """
        parts = blocks(logprobs, CUDA_BLOCK_BYTES if logprobs.device.type == "cuda" else BLOCK_BYTES)
        if self.spare is None:  # the first block is the largest
            self.spare = torch.empty_like(logprobs[parts[0]])
        entropies = logprobs.new_empty(len(logprobs))
        for block in parts:
            part = logprobs[block]
            p = self.probabilities(part, out=self.spare[: len(part)])
            entropies[block] = -(part.mul_(p) if leave_probabilities else p.mul_(part)).sum(-1)
            if leave_probabilities:
                part.copy_(p)
        return entropies

    def accumulate(self, block: slice, grad: Tensor, weights: Tensor) -> None:
        """Add a block's contribution to the gradients.

        `grad` [n, V] is the gradient with respect to the logits divided by the temperature, not yet weighted. It is the
        buffer of `logprobs`, and is overwritten.
        """
        weights, out = (weights / self.processing.temperature)[:, None], self.narrow[self.place]
        if self.fused and self.slope is None and self.dbias is None:
            torch.mul(grad, weights, out=out)  # one pass, where a CPU would make a copy of its own
        else:
            grad.mul_(weights)
            if self.slope is not None:
                grad *= self.slope[: len(grad)]
            if self.dbias is not None:
                self.dbias += grad.sum(0)
            if self.wide is not self.narrow:
                out.copy_(grad)
        self._add_after(block)

    def _add_after(self, block: slice) -> None:
        """Add the contribution of a chunk, of the gradient with respect to the output of the matrix product, after its
        last block."""
        if block.stop != self.chunk.stop:
            return
        chunk, grad = self.chunk, self.narrow[: self.chunk.stop - self.chunk.start]
        if self.dx is not None:
            self.head.kernels.multiply(grad, self.head.weight, self.dx[chunk])
        if self.dweight is None:
            return
        if self.dweight.dtype == grad.dtype:
            self.head.kernels.multiply(grad.t(), self.x[chunk], self.dweight, add=chunk.start > 0)
        elif self.fused:
            torch.addmm(self.dweight, grad.t(), self.x[chunk], out_dtype=torch.float32, out=self.dweight)
        else:
            for i in range(0, len(self.dweight), BLOCK):
                self.dweight[i : i + BLOCK] += grad[:, i : i + BLOCK].t() @ self.x[chunk]

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of x, the weight and the bias, each in the dtype of its tensor; None where none is
        needed."""
        weight, bias = self.dweight, self.dbias
        return (
            None if self.dx is None else summed(self.dx, self.head.group),
            None if weight is None else weight.to(self.head.weight.dtype),
            None if bias is None or self.head.bias is None else bias.to(self.head.bias.dtype),
        )
