"""On-policy distillation, from prompts to a published model:
`python flows/opd_flow.py run --config configs/tiny/opd.yaml`."""

from flows.base import PostTrainFlow


class OPDFlow(PostTrainFlow):
    """On-policy distillation: prepare, tokenize, train, evaluate, publish."""

    recipes = ("opd",)


if __name__ == "__main__":
    OPDFlow()
