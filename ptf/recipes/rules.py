"""Rules that several algorithms share.

Each function returns a line for each broken rule, which begins with the key to change.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptf.config.schema import Job


def whole_answer_errors(job: "Job") -> list[str]:
    """Check the data of an algorithm that compares or scores whole responses."""
    errors = []
    if job.data.train_on != "assistant":
        errors.append(
            f"data.train_on applies to chats; recipe {job.recipe} compares or scores the last response. Remove the key"
        )
    if job.data.too_long in ("truncate", "split"):
        errors.append(f"data.too_long: recipe {job.recipe} needs whole responses; use error or drop")
    return errors


def custom_head_errors(job: "Job") -> list[str]:
    """Check the head of an algorithm that compares log-probs with another model's."""
    if job.model.head is not None or "head" in job.model.replace:
        return [
            f"model.head: recipe {job.recipe} compares log-probs over the vocabulary, which a custom head does not "
            "give; remove the key"
        ]
    return []


def precomputed_errors(job: "Job") -> list[str]:
    """Check the conditions of `algo.precompute`."""
    if job.train.deterministic:
        return [
            "algo.precompute cannot be used with train.deterministic, because the last bits of precomputed values "
            "depend on how sequences are split over ranks; set one of them to false"
        ]
    return []
