"""Errors that are addressed to the user. Their message is complete, so they are printed without a traceback."""

import errno
import traceback


def full_text(error: BaseException) -> str:
    """Return an error that the run survives, for its log.

    The text holds its type, message, notes, and where it was raised, in another process too.
    """
    return "".join(traceback.format_exception(error)).strip()


class UserError(Exception):
    """What the user can mend: one clear message, no traceback."""


class Lost(RuntimeError):
    """A process that did part of the work is dead, silent, or not done in time. The message names it."""


class Retryable(UserError):
    """Something ended that another attempt may bring to its end: a process died, a cluster was lost,
    a run was preempted."""


class Left(Retryable):
    """The run ended before its last step because it was asked to; a checkpoint of where it ended is written."""

    def __init__(self, step: int, of: int, place: str) -> None:
        super().__init__(
            f"stopped after step {step} of {of}, as asked; its checkpoint is {place}, "
            "and the same run continues from it"
        )
        self.given = step, of, place

    def __reduce__(self) -> tuple:  # an exception is made again from its arguments where it comes from another process
        return Left, self.given


def passing(error: BaseException) -> bool:
    """Whether the same again may go well at once: a process or a cluster was lost, Ray did not start,
    a port was taken by another process meanwhile."""
    if isinstance(error, Left):
        return False
    taken = getattr(error, "errno", None) == errno.EADDRINUSE or any(
        word in str(error) for word in ("EADDRINUSE", "address already in use", "Address already in use")
    )
    return taken or isinstance(error, Retryable | Lost | ConnectionError)


def refuse_custom_code(path: object, error: Exception) -> None:
    """Raise UserError if transformers' error means that the model or tokenizer needs Python code of its own files."""
    if "custom code" in str(error):
        raise UserError(
            f"{path} works only with Python code that lies beside it (auto_map), which ptf never runs; "
            "take a model and a tokenizer that transformers has itself"
        ) from None
