"""A head over a catalogue, for models of events.

It is chosen by `model.head: {use: "ptf.events.item_head:NextItem", args: {items: "prepare:items.safetensors"}}`.

There is one class for each item and one for the end of a basket; the size of the vocabulary does not matter. The order
inside a basket has no meaning, so with `set_wise` each position predicts all items that follow in its basket, with
equal weights. With `copy`, items that the customer had before gain what ptf.events.copy_term says. The head may also
predict numbers, such as the value, of the next basket.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ptf.data.baskets import BASKETS
from ptf.data.encode import VALUE
from ptf.errors import UserError
from ptf.events.copy_term import CopyTerm, OwnPairs, wide
from ptf.events.own_items import EventTokens, OwnItems, joined, openings, own_after, own_items
from ptf.model.chunked import CHUNK_BYTES, CUDA_CHUNK_BYTES, cross_entropy
from ptf.model.config import DecoderConfig
from ptf.model.head import Head
from ptf.model.layers import LayerFactory


class NextItem(nn.Module):
    """Scores of the next item, of the end of the basket, and of numbers of the next basket.

    `items` is a safetensors file that ptf.events.prepare writes: `ids` [items], each item's token; `rows` [items, D],
    the initial weights; `sold` [items], their purchases; `gaps` [gaps, 2], the tokens of gaps with their days; and
    `request_time`. With `set_wise`, the rest of the basket is predicted, not only the next item. With `copy`, own items
    have a copy term, and each item a bias, ½ log(1 + purchases) at first. `dropout` is the share of the states that the
    loss of training does without (Srivastava et al. 2014). `sampled` is the number of uniformly drawn items in the
    normaliser of the loss (Jean et al. 2015), by default all; own items are always in it. `values` maps the names of
    numbers in the rows that are to be predicted for the next basket to the weight of their loss, the squared error of
    log(1 + value): {days: 0.1}.
    """

    def __init__(
        self,
        config: DecoderConfig,
        factory: LayerFactory,
        path: str,
        *,
        items: str,
        set_wise: bool = False,
        copy: bool = False,
        dropout: float = 0.0,
        sampled: int | None = None,
        values: Mapping[str, float] = {},
    ) -> None:
        """Build the head. Raises UserError if the file does not fit the model."""
        super().__init__()
        try:
            with safe_open(items, "pt") as stored:
                ids, rows = stored.get_tensor("ids"), stored.get_tensor("rows")
                gaps = stored.get_tensor("gaps") if copy else torch.zeros(0, 2, device="cpu")
                sold = stored.get_tensor("sold") if copy else None
                request_time = copy and bool(stored.get_tensor("request_time"))
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"model.head: {items} is not what ptf.events.prepare writes with `ids: items`: {error}; "
                "prepare the data again"
            ) from None
        if factory.lora is not None and factory.lora.adapts(f"{path}.items"):
            raise UserError(
                "model.lora.targets: an adapter of head.items has no effect, because the head reads its weights; "
                "leave it out"
            )
        if int(ids.max()) >= config.vocab or rows.shape[1] != config.dim:
            raise UserError(
                f"model.head: {items} has rows of width {rows.shape[1]} and tokens up to {int(ids.max())}, but "
                f"the model has width {config.dim} and a "
                f"vocabulary of {config.vocab}"
            )
        if sampled is not None and not 0 < sampled < len(ids):
            raise UserError(
                f"model.head: sampled must be between 1 and {len(ids) - 1} (the number of items - 1), not {sampled}"
            )
        if not 0 <= dropout < 1:
            raise UserError(f"model.head: dropout must be a share of at least 0 and below 1, not {dropout}")
        self.end, self.set_wise, self.sampled, self.values = len(ids), set_wise, sampled, dict(values)
        self.dropout = dropout
        self.items = factory.linear(f"{path}.items", config.dim, len(ids) + 1)
        with torch.no_grad():
            self.items.weight[:-1] = rows
            self.items.weight[-1] = rows.mean(0)
        self.numbers = (
            factory.linear(f"{path}.numbers", config.dim, len(self.values), bias=True) if self.values else None
        )
        self.often = None
        if sold is not None:
            often = sold.float().log1p() / 2
            self.often = nn.Parameter(torch.cat([often, often.mean()[None]]))  # [items + 1]
        self.copy = CopyTerm(config.dim, len(ids), factory, f"{path}.copy") if copy else None
        place = torch.full((config.vocab,), self.end)
        place[ids] = torch.arange(len(ids))
        self.register_buffer("place", place)  # [vocab]: the class of each token; its name is part of stored models
        self.takes_contexts = copy
        item, days = np.full(config.vocab, -1), np.full(config.vocab, -1.0, np.float32)
        item[ids.numpy()] = np.arange(len(ids))
        days[gaps[:, 0].long().numpy()] = gaps[:, 1].numpy()
        self.meaning = EventTokens(item, days, request_time)

    def forward(self, x: Tensor, contexts: Sequence[np.ndarray] | None = None) -> Tensor:
        """Return log-probabilities and predicted numbers, [..., D] → [..., items + 1 + values].

        They are the log-probabilities of the items and of the end of the basket, then the predicted log(1 + value)s.
        With `copy`, `contexts` are those of `logits`.
        """
        scores = self._scores(x, contexts).log_softmax(-1)
        return scores if self.numbers is None else torch.cat([scores, wide(self.numbers(x))], -1)

    def logits(self, x: Tensor, contexts: Sequence[np.ndarray] | None = None) -> Tensor:
        """Return logits over the vocabulary, [..., D] → [..., vocab].

        With `copy`, x is [N, D], and `contexts` are the tokens up to each of its states, int32. Every token that is not
        an item has the logit of the basket's end, so the logits are valid only for responses that are restricted to
        items.
        """
        return self._scores(x, contexts)[..., cast("Tensor", self.place)]

    def _scores(self, x: Tensor, contexts: Sequence[np.ndarray] | None) -> Tensor:
        """Return the scores of the items and of the end, [..., items + 1]."""
        if self.copy is None:
            return wide(self.items(x))
        assert contexts is not None
        assert len(contexts) == len(x)
        own = [own_after(tokens, self.meaning) for tokens in contexts]
        items, base = self.copy.base(joined(own))
        states = torch.from_numpy(np.repeat(np.arange(len(own)), [len(one.items) for one in own]))
        return self._copied(x, OwnPairs(states.to(x.device), items, base))[0]

    def _copied(self, x: Tensor, pairs: OwnPairs) -> tuple[Tensor, Tensor]:
        """Return the scores of x [N, D] with the copy term, [N, items + 1], and what each pair gained, [pairs]."""
        assert self.copy is not None
        scores = wide(self.items(x)) + self._often(slice(None))
        gains = self.copy(x, scores[pairs.states, pairs.items], pairs)
        return scores.index_put((pairs.states, pairs.items), gains, accumulate=True), gains

    def _often(self, items: Tensor | slice) -> Tensor | float:
        """Return the biases of items."""
        return 0.0 if self.often is None else wide(self.often[items])

    def loss(self, x: Tensor, batch: Any) -> Tensor:
        """Return the summed loss of a batch, from hidden states [B, T, D]."""
        x = F.dropout(x, self.dropout, training=torch.is_grad_enabled())
        classes, weight = cast("Tensor", self.place)[batch.targets], self.items.weight
        sampled = self.sampled if torch.is_grad_enabled() else None  # held-out losses are exact
        if self.copy is not None:
            loss = self._copying_loss(x, weight, classes, batch, sampled)
        elif sampled is None:
            loss = cross_entropy(x, Head(weight, self.end + 1), classes, batch.loss_weights, batch.trained_positions)
        else:
            at = batch.trained_positions
            states, targets = x.flatten(0, 1)[at], classes.flatten()[at]
            loss = self._sampled_normaliser(states, targets, self._drawn(batch, sampled))
            loss = ((loss - wide((states * weight[targets]).sum(-1))) * batch.loss_weights.flatten()[at]).sum()
        if self.set_wise and self.copy is None:
            rows = weight[classes]
            rest = mean_over(rows.flatten(0, 1), ends_of_rests(batch)).view_as(rows)
            loss = loss + (wide((x * (rows - rest)).sum(-1)) * batch.loss_weights).sum()
        return loss + self._value_loss(x, batch)

    def _copying_loss(self, x: Tensor, weight: Tensor, classes: Tensor, batch: Any, sampled: int | None) -> Tensor:
        """Return the cross-entropy with the copy term, in chunks that are computed again in the backward pass."""
        assert self.copy is not None
        trained = batch.trained_positions
        own, *pairs_of = own_of_batch(batch, trained.cpu().numpy(), self.meaning)
        items, base = self.copy.base(own)
        here = torch.arange(classes.numel(), device=x.device)
        ends = ends_of_rests(batch) if self.set_wise else here + 1
        assert self.often is not None
        wanted = mean_over(torch.cat([weight, self.often[:, None]], 1)[classes].flatten(0, 1), ends)
        drawn = None if sampled is None else self._drawn(batch, sampled)
        width = weight.shape[1] + (self.end if drawn is None else len(drawn[0]))
        size = max(1, (CUDA_CHUNK_BYTES if x.is_cuda else CHUNK_BYTES) // (4 * width))
        bounds = np.searchsorted(pairs_of[0], np.arange(0, len(trained) + size + 1, size))  # of each chunk's pairs
        total = wide(x.new_zeros(()))
        for chunk, at in enumerate(trained.split(size)):
            pairs = slice(bounds[chunk], bounds[chunk + 1])
            index, owned, bought = (torch.from_numpy(part[pairs]).to(x.device) for part in pairs_of)
            index = index - chunk * size
            # an own item that the rest of the basket has is one of the `ends - at` that are wanted
            share = ((bought > at[index]) & (bought <= ends[at][index])) / (ends - here)[at][index]
            total = total + checkpoint(
                self._copying_chunk,
                x.flatten(0, 1)[at],
                wanted[at],
                OwnPairs(index, items[owned], base[owned]),
                share,
                batch.loss_weights.flatten()[at],
                None if drawn is None else (classes.flatten()[at], drawn),
                use_reentrant=False,
            )
        return total + 0.0 * torch.cat([p.flatten() for p in self.copy.parameters()]).sum()  # on a rank without rows

    def _copying_chunk(
        self,
        x: Tensor,
        wanted: Tensor,
        pairs: OwnPairs,
        share: Tensor,
        weights: Tensor,
        candidates: tuple[Tensor, tuple[Tensor, Tensor]] | None,
    ) -> Tensor:
        """Return the summed loss of states [n, D], whose wanted items have the mean row and bias `wanted` [n, D + 1],
        and which of them are own items the `share` [pairs] of each pair."""
        if candidates is None:
            scores, gains = self._copied(x, pairs)
            normaliser = scores.logsumexp(-1)
        else:
            assert self.copy is not None
            scores = wide((x[pairs.states] * self.items.weight[pairs.items]).sum(-1)) + self._often(pairs.items)
            gains = self.copy(x, scores, pairs)
            targets, drawn = candidates
            others = self._sampled_normaliser(x, targets, drawn, pairs)
            normaliser = torch.logaddexp(others, _logsumexp(scores + gains, pairs.states, len(x)))
        copied = torch.zeros_like(normaliser).index_add(0, pairs.states, gains * share)
        return ((normaliser - wide((x * wanted[:, :-1]).sum(-1) + wanted[:, -1]) - copied) * weights).sum()

    def _drawn(self, batch: Any, sampled: int) -> tuple[Tensor, Tensor]:
        """Return the candidates of a batch, `sampled` random items and the end, with the corrections of their scores.

        They are the same for all positions; the seed is computed from the batch's tokens.
        """
        flat = batch.tokens.flatten().cpu()
        # Different sequences, or the same sequences in a different order, give a different seed.
        generator = torch.Generator().manual_seed(int((flat * torch.arange(1, len(flat) + 1)).sum()))
        drawn = torch.randperm(self.end, generator=generator)[:sampled]
        correction = torch.full((sampled + 1,), math.log(self.end / sampled))
        correction[-1] = 0.0  # the end is always a candidate
        device = batch.tokens.device
        return torch.cat([drawn, drawn.new_tensor([self.end])]).to(device), correction.to(device)

    def _sampled_normaliser(
        self, x: Tensor, targets: Tensor, drawn: tuple[Tensor, Tensor], owned: OwnPairs | None = None
    ) -> Tensor:
        """Return the log of the normaliser over the targets [N] and the candidates, without those that are owned:
        [N]."""
        candidates, correction = drawn
        own = (wide((x * self.items.weight[targets]).sum(-1)) + self._often(targets))[:, None]
        others = wide(x @ self.items.weight[candidates].t()) + self._often(candidates) + correction
        others = others.masked_fill(candidates == targets[:, None], -torch.inf)
        if owned is not None:
            own = own.index_put((owned.states[owned.items == targets[owned.states]],), own.new_tensor([-torch.inf]))
            column = targets.new_full((self.end + 1,), len(candidates))  # of an item that is no candidate: one more
            column[candidates] = torch.arange(len(candidates), device=x.device)
            mask = torch.zeros(len(x), len(candidates) + 1, dtype=torch.bool, device=x.device)
            mask[owned.states, column[owned.items]] = True
            others = others.masked_fill(mask[:, :-1], -torch.inf)
        return torch.cat([own, others], -1).logsumexp(-1)

    def _value_loss(self, x: Tensor, batch: Any) -> Tensor:
        """Return Σ ½ (prediction − log(1 + value))² over the positions before a basket that has a value."""
        if self.numbers is None or not (starts := basket_starts(batch) & (batch.loss_weights != 0)).any():
            return x.new_zeros((), dtype=torch.float32) + (
                0.0 if self.numbers is None else 0.0 * self.numbers(x[:, :1]).sum()
            )
        predicted = wide(self.numbers(x[starts]))
        total = 0.0 * predicted.sum()  # so that every rank has a gradient, even if its sequences have no values
        # Rows of some sources may have no values.
        known = [stream.removeprefix(VALUE) for stream in batch.token_columns if stream.startswith(VALUE)]
        for i, (name, counts) in enumerate(self.values.items() if known else ()):
            if name not in known:
                raise UserError(
                    f"model.head: rows have no value {name!r} for their baskets; they have {', '.join(sorted(known))}"
                )
            target, present = batch.token_columns[VALUE + name][starts].unbind(-1)
            present = present != 0
            error = predicted[present, i] - target[present].clamp(min=0).log1p()
            total = total + counts / 2 * (error.square() * batch.loss_weights[starts][present]).sum()
        return total


def basket_starts(batch: Any) -> Tensor:
    """Return whether the next token is the first of a basket, [B, T]."""
    if BASKETS not in batch.token_columns:
        return torch.zeros_like(batch.tokens, dtype=torch.bool)
    basket = batch.token_columns[BASKETS][..., 0]  # number of the next token's basket
    # a basket's first event; false where a cut row continues a basket
    first = batch.token_columns[BASKETS][..., 1] == 0
    return (basket > 0) & first & (basket != F.pad(basket, (1, 0))[:, :-1])


def ends_of_rests(batch: Any) -> Tensor:
    """Return, for each position of [B · T], the position after the last that predicts an item of the same basket: the
    items that are still to come are those that the positions from this one to there predict."""
    here = torch.arange(batch.tokens.numel(), device=batch.tokens.device)
    if BASKETS not in batch.token_columns:
        if not batch.loss_weights.any():
            return here + 1
        raise UserError(
            "model.head: set_wise needs baskets (lists inside `events`), but these rows have none; turn it off"
        )
    basket = batch.token_columns[BASKETS][..., 0].long()
    key = torch.where(basket > 0, basket, 0) + (batch.segments + 1) * (int(basket.max()) + 1)
    begins = torch.ones_like(key, dtype=torch.bool)
    begins[:, 1:] = (key[:, 1:] != key[:, :-1]) | (basket[:, 1:] == 0)
    run = begins.flatten().cumsum(0) - 1  # the run of positions that each position belongs to
    last = torch.zeros(int(run[-1]) + 1, dtype=torch.long, device=run.device).scatter_reduce(0, run, here, "amax")
    return last[run] + 1


def mean_over(rows: Tensor, ends: Tensor) -> Tensor:
    """Return for each of [n] positions the mean of the rows [n, D] from it to before `ends`, [n, D]."""
    here = torch.arange(len(rows), device=rows.device)
    # [n + 1, D] in float64, to keep the rounding of the differences small
    sums = F.pad(rows.double().cumsum(0), (0, 0, 1, 0))
    return ((sums[ends] - sums[here]) / (ends - here)[:, None]).to(rows.dtype)


def own_of_batch(
    batch: Any, trained: np.ndarray, meaning: EventTokens
) -> tuple[OwnItems, np.ndarray, np.ndarray, np.ndarray]:
    """Return the own items at the openings of the baskets of trained positions, and the pairs of position and item.

    Of each pair: which of the trained positions, which of the own items, and the index in [B · T] of the item's token
    in that basket, −1 if it has none; [pairs] int64 each, by position. Items that the basket has already are in none.
    """
    if any(batch.prefix_lengths):
        raise UserError("model.head: copy reads whole histories; set data.share_prefixes: false")
    tokens, segments = (t.flatten().cpu().numpy() for t in (batch.tokens, batch.segments))
    bounds = np.flatnonzero(np.diff(segments, prepend=-2, append=-2))
    parts, which, bought, known = list[OwnItems](), [np.zeros(0, np.int64)], list[int](), 0
    for first, last in itertools.pairwise(bounds):
        at = trained[np.searchsorted(trained, first) : np.searchsorted(trained, last)] - first
        if not len(at):
            continue
        document = tokens[first:last]
        of = openings(document, meaning)
        wanted = np.unique(of[at][of[at] >= 0])
        own = own_items(document, meaning, wanted)
        which.append(np.where(of[at] >= 0, known + np.searchsorted(wanted, of[at]), -1))
        opened = np.repeat(wanted, np.diff(own.ends, prepend=0))  # of each own item
        tokens_of = zip(of.tolist(), meaning.item[document].tolist(), range(first, last), strict=True)
        at_token = {(basket, item): n for basket, item, n in reversed([*tokens_of])}  # the first of each
        bought += [at_token.get(pair, -1) for pair in zip(opened.tolist(), own.items.tolist(), strict=True)]
        known += len(wanted)
        parts.append(own)
    items = joined(parts)
    states, place = _pairs(items.ends, np.concatenate(which))
    when = np.array(bought, np.int64)[place]
    left = (when < 0) | (when > trained[states])
    return items, states[left], place[left], when[left]


def _pairs(ends: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for states whose own items are those of position `which` (−1: none) the pairs: the index of the state and
    the index of the own item, both [pairs]."""
    starts, ends = np.append(np.concatenate([[0], ends[:-1]]), 0), np.append(ends, 0)  # [-1]: none
    counts = (ends - starts)[which]
    states = np.repeat(np.arange(len(which)), counts)
    return states, np.arange(len(states)) + np.repeat(starts[which] - np.cumsum(counts) + counts, counts)


def _logsumexp(values: Tensor, states: Tensor, count: int) -> Tensor:
    """Return log Σ exp of the values [pairs] of each of `count` states; of none about −1e30."""
    top = values.new_full((count,), -1e30).scatter_reduce(0, states, values.detach(), "amax")
    return top + torch.zeros_like(top).index_add(0, states, (values - top[states]).exp()).clamp(min=1e-30).log()
