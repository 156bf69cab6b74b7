"""A head over a catalogue, for models of events: `model.head: {use: "ptf.recipes.next_item:NextItem", args: {items: "prepare:items.safetensors"}}`.

The one idea: a class for each item and one for the end of a basket, whatever the vocabulary is. The order inside a basket means nothing, so with
`set_wise` every place in it is asked for all items that are still to come, alike; beside it the head may say numbers of the next basket.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ptf.data.baskets import STREAM
from ptf.data.encode import VALUE
from ptf.errors import UserError
from ptf.model.chunked import cross_entropy
from ptf.model.config import DecoderConfig
from ptf.model.head import Head
from ptf.model.layers import Parts


class NextItem(nn.Module):
    """`items`: safetensors with `ids` [items], each item's token, and `rows` [items, D], where its weights begin (ptf.data.events writes it).
    `set_wise`: ask for the rest of the basket, and not for the item that happens to come next. `sampled`: of the others, only so many are looked at in a
    step, drawn alike (Jean et al. 2015); default: all. `values`: what is said of the next basket beside its items, by the name that rows have for it,
    and how much the squared error of log(1 + value) counts: {days: 0.1}."""

    def __init__(
        self, config: DecoderConfig, parts: Parts, path: str, *, items: str, set_wise: bool = False, sampled: int | None = None,
        values: Mapping[str, float] = {},
    ) -> None:  # fmt: skip
        super().__init__()
        try:
            with safe_open(items, "pt") as stored:
                ids, rows = stored.get_tensor("ids"), stored.get_tensor("rows")
        except (OSError, SafetensorError) as error:
            raise UserError(f"model.head: {items} has no `ids` and `rows` (ptf.data.events writes it, where `ids: items`): {error}") from None
        if parts.lora is not None and parts.lora.adapts(f"{path}.items"):
            raise UserError("model.lora.targets: an adapter of head.items would train nothing, for the head reads its rows; leave it out")
        if int(ids.max()) >= config.vocab or rows.shape[1] != config.dim:
            raise UserError(
                f"model.head: {items} has rows of width {rows.shape[1]} and tokens up to {int(ids.max())}; the model is of width {config.dim}, with a "
                f"vocabulary of {config.vocab}"
            )
        if sampled is not None and not 0 < sampled < len(ids):
            raise UserError(f"model.head: sampled must be between 1 and {len(ids) - 1}, the items less one, not {sampled}")
        self.end, self.set_wise, self.sampled, self.values = len(ids), set_wise, sampled, dict(values)
        self.items = parts.linear(f"{path}.items", config.dim, len(ids) + 1)
        with torch.no_grad():
            self.items.weight[:-1] = rows
            self.items.weight[-1] = rows.mean(0)
        self.numbers = parts.linear(f"{path}.numbers", config.dim, len(self.values), bias=True) if self.values else None
        place = torch.full((config.vocab,), self.end)
        place[ids] = torch.arange(len(ids))
        self.register_buffer("place", place)  # [vocab]: the class of each token

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] → [B, T, items + 1 + values]: log-probs of each item and of the end of the basket, then the logs of 1 + each value."""
        scores = self.items(x).float().log_softmax(-1)
        return scores if self.numbers is None else torch.cat([scores, self.numbers(x).float()], -1)

    def logits(self, x: Tensor) -> Tensor:
        """[..., D] → [..., vocab]: a token that is no item has the logit of the basket's end, so they are for restricted answers alone."""
        return self.items(x).float()[..., self.place]

    def loss(self, x: Tensor, batch: Any) -> Tensor:
        place: Tensor = self.place  # type: ignore[assignment]
        classes, weight = place[batch.targets], self.items.weight
        if self.sampled is None or not torch.is_grad_enabled():  # held-out losses are exact
            loss = cross_entropy(x, Head(weight, self.end + 1), classes, batch.weights)
        else:
            loss = self._sampled(x, weight, classes, batch, self.sampled)
        if self.set_wise:
            rest = of_the_rest(weight[classes], batch)
            loss = loss + ((x * (weight[classes] - rest)).sum(-1).float() * batch.weights).sum()
        return loss + self._values(x, batch)

    def _sampled(self, x: Tensor, weight: Tensor, classes: Tensor, batch: Any, sampled: int) -> Tensor:
        """Cross-entropy whose normaliser is found from the target, the end, and some items alike for all places, drawn by the batch's own tokens."""
        kept = batch.weights != 0
        flat = batch.tokens.flatten().cpu()
        generator = torch.Generator().manual_seed(int((flat * torch.arange(1, len(flat) + 1)).sum()))  # other rows, or their order: another draw
        drawn = torch.randperm(self.end, generator=generator)[:sampled].to(x.device)
        x, targets = x[kept], classes[kept]
        own = (x * weight[targets]).sum(-1, keepdim=True).float()
        among = torch.cat([drawn, drawn.new_tensor([self.end])])
        others = (x @ weight[among].t()).float()
        share = others.new_full((len(among),), math.log(self.end / sampled))
        share[-1] = 0.0  # the end is always there
        others = (others + share).masked_fill(among == targets[:, None], -torch.inf)
        return ((torch.cat([own, others], -1).logsumexp(-1) - own[:, 0]) * batch.weights[kept]).sum()

    def _values(self, x: Tensor, batch: Any) -> Tensor:
        """½ (said − log(1 + value))², where a basket begins that has one."""
        if self.numbers is None or not (opens := openings(batch) & (batch.weights != 0)).any():
            return x.new_zeros((), dtype=torch.float32) + (0.0 if self.numbers is None else 0.0 * self.numbers(x[:, :1]).sum())
        said = self.numbers(x[opens]).float()
        total = 0.0 * said.sum()  # on every rank a part of the loss, whatever its rows say
        known = [stream.removeprefix(VALUE) for stream in batch.streams if stream.startswith(VALUE)]  # none in rows of another source
        for i, (name, counts) in enumerate(self.values.items() if known else ()):
            if name not in known:
                raise UserError(f"model.head: rows say no {name!r} of their baskets; they have {', '.join(sorted(known))}")
            wanted, there = batch.streams[VALUE + name][opens].unbind(-1)
            there = there != 0
            apart = said[there, i] - wanted[there].clamp(min=0).log1p()
            total = total + counts / 2 * (apart.square() * batch.weights[opens][there]).sum()
        return total


