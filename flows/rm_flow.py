"""A reward model, from preferences or scores to a published model:
`python flows/rm_flow.py run --config configs/tiny/rm.yaml`."""

from flows.base import PostTrainFlow


class RMFlow(PostTrainFlow):
    """A reward model: prepare, tokenize, train, evaluate, publish."""

    recipes = ("rm",)


if __name__ == "__main__":
    RMFlow()
