"""Supervised fine-tuning, from data to a published model: `python flows/sft_flow.py run --config
configs/tiny/sft.yaml`."""

from flows.base import PostTrainFlow


class SFTFlow(PostTrainFlow):
    """Supervised fine-tuning: prepare, tokenize, train, evaluate, publish."""

    recipes = ("sft",)


if __name__ == "__main__":
    SFTFlow()
