"""The record of a response in `samples.jsonl`, in the evaluate stage's `responses/`, and for `evaluate.metrics`."""

from typing import Any

from ptf.data.trajectory import NoResult, Reward, Trajectory


def response_record(t: Trajectory) -> dict[str, Any]:
    """Return a record of an episode: `row`, the data row; `response`, the policy's text; `reward`, or null without
    one; and `no_result`, the reason if scoring failed, otherwise null."""
    outcome = t.outcome
    return {
        "row": t.prompt.row,
        "response": t.text,
        "reward": outcome.value if isinstance(outcome, Reward) else None,
        "no_result": outcome.reason if isinstance(outcome, NoResult) else None,
    }
