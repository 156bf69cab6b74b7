"""Reward models: a scalar head gives a response one score, at its last token; it is trained on preferences or on scores
that people gave. In a conversation whose turns were judged, each score is read where its turn ends, so the
conversation needs one forward pass.

    pair        −log σ(r₊ − r₋ − m) + c (r₊ + r₋)²
                Bradley and Terry 1952, as in Ouyang et al. 2022, eq. 1; m: the row's `margin` (Touvron et al. 2023,
                eq. 2); c keeps the scores near 0 (Eisenstein et al. 2023, eq. 6)
    binary      −y log σ(r) − (1 − y) log σ(−r)        y in [0, 1], the response's `reward`
    regression  (r − y)²

The loss is a mean over pairs, or over scored responses.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from ptf.data.batch import Batch
from ptf.data.document import PackUnit
from ptf.data.encode import encode_preference, encode_scored
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model.model import Model
from ptf.recipes.documents import document_weights, ends, pairs, values_at
from ptf.recipes.protocol import Metrics, Recipe
from ptf.recipes.rm.config import RMConfig


class RM(Recipe):
    """Reward models from pairs, binary judgements or scores; see the module's docstring."""

    config: RMConfig
    head: ClassVar[Literal["lm", "scalar"]] = "scalar"

    def encode(self, row: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> list[PackUnit]:
        """Encode a row as a pair of samples, or as a scored conversation. Raises UserError for a row without the
        numbers that the loss needs."""
        if self.config.loss_type != "pair":
            units = encode_scored(row, tokenizer, source)
            for (sample,) in units if self.config.loss_type == "binary" else ():
                invalid = [reward for reward in sample.token_columns["score"].tolist() if not 0 <= reward <= 1]
                if invalid:
                    raise UserError(f"algo.loss_type: binary needs a `reward` from 0 to 1, not {invalid[0]}")
            return units
        units = encode_preference(row, tokenizer, source)
        if not self.config.margin:
            return units
        margin = row.get("margin")
        if not isinstance(margin, int | float) or not np.isfinite(margin):
            raise UserError(f"algo.margin: a row needs a number `margin`, not {margin!r}")
        return [
            tuple(replace(s, token_columns={"margin": np.full(len(s), margin, np.float32)}) for s in unit)
            for unit in units
        ]

    def denominator(self, batch: Batch) -> Tensor:
        """Count the pairs or scored responses, by their weights."""
        counts = document_weights(batch)[pairs(batch)[0]] if self.config.loss_type == "pair" else batch.loss_weights
        return counts.sum(dtype=torch.float64)

    def loss(self, model: Model, batch: Batch, frozen_models: Mapping[str, Model]) -> tuple[Tensor, Metrics]:
        """Return the loss summed over pairs or responses, with the predicted score and accuracy."""
        scores = self.scores(model, batch)
        if self.config.loss_type == "pair":
            chosen, rejected = pairs(batch)
            gap, counts = scores[chosen] - scores[rejected], document_weights(batch)[chosen]
            margin = batch.token_columns["margin"].reshape(-1)[ends(batch)[chosen] - 1] if self.config.margin else 0.0
            losses = -logsigmoid(gap - margin) + self.config.center_coef * (scores[chosen] + scores[rejected]) ** 2
            correct, predicted = gap > 0, (scores[chosen] + scores[rejected]) / 2
            metrics = {"margin": (gap * counts).sum()}
        else:
            truth, counts = self.of_answers(batch, "score"), batch.loss_weights.flatten()[batch.trained_positions]
            losses = (
                binary_cross_entropy_with_logits(scores, truth, reduction="none")
                if self.config.loss_type == "binary"
                else (scores - truth) ** 2
            )
            correct, predicted = (scores > 0) == (truth > 0.5), scores
            metrics = {}
        if self.config.loss_type != "regression":
            metrics["accuracy"] = (correct * counts).sum()
        loss = (losses * counts).sum()
        metrics = {"loss": loss, "predicted_score": (predicted * counts).sum(), **metrics}
        return loss, {name: value.detach() for name, value in metrics.items()}

    @property
    def scores_are_logits(self) -> bool:
        """Whether its score is the log-odds of a probability, so that its calibration is measured."""
        return self.config.loss_type == "binary"

    def judgements(self, model: Model, batch: Batch) -> Tensor:
        """Return predicted scores, labels and lengths of the scored responses: [3, responses]."""
        columns = (self.of_answers(batch, name) for name in ("score", "answer_length"))
        return torch.stack([self.scores(model, batch), *columns])

    def of_answers(self, batch: Batch, name: str) -> Tensor:
        """Return the value of a column for each scored response, [responses]: `score`, the `reward` of its row, or
        `answer_length`, in tokens."""
        if len(batch.trained_positions) and "answer_length" not in batch.token_columns:
            raise UserError(
                "these tokenized data have no score at the end of each response: tokenize them again with this job"
            )
        return batch.token_columns.get(name, batch.loss_weights).flatten()[batch.trained_positions]

    def scores(self, model: Model, batch: Batch) -> Tensor:
        """Return the predicted scores in fp32: of each document of pairs, [documents], otherwise of each scored
        response, [responses]."""
        # weights are aligned with the targets
        positions = ends(batch) if self.config.loss_type == "pair" else batch.trained_positions + 1
        return values_at(model, batch, positions)
