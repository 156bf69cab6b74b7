"""A head over a catalogue, for models of events.

It is chosen by `model.head: {use: "ptf.events.item_head:NextItem", args: {items: "prepare:items.safetensors"}}`.

There is one class for each item and one for the end of a basket; the size of the vocabulary does not matter. The order
inside a basket has no meaning, so with `set_wise` each position predicts all items that follow in its basket, with
equal weights. The head may also predict numbers, such as the value, of the next basket.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ptf.data.baskets import BASKETS
from ptf.data.encode import VALUE
from ptf.errors import UserError
from ptf.model.chunked import cross_entropy
from ptf.model.config import DecoderConfig
from ptf.model.head import Head
from ptf.model.layers import LayerFactory


class NextItem(nn.Module):
    """Scores of the next item, of the end of the basket, and of numbers of the next basket.

    `items` is a safetensors file with `ids` [items], each item's token, and `rows` [items, D], the initial weights
    (ptf.events.prepare writes it). With `set_wise`, the rest of the basket is predicted, not only the next item.
    `sampled` is the number of uniformly drawn items in the normaliser of the loss (Jean et al. 2015), by default all.
    `values` maps the names of numbers in the rows that are to be predicted for the next basket to the weight of their
    loss, the squared error of log(1 + value): {days: 0.1}.
    """

    def __init__(
        self,
        config: DecoderConfig,
        factory: LayerFactory,
        path: str,
        *,
        items: str,
        set_wise: bool = False,
        sampled: int | None = None,
        values: Mapping[str, float] = {},
    ) -> None:
        """Build the head. Raises UserError if the file does not fit the model."""
        super().__init__()
        try:
            with safe_open(items, "pt") as stored:
                ids, rows = stored.get_tensor("ids"), stored.get_tensor("rows")
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"model.head: {items} has no `ids` and `rows` (ptf.events.prepare writes it with `ids: items`): {error}"
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
        self.end, self.set_wise, self.sampled, self.values = len(ids), set_wise, sampled, dict(values)
        self.items = factory.linear(f"{path}.items", config.dim, len(ids) + 1)
        with torch.no_grad():
            self.items.weight[:-1] = rows
            self.items.weight[-1] = rows.mean(0)
        self.numbers = (
            factory.linear(f"{path}.numbers", config.dim, len(self.values), bias=True) if self.values else None
        )
        place = torch.full((config.vocab,), self.end)
        place[ids] = torch.arange(len(ids))
        self.register_buffer("place", place)  # [vocab]: the class of each token; its name is part of stored models

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities and predicted numbers, [B, T, D] → [B, T, items + 1 + values].

        They are the log-probabilities of the items and of the end of the basket, then the predicted log(1 + value)s.
        """
        scores = self.items(x).float().log_softmax(-1)
        return scores if self.numbers is None else torch.cat([scores, self.numbers(x).float()], -1)

    def logits(self, x: Tensor) -> Tensor:
        """Return logits over the vocabulary, [..., D] → [..., vocab].

        Every token that is not an item has the logit of the basket's end, so the logits are valid only for responses
        that are restricted to items.
        """
        return self.items(x).float()[..., self.place]

    def loss(self, x: Tensor, batch: Any) -> Tensor:
        """Return the summed loss of a batch, from hidden states [B, T, D]."""
        classes, weight = cast("Tensor", self.place)[batch.targets], self.items.weight
        if self.sampled is None or not torch.is_grad_enabled():  # held-out losses are exact
            loss = cross_entropy(x, Head(weight, self.end + 1), classes, batch.loss_weights, batch.trained_positions)
        else:
            loss = self._sampled_loss(x, weight, classes, batch, self.sampled)
        if self.set_wise:
            rest = mean_over_rest(weight[classes], batch)
            loss = loss + ((x * (weight[classes] - rest)).sum(-1).float() * batch.loss_weights).sum()
        return loss + self._value_loss(x, batch)

    def _sampled_loss(self, x: Tensor, weight: Tensor, classes: Tensor, batch: Any, sampled: int) -> Tensor:
        """Return the cross-entropy with a normaliser over the target, the end, and `sampled` random items.

        The items are the same for all positions; the seed is computed from the batch's tokens.
        """
        trained = batch.trained_positions
        flat = batch.tokens.flatten().cpu()
        # Different sequences, or the same sequences in a different order, give a different seed.
        generator = torch.Generator().manual_seed(int((flat * torch.arange(1, len(flat) + 1)).sum()))
        drawn = torch.randperm(self.end, generator=generator)[:sampled].to(x.device)
        x, targets = x.flatten(0, 1)[trained], classes.flatten()[trained]
        own = (x * weight[targets]).sum(-1, keepdim=True).float()
        candidates = torch.cat([drawn, drawn.new_tensor([self.end])])
        others = (x @ weight[candidates].t()).float()
        correction = others.new_full((len(candidates),), math.log(self.end / sampled))
        correction[-1] = 0.0  # the end is always a candidate
        others = (others + correction).masked_fill(candidates == targets[:, None], -torch.inf)
        return ((torch.cat([own, others], -1).logsumexp(-1) - own[:, 0]) * batch.loss_weights.flatten()[trained]).sum()

    def _value_loss(self, x: Tensor, batch: Any) -> Tensor:
        """Return Σ ½ (prediction − log(1 + value))² over the positions before a basket that has a value."""
        if self.numbers is None or not (starts := basket_starts(batch) & (batch.loss_weights != 0)).any():
            return x.new_zeros((), dtype=torch.float32) + (
                0.0 if self.numbers is None else 0.0 * self.numbers(x[:, :1]).sum()
            )
        predicted = self.numbers(x[starts]).float()
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
    return (basket > 0) & first & (basket != torch.nn.functional.pad(basket, (1, 0))[:, :-1])


def mean_over_rest(rows: Tensor, batch: Any) -> Tensor:
    """Return, for each position, the mean vector of the rest of its basket, [B, T, D].

    `rows` has the vector of the next token at each position. The mean is over the next token and the tokens after it in
    the same basket.
    """
    if BASKETS not in batch.token_columns:
        if not batch.loss_weights.any():
            return rows
        raise UserError(
            "model.head: set_wise needs baskets (lists inside `events`), but these rows have none; turn it off"
        )
    basket = batch.token_columns[BASKETS][..., 0].long()
    b, t = basket.shape
    key = torch.where(basket > 0, basket, 0) + (batch.segments + 1) * (int(basket.max()) + 1)
    begins = torch.ones_like(key, dtype=torch.bool)
    begins[:, 1:] = (key[:, 1:] != key[:, :-1]) | (basket[:, 1:] == 0)
    run = begins.flatten().cumsum(0) - 1  # the run of positions that each position belongs to
    last = torch.zeros(int(run[-1]) + 1, dtype=torch.long, device=run.device).scatter_reduce(
        0, run, torch.arange(b * t, device=run.device), "amax"
    )
    # [B·T + 1, D] in float64, to keep the rounding of the differences small
    sums = torch.nn.functional.pad(rows.flatten(0, 1).double().cumsum(0), (0, 0, 1, 0))
    here = torch.arange(b * t, device=run.device)
    ends = last[run] + 1
    return ((sums[ends] - sums[here]) / (ends - here)[:, None]).to(rows.dtype).view_as(rows)
