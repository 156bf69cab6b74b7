"""Rules that several algorithms share. Each gives one line for each fault, which begins with the key to change."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptf.config.schema import Job


def of_whole_answers(job: "Job") -> list[str]:
    """Check an algorithm that compares or scores whole last answers."""
    faults = []
    if job.data.train_on != "assistant":
        faults.append(f"data.train_on is of chats; recipe {job.recipe} compares or scores the last answer")
    if job.data.too_long in ("truncate", "split"):
        faults.append(f"data.too_long: recipe {job.recipe} looks at whole answers; use error or drop")
    return faults


def compares_logprobs(job: "Job") -> list[str]:
    """Check an algorithm that compares log-probs with another model's."""
    if job.model.head is not None or "head" in job.model.replace:
        return [f"model.head: {job.recipe} compares log-probs over the vocabulary"]
    return []


def own_backend(job: "Job") -> list[str]:
    """Check an algorithm that needs ptf's own decoder."""
    return [f"model.backend: hf has no recipe {job.recipe}"] if job.model.backend == "hf" else []


def ahead(job: "Job") -> list[str]:
    """Check `algo.precomputed`."""
    what = "what is found ahead depends, in its last bits, on how rows were dealt; not with train.deterministic"
    return [f"algo.precomputed: {what}"] if job.train.deterministic else []
