"""Tasks of reasoning-gym whose scores evaluate the response as Python, found with responses that are programs (version
0.1.25): text of a policy would run in the reward's process, outside of any sandbox."""

from collections.abc import Iterable

from ptf.errors import UserError

UNSANDBOXED = (
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)


def raise_if_unsandboxed(tasks: Iterable[str]) -> None:
    """Raise UserError if one of the tasks runs responses as code."""
    if refused := sorted(set(tasks).intersection(UNSANDBOXED)):
        raise UserError(
            f"the library scores responses to {', '.join(refused)} by running them as Python, without a sandbox; where "
            "that is acceptable, allow it with `allow_unsandboxed_eval: true`"
        )
