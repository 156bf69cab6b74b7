"""Learning from preferences without a reward model; the reward is the policy's log-prob relative to a reference's.

    Δ  = log π(y₊|x)/π_ref(y₊|x) − log π(y₋|x)/π_ref(y₋|x)    sums over the tokens of a response
    sigmoid  −(1 − ε) log σ(β Δ) − ε log σ(−β Δ)
             DPO (Rafailov et al. 2023, eq. 7); ε: conservative DPO (Mitchell 2023, eq. 3)
    ipo      (Δ − 1/(2β))²
             IPO (Azar et al. 2023, eq. 17)
    simpo    −log σ(β (log π(y₊|x)/|y₊| − log π(y₋|x)/|y₋|) − γ)
             SimPO (Meng et al. 2024, eq. 6); no reference

With `length_normalised`, the first two take means over the tokens of a response instead of sums. The loss is a mean
over pairs.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, assert_never

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ptf.data.batch import Batch
from ptf.data.document import PackUnit
from ptf.data.encode import encode_preference
from ptf.data.tokenizer import Tokenizer
from ptf.model.chunked import sampled_from, token_logprobs
from ptf.model.lora import adapters_off
from ptf.model.model import Model
from ptf.recipes.documents import document_weights, pairs, sums
from ptf.recipes.dpo.config import DPOConfig
from ptf.recipes.protocol import FrozenModelSpec, Metrics, Recipe


class DPO(Recipe):
    """The family of losses on pairs of a chosen and a rejected response; see the module's docstring."""

    config: DPOConfig

    @property
    def frozen_models(self) -> Mapping[str, FrozenModelSpec]:
        """The reference, unless the loss needs none."""
        return {} if self.config.loss_type == "simpo" else {"reference": FrozenModelSpec(self.config.reference)}

    @property
    def evaluated(self) -> "DPO":
        """The recipe for evaluation, where the reference is loaded."""
        return self.with_keys(precompute=False)

    def encode(self, row: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> list[PackUnit]:
        """Encode a row as a pair of samples."""
        return encode_preference(row, tokenizer, source)

    def denominator(self, batch: Batch) -> Tensor:
        """Count the pairs, by their weights."""
        return document_weights(batch)[pairs(batch)[0]].sum(dtype=torch.float64)

    def loss(self, model: Model, batch: Batch, frozen_models: Mapping[str, Model]) -> tuple[Tensor, Metrics]:
        """Return the loss summed over pairs, with accuracy, margins, rewards and log-probs."""
        config, (chosen, rejected) = self.config, pairs(batch)
        columns = batch.token_columns
        # The reference goes first: what the model keeps of its last forward pass (routing) must be the policy's.
        if self.frozen_models and not self.precompute:
            columns = self.precomputed_columns(model, batch, frozen_models)
        answers = self.of_answers(self.logprobs(model, batch), batch)  # [documents]
        rewards = answers - self.of_answers(columns["reference_logprobs"], batch) if self.frozen_models else answers
        gap = rewards[chosen] - rewards[rejected]
        counts = document_weights(batch)[chosen]
        loss = (self.pair_losses(gap) * counts).sum()
        metrics = {
            "loss": loss,
            "accuracy": ((gap > 0) * counts).sum(),
            "margin": (config.beta * gap * counts).sum(),
            "reward_chosen": (config.beta * rewards[chosen] * counts).sum(),
            "reward_rejected": (config.beta * rewards[rejected] * counts).sum(),
            "logprob_chosen": (answers[chosen] * counts).sum(),
            "logprob_rejected": (answers[rejected] * counts).sum(),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}

    def pair_losses(self, gap: Tensor) -> Tensor:
        """Return the loss of each pair [pairs] from the chosen answer's reward less the rejected one's, without β."""
        config = self.config
        match config.loss_type:
            case "sigmoid":
                smoothing = config.label_smoothing
                return -(1 - smoothing) * logsigmoid(config.beta * gap) - smoothing * logsigmoid(-config.beta * gap)
            case "ipo":
                return (gap - 1 / (2 * config.beta)) ** 2
            case "simpo":
                return -logsigmoid(config.beta * gap - config.gamma)
            case unknown:
                assert_never(unknown)

    def precomputed_columns(self, model: Model, batch: Batch, frozen_models: Mapping[str, Model]) -> dict[str, Tensor]:
        """Return `reference_logprobs` of the responses' tokens: [B, T]."""
        reference = frozen_models["reference"]
        with torch.no_grad(), adapters_off(reference):  # a policy that is its own reference has adapters
            return {"reference_logprobs": self.logprobs(reference, batch)}

    def logprobs(self, model: Model, batch: Batch) -> Tensor:
        """Return the log-probs of the responses' tokens, 0 elsewhere: [B, T]."""
        return batch.through(model, partial(token_logprobs, **sampled_from(batch)))[0]

    def of_answers(self, logprobs: Tensor, batch: Batch) -> Tensor:
        """Return the log-prob of each response, or its mean over tokens: [documents]."""
        total = sums(logprobs, batch)
        if not (self.config.length_normalised or self.config.loss_type == "simpo"):
            return total
        return total / sums(torch.ones_like(logprobs), batch).clamp(min=1)
