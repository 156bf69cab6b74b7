"""Rules that several algorithms share.

Each function returns its rules as ptf.config.rules does.
"""

from typing import TYPE_CHECKING

from ptf.config.section import Rules

if TYPE_CHECKING:
    from ptf.config.schema import Job


def whole_answer_rules(job: "Job") -> Rules:
    """Return the rules of the data of an algorithm that compares or scores whole responses."""
    return {
        f"data.train_on applies to chats; recipe {job.recipe} compares or scores the last response. Remove the key": (
            job.data.train_on != "assistant"
        ),
        f"data.too_long: recipe {job.recipe} needs whole responses; use error or drop": (
            job.data.too_long in ("truncate", "split")
        ),
    }


def comparison_rules(job: "Job", precompute: bool) -> Rules:
    """Return the rules of an algorithm that compares log-probs with another model's: of its head, and of
    `algo.precompute`."""
    return {
        f"model.head: recipe {job.recipe} compares log-probs over the vocabulary, which a custom head does not give; "
        "remove the key": job.model.head or "head" in job.model.replace,
        "algo.precompute cannot be used with train.deterministic, because the last bits of precomputed values depend "
        "on how sequences are split over ranks; set one of them to false": precompute and job.train.deterministic,
    }
