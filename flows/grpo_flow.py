"""Reinforcement learning with GRPO and its family, from prompts to a published model:
`python flows/grpo_flow.py run --config configs/tiny/grpo.yaml`."""

from flows.base import PostTrainFlow


class GRPOFlow(PostTrainFlow):
    """GRPO: prepare, tokenize, train, evaluate, publish."""

    recipes = ("grpo",)


if __name__ == "__main__":
    GRPOFlow()
