"""The rule on what may differ between a checkpoint's job and the job that resumes it."""

from ptf.config import Job, frozen_differences, loads
from ptf.errors import UserError


def raise_if_fixed_keys_changed(saved: str, job: Job) -> None:
    """Raise UserError naming every fixed key that differs from the checkpoint's job."""
    changed = frozen_differences(loads(saved), job)
    if changed:
        raise UserError(
            "this run was begun with other values of keys that are fixed:\n  "
            + "\n  ".join(changed)
            + "\nrestore these keys, or begin a run with another name"
        )
