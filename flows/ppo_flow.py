"""Reinforcement learning with PPO and a critic, from prompts to a published model: `python flows/ppo_flow.py run
--config configs/tiny/ppo.yaml`."""

from flows.base import PostTrainFlow


class PPOFlow(PostTrainFlow):
    """PPO: prepare, tokenize, train, evaluate, publish."""

    recipes = ("ppo",)


if __name__ == "__main__":
    PPOFlow()