def openings(batch: Any) -> Tensor:
    """[B, T]: whether the next token is the first of a basket."""
    if STREAM not in batch.streams:
        return torch.zeros_like(batch.tokens, dtype=torch.bool)
    basket = batch.streams[STREAM][..., 0]  # of the token that follows
    first = batch.streams[STREAM][..., 1] == 0  # and not where a long row was cut
    return (basket > 0) & first & (basket != torch.nn.functional.pad(basket, (1, 0))[:, :-1])


def of_the_rest(rows: Tensor, batch: Any) -> Tensor:
    """[B, T, D] of the tokens that follow each place → at each place the mean over its token and those behind it in the same basket."""
    if STREAM not in batch.streams:
        if not batch.weights.any():
            return rows
        raise UserError("model.head: set_wise is for baskets, and these rows have none (`events` with lists in it)")
    basket = batch.streams[STREAM][..., 0].long()
    b, t = basket.shape
    key = torch.where(basket > 0, basket, 0) + (batch.segments + 1) * (int(basket.max()) + 1)
    begins = torch.ones_like(key, dtype=torch.bool)
    begins[:, 1:] = (key[:, 1:] != key[:, :-1]) | (basket[:, 1:] == 0)
    run = begins.flatten().cumsum(0) - 1  # which run of places each belongs to
    last = torch.zeros(int(run[-1]) + 1, dtype=torch.long, device=run.device).scatter_reduce(0, run, torch.arange(b * t, device=run.device), "amax")
    sums = torch.nn.functional.pad(rows.flatten(0, 1).double().cumsum(0), (0, 0, 1, 0))  # [B·T + 1, D]; what is subtracted again must not round
    here = torch.arange(b * t, device=run.device)
    ends = last[run] + 1
    return ((sums[ends] - sums[here]) / (ends - here)[:, None]).to(rows.dtype).view_as(rows)
