"""Errors that are addressed to the user. The message is complete, so it is printed without a traceback."""

import errno
import importlib.util
import traceback


def full_text(error: BaseException) -> str:
    """Return the text of an error that does not end the run, for the run's log.

    The text contains the type, message, notes and traceback, also that of an error from a different process.
    """
    return "".join(traceback.format_exception(error)).strip()


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class UserError(Exception):
    """Error that is reported as one message, without a traceback: the user can fix it, or (`Retryable`) try again."""


class Lost(RuntimeError):
    """A process that did part of the work died, stopped responding, or was not done in time. The message names it."""


class Retryable(UserError):
    """Failure after which a new attempt may succeed: a process died, a cluster was lost, a run was preempted."""


class Stopped(Retryable):
    """The run stopped before its last step on request, after it had written a checkpoint."""

    def __str__(self) -> str:
        step, of, place = self.args
        return (
            f"stopped after step {step} of {of}, as requested; its checkpoint is {place}, "
            "and running the job again with the same run name continues from it"
        )


def is_transient(error: BaseException) -> bool:
    """Return whether an immediate retry may succeed: a process or a cluster was lost, Ray did not start, or a different
    process took the port."""
    if isinstance(error, Stopped):
        return False
    taken = getattr(error, "errno", None) == errno.EADDRINUSE or any(
        word in str(error) for word in ("EADDRINUSE", "address already in use", "Address already in use")
    )
    return taken or isinstance(error, Retryable | Lost | ConnectionError)


def raise_if_missing(package: str, extra: str) -> None:
    """Raise UserError with the command that installs the package, if it is missing. The package is not imported."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"the package {package} is not installed: pip install 'ptf[{extra}]'")


def raise_if_custom_code(path: object, error: Exception) -> None:
    """Raise UserError if transformers' error means that the model or tokenizer needs Python code from its directory."""
    if "custom code" in str(error):
        raise UserError(
            f"{path} works only with the Python code in its directory (auto_map), which ptf never runs; "
            "use a model and a tokenizer that transformers supports without it"
        ) from None
