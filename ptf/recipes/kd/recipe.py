"""Knowledge distillation: the student predicts what its teachers predict, token by token, over the tokens that SFT would train.

    L = T² Σₖ wₖ D(student, teacherₖ) + ce · CE        D at temperature T (ptf.model.divergence); Hinton et al. 2015, section 2: by T² the gradients of
                                                       soft targets keep their size; weights wₖ sum to 1

With `top_k`, D looks at each teacher's likeliest tokens and at the rest as one. Those can be found once, before training (`precomputed`); otherwise
the teachers are companions, and their forward passes stand one inside the other around the student's: a head is whole only inside its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ptf.data.batch import Batch
from ptf.data.encode import encode_document
from ptf.data.sample import Atom
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model.chunked import cross_entropy
from ptf.model.decoder import Decoder
from ptf.model.divergence import Form, divergence, divergence_of_top, top_logprobs
from ptf.model.head import Head
from ptf.recipes.kd.knobs import TeacherConfig
from ptf.recipes.protocol import Companion, Metrics

Heard = tuple[str, Tensor, Head]  # a teacher, its hidden states [B, T, D] and its head


@dataclass(frozen=True)
class KD:
    teachers: Mapping[str, TeacherConfig]
    form: Form = "forward"
    beta: float = 0.5
    temperature: float = 1.0
    ce: float = 0.0
    top_k: int | None = None
    precomputed: bool = False
    train_on: str = "assistant"
    online: ClassVar[bool] = False
    head: ClassVar[Literal["lm", "scalar"]] = "lm"

    @property
    def companions(self) -> Mapping[str, Companion]:
        return {name: Companion(teacher.path, teacher.revision, alike=False) for name, teacher in self.teachers.items()}

    @property
    def evaluated(self) -> "KD":
        """By KL(teacher ‖ student) and the loss of the data, beside teachers that are there."""
        return replace(self, form="forward", temperature=1.0, ce=1.0, top_k=None, precomputed=False)

    def reported(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The divergence as `kl/NAME`, the loss of the data as `ce/NAME`; nobody looks at their sum."""
        return {k.replace("divergence", "kl", 1): v for k, v in metrics.items() if not k.startswith("loss/")}

    def encode(self, row: Mapping[str, Any], tokenizer: Tokenizer, source: str) -> list[Atom]:
        return encode_document(row, tokenizer, source, self.train_on)

    def units(self, batch: Batch) -> Tensor:
        return batch.weights.sum(dtype=torch.float64)

    def loss(self, model: Decoder, batch: Batch, companions: Mapping[str, Decoder]) -> tuple[Tensor, Metrics]:
        if self.top_k is None:
            return self._around(list(self.teachers), model, batch, companions, torch.is_grad_enabled())
        streams = batch.streams if self.precomputed else self.annotations(model, batch, companions)
        return model(batch.tokens, batch.positions, batch.segments, partial(self._beside_top, batch=batch, streams=streams))

    @property
    def annotated_by(self) -> tuple[object, ...]:
        return self.top_k, self.temperature

    def annotations(self, model: Decoder, batch: Batch, companions: Mapping[str, Decoder]) -> dict[str, Tensor]:
        """Of each teacher, its likeliest tokens, and their log-probs and the others': `NAME_ids` [B, T, k] and `NAME_logprobs` [B, T, k + 1]."""
        k = self.top_k
        assert k is not None
        found: dict[str, Tensor] = {}
        for name in self.teachers:
            vocab = shared_vocabulary(model, companions[name], name)
            if k >= vocab:
                raise UserError(f"algo.top_k ({k}) must be less than the vocabulary of {vocab} tokens")
            reduce = lambda x, head, vocab=vocab: top_logprobs(x, replace(head, vocab=vocab), k, batch.weights, self.temperature)  # noqa: E731
            with torch.no_grad():
                found[f"{name}_ids"], found[f"{name}_logprobs"] = companions[name](batch.tokens, batch.positions, batch.segments, reduce)
        return found

    def _around(
        self, names: list[str], model: Decoder, batch: Batch, companions: Mapping[str, Decoder], gradients: bool, heard: tuple[Heard, ...] = ()
    ) -> tuple[Tensor, Metrics]:
        """The pass of the first of the teachers, inside it those of the others, and inside them all the student's."""
        if not names:
            with torch.set_grad_enabled(gradients):
                return model(batch.tokens, batch.positions, batch.segments, partial(self._beside_whole, batch=batch, model=model, heard=heard, of=companions))
        first, *others = names
        reduce = lambda x, head: self._around(others, model, batch, companions, gradients, (*heard, (first, x, head)))  # noqa: E731
        with torch.no_grad():
            return companions[first](batch.tokens, batch.positions, batch.segments, reduce)

    def _beside_whole(self, x: Tensor, head: Head, batch: Batch, model: Decoder, heard: tuple[Heard, ...], of: Mapping[str, Decoder]) -> tuple[Tensor, Metrics]:
        found = {}
        for name, x_teacher, head_teacher in heard:
            vocab = shared_vocabulary(model, of[name], name)
            both = replace(head, vocab=vocab), replace(head_teacher, vocab=vocab)
            found[name] = divergence(x, both[0], x_teacher, both[1], batch.weights, form=self.form, beta=self.beta, temperature=self.temperature)
        return self._mixed(x, head, batch, found)

    def _beside_top(self, x: Tensor, head: Head, batch: Batch, streams: Mapping[str, Tensor]) -> tuple[Tensor, Metrics]:
        found = {}
        for name in self.teachers:
            ids, logprobs = streams[f"{name}_ids"], streams[f"{name}_logprobs"]
            found[name] = divergence_of_top(x, head, ids, logprobs, batch.weights, form=self.form, beta=self.beta, temperature=self.temperature)
        return self._mixed(x, head, batch, found)

    def _mixed(self, x: Tensor, head: Head, batch: Batch, found: Mapping[str, Tensor]) -> tuple[Tensor, Metrics]:
        shares = {name: teacher.weight / sum(t.weight for t in self.teachers.values()) for name, teacher in self.teachers.items()}
        apart = torch.stack([share * found[name] for name, share in shares.items()]).sum()
        loss, metrics = self.temperature**2 * apart, {"divergence": apart}
        if len(found) > 1:
            metrics |= {f"divergence_{name}": value for name, value in found.items()}
        if self.ce:
            metrics["ce"] = cross_entropy(x, head, batch.targets, batch.weights)
            loss = loss + self.ce * metrics["ce"]
        return loss, {name: value.detach() for name, value in {"loss": loss, **metrics}.items()}


def shared_vocabulary(model: Decoder, teacher: Decoder, name: str) -> int:
    """How many rows of the vocabulary both have: checkpoints of one tokenizer may have more rows than it has tokens, and not equally many. Raises
    UserError where tensor parallelism cuts the two differently."""
    ours, theirs = model.config, teacher.config
    if model.group is not None and ours.padded != theirs.padded:
        raise UserError(
            f"the teacher {name} has {theirs.vocab} rows of vocabulary, the model {ours.vocab}: under compute.mesh.tensor they must have equally many"
        )
    return min(ours.vocab, theirs.vocab)
