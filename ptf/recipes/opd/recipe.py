"""On-policy distillation: the student samples, and each token's advantage is its log-prob under the teacher minus that
under the student that sampled it (Agarwal et al., GKD, 2024, with the student's samples only and the reverse
divergence, by policy gradient as in Gu et al., MiniLLM, 2024, eq. 2).

    Â = log π_teacher − log π_old    of each token; its negative estimates KL(π_old ‖ π_teacher) of that token

The loss is GRPO's clipped objective with these advantages, averaged over all tokens.
The reward is reported and not trained on.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ptf.data.batch import Batch
from ptf.data.document import PackUnit
from ptf.data.trajectory import Group, samples_of
from ptf.model.model import Model
from ptf.recipes.opd.config import OPDConfig
from ptf.recipes.policy import ClippedPolicy
from ptf.recipes.protocol import FrozenModelSpec, Metrics


class OPD(ClippedPolicy):
    """Distillation on the student's own samples; see the module's docstring."""

    config: OPDConfig

    @property
    def frozen_models(self) -> Mapping[str, FrozenModelSpec]:
        """The teacher."""
        return {"teacher": FrozenModelSpec(self.config.teacher, same_architecture=False)}

    @property
    def needs_old_logprobs(self) -> bool:
        """True, because `compute_advantages` compares the teacher's log-probs with them."""
        return True

    def loss(self, model: Model, batch: Batch, frozen_models: Mapping[str, Model]) -> tuple[Tensor, Metrics]:
        """Return the clipped objective; the metric `kl_teacher` estimates KL(π_old ‖ π_teacher) of a token, in nats."""
        loss, metrics = super().loss(model, batch, frozen_models)
        return loss, {**metrics, "kl_teacher": -(batch.token_columns["advantages"] * batch.loss_weights).sum()}

    def compute_advantages(self, groups: Sequence[Group]) -> list[PackUnit]:
        """Return every response with its advantages, whether it has a reward or not."""
        return [
            (sample,)
            for group in groups
            for t in group
            for sample in samples_of(t, t.token_columns["teacher_logprobs"] - t.token_columns["old_logprobs"])
        ]
