"""Direct preference optimisation, from pairs to a published model:
`python flows/dpo_flow.py run --config configs/tiny/dpo.yaml`."""

from flows.base import PostTrainFlow


class DPOFlow(PostTrainFlow):
    """Direct preference optimisation: prepare, tokenize, train, evaluate, publish."""

    recipes = ("dpo",)


if __name__ == "__main__":
    DPOFlow()
