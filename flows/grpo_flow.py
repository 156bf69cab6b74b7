"""Reinforcement learning with GRPO and its family, or on-policy distillation, from prompts to a published model:
`python flows/grpo_flow.py run --config configs/tiny/grpo.yaml`."""

from flows.base import PostTrainFlow


class GRPOFlow(PostTrainFlow):
    """GRPO and on-policy distillation: prepare, tokenize, train, evaluate, publish."""

    recipes = ("grpo", "opd")
    default_config = "configs/tiny/grpo.yaml"


if __name__ == "__main__":
    GRPOFlow()
