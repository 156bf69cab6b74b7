"""Knowledge distillation: the student predicts what its teachers predict, token by token,
over the tokens that SFT would train.

    L = T² Σₖ wₖ D(student, teacherₖ) + ce_coef · CE

D is the divergence of the two distributions at temperature T (ptf.model.divergence). The factor T² keeps the size of
the gradients of soft targets independent of T (Hinton et al. 2015, section 2). The weights wₖ sum to 1.

With `top_k`, D compares each teacher's likeliest tokens and the rest as one. Those can be computed once, before
training (`precompute`); otherwise the teachers are frozen models, and their forward passes are nested around the
student's, because a sharded head is whole only inside its own forward pass.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ptf.data.batch import Batch
from ptf.data.document import PackUnit
from ptf.data.encode import encode_document
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model.chunked import cross_entropy
from ptf.model.divergence import Divergence, divergence, divergence_of_top, top_logprobs
from ptf.model.head import Head
from ptf.model.model import Model
from ptf.recipes.kd.config import KDConfig
from ptf.recipes.protocol import FrozenModelSpec, Metrics, Recipe

TeacherOutput = tuple[str, Tensor, Head]  # a teacher's name, hidden states [B, T, D] and head


class KD(Recipe):
    """Distillation from one or several teachers; see the module's docstring."""

    config: KDConfig

    @property
    def frozen_models(self) -> Mapping[str, FrozenModelSpec]:
        """The teachers, by name."""
        teachers = self.config.teachers.items()
        return {name: FrozenModelSpec(teacher.path, same_architecture=False) for name, teacher in teachers}

    @property
    def evaluated(self) -> "KD":
        """The recipe for evaluation: KL(teacher ‖ student) and the loss of the data, with the teachers loaded."""
        return self.with_keys(loss_type="forward", temperature=1.0, ce_coef=1.0, top_k=None, precompute=False)

    def reported(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return held-out metrics with the divergence as `kl/NAME` and the data's loss as `ce/NAME`, without their
        sum."""
        return {k.replace("divergence", "kl", 1): v for k, v in metrics.items() if not k.startswith("loss/")}

    def encode(self, row: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> list[PackUnit]:
        """Encode a row as SFT does."""
        return encode_document(row, tokenizer, source, self.context.train_on)

    def loss(self, model: Model, batch: Batch, frozen_models: Mapping[str, Model]) -> tuple[Tensor, Metrics]:
        """Return the mean divergence from the teachers, summed over tokens, and its metrics."""
        if self.config.top_k is None:
            return self._nested_passes(list(self.config.teachers), model, batch, frozen_models, torch.is_grad_enabled())
        token_columns = (
            batch.token_columns if self.config.precompute else self.precomputed_columns(model, batch, frozen_models)
        )
        return batch.through(model, partial(self._loss_of_top, batch=batch, token_columns=token_columns))

    @property
    def precomputed_from(self) -> tuple[object, ...]:
        """The settings that decide what is computed."""
        return self.config.top_k, self.config.temperature

    def precomputed_columns(self, model: Model, batch: Batch, frozen_models: Mapping[str, Model]) -> dict[str, Tensor]:
        """Return each teacher's likeliest tokens, `NAME_ids` [B, T, k], and their log-probs and that of all others,
        `NAME_logprobs` [B, T, k + 1]."""
        k = self.config.top_k
        assert k is not None
        columns: dict[str, Tensor] = {}
        for name in self.config.teachers:
            vocab = shared_vocabulary(model, frozen_models[name], name)
            if k >= vocab:
                raise UserError(f"algo.top_k ({k}) must be less than the vocabulary of {vocab} tokens")

            def head_fn(x, head, vocab=vocab):
                return top_logprobs(
                    x,
                    replace(head, vocab=vocab),
                    k,
                    batch.loss_weights,
                    self.config.temperature,
                    batch.trained_positions,
                )

            with torch.no_grad():
                ids, logprobs = batch.through(frozen_models[name], head_fn)
            columns |= {f"{name}_ids": ids, f"{name}_logprobs": logprobs}
        return columns

    @property
    def _divergence(self) -> Divergence:
        return Divergence(self.config.loss_type, self.config.beta, self.config.temperature)

    def _nested_passes(
        self,
        names: list[str],
        model: Model,
        batch: Batch,
        frozen_models: Mapping[str, Model],
        gradients: bool,
        outputs: tuple[TeacherOutput, ...] = (),
    ) -> tuple[Tensor, Metrics]:
        """Run the pass of the first teacher, inside it those of the others, and inside them all the student's."""
        if not names:
            with torch.set_grad_enabled(gradients):
                return batch.through(
                    model,
                    partial(
                        self._loss_of_vocabulary, batch=batch, model=model, outputs=outputs, teachers=frozen_models
                    ),
                )
        first, *others = names

        def head_fn(x, head):
            return self._nested_passes(others, model, batch, frozen_models, gradients, (*outputs, (first, x, head)))

        with torch.no_grad():
            return batch.through(frozen_models[first], head_fn)

    def _loss_of_vocabulary(
        self,
        x: Tensor,
        head: Head,
        batch: Batch,
        model: Model,
        outputs: tuple[TeacherOutput, ...],
        teachers: Mapping[str, Model],
    ) -> tuple[Tensor, Metrics]:
        divergences = {}
        for name, x_teacher, head_teacher in outputs:
            vocab = shared_vocabulary(model, teachers[name], name)
            divergences[name] = divergence(
                x,
                replace(head, vocab=vocab),
                x_teacher,
                replace(head_teacher, vocab=vocab),
                batch.loss_weights,
                self._divergence,
                batch.trained_positions,
            )
        return self._mixed_loss(x, head, batch, divergences)

    def _loss_of_top(
        self, x: Tensor, head: Head, batch: Batch, token_columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, Metrics]:
        divergences = {
            name: divergence_of_top(
                x,
                head,
                token_columns[f"{name}_ids"],
                token_columns[f"{name}_logprobs"],
                batch.loss_weights,
                self._divergence,
                batch.trained_positions,
            )
            for name in self.config.teachers
        }
        return self._mixed_loss(x, head, batch, divergences)

    def _mixed_loss(
        self, x: Tensor, head: Head, batch: Batch, divergences: Mapping[str, Tensor]
    ) -> tuple[Tensor, Metrics]:
        total_weight = sum(teacher.weight for teacher in self.config.teachers.values())
        shares = {name: teacher.weight / total_weight for name, teacher in self.config.teachers.items()}
        mean = torch.stack([share * divergences[name] for name, share in shares.items()]).sum()
        loss, metrics = self.config.temperature**2 * mean, {"divergence": mean}
        if len(divergences) > 1:
            metrics |= {f"divergence_{name}": value for name, value in divergences.items()}
        if self.config.ce_coef:
            metrics["ce"] = cross_entropy(x, head, batch.targets, batch.loss_weights, batch.trained_positions)
            loss = loss + self.config.ce_coef * metrics["ce"]
        return loss, {name: value.detach() for name, value in {"loss": loss, **metrics}.items()}


def shared_vocabulary(model: Model, teacher: Model, name: str) -> int:
    """Return the number of vocabulary rows that both models have.

    Checkpoints of one tokenizer may have more rows than it has tokens, and different numbers of them. Raises UserError
    if ranks that divide the vocabulary would split the two differently.
    """
    ours, theirs = model.config, teacher.config
    if model.group is not None and ours.padded != theirs.padded:
        raise UserError(
            f"the teacher {name} has {theirs.vocab} rows of vocabulary, the model {ours.vocab}: "
            "with compute.mesh.tensor_parallel_size or context_parallel_size above 1 they must have equally many"
        )
    return min(ours.vocab, theirs.vocab)
