"""Knowledge distillation, from teachers to a published student:
`python flows/kd_flow.py run --config configs/tiny/kd.yaml`."""

from flows.base import PostTrainFlow


class KDFlow(PostTrainFlow):
    """Knowledge distillation: prepare, tokenize, train, evaluate, publish."""

    recipes = ("kd",)


if __name__ == "__main__":
    KDFlow()
