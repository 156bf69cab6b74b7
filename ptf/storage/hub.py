"""Questions to the Hugging Face Hub: within seconds an answer, or one sentence that says what to do.

A request runs in a thread of its own, since no timeout of the client applies while a name is resolved.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Literal, TypeVar

from ptf.errors import UserError, first_line

T = TypeVar("T")
ANSWER_S = 4.0


class Unreachable(Exception):
    """The Hub was not asked or did not answer; the text says why."""


def at_revision(path: str) -> tuple[str, str | None]:
    """Return the id and the branch, tag or commit of `owner/name@revision`; None for an id alone."""
    id, _, revision = path.partition("@")
    return id, revision or None


def commit_at(kind: Literal["dataset", "model"], id: str, revision: str | None) -> str:
    """Return the commit that a revision is at now.

    Raises Unreachable where the Hub does not answer, and UserError where it refuses.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    api = HfApi(endpoint=constants.ENDPOINT)
    try:
        return str(_answer(partial(api.repo_info, id, revision=revision, repo_type=kind, timeout=ANSWER_S)).sha)
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise UserError(refusal(error, kind, id, revision)) from None
    except HfHubHTTPError as error:
        why = refusal(error, kind, id, revision)
        raise Unreachable(why or f"the Hub ({constants.ENDPOINT}) cannot be reached ({first_line(error)})") from None


def unreachable() -> str:
    """Return why the Hub is not asked or does not answer; "" if it answers."""
    import httpx
    from huggingface_hub import constants

    try:
        _answer(partial(httpx.head, constants.ENDPOINT, timeout=ANSWER_S))
    except Unreachable as error:
        return str(error)
    return ""


def refusal(error: Exception, kind: str, id: str, revision: str | None) -> str:
    """Return what to do about an answer of the Hub that will not change; "" for any other error."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # of a file whose request failed
    match error:
        case errors.GatedRepoError():
            return f"the {kind} {id} is gated: accept its terms on the Hub, and set HF_TOKEN to a token of that account"
        case errors.RevisionNotFoundError():
            return f"the {kind} {id} has no branch, tag or commit {revision!r}: correct what follows the @"
        case errors.RepositoryNotFoundError():
            return (
                f"there is no file or directory {id} here, and no such {kind} on the Hub that you may read (correct "
                "the name; private: set HF_TOKEN)"
            )
        case errors.HFValidationError():
            return f"the {kind} {id} cannot be on the Hub: {first_line(error)}"
        case errors.HfHubHTTPError() if error.response is not None:
            status = error.response.status_code
            if status in (401, 403):
                return f"the Hub does not show the {kind} {id} ({status}): set HF_TOKEN to a token that may read it"
            refused = 400 <= status < 500 and status not in (408, 429)
            return f"the Hub refuses: {first_line(error)}" if refused else ""
        case _:
            return ""


def _answer(request: Callable[[], T]) -> T:
    """Return the answer to a request. Raises Unreachable where there is none, and the client's error if it is one."""
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.is_offline_mode():
        raise Unreachable("HF_HUB_OFFLINE forbids requests to the Hub")
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(request())
        except BaseException as error:  # it is raised in the waiting thread
            answer.set_exception(error)

    threading.Thread(target=work, name="ptf-hub", daemon=True).start()
    try:
        return answer.result(ANSWER_S)
    except HfHubHTTPError:
        raise
    except FutureTimeout:
        raise Unreachable(f"the Hub ({constants.ENDPOINT}) did not answer within {ANSWER_S:g} s") from None
    except (httpx.HTTPError, OSError) as error:
        raise Unreachable(f"the Hub ({constants.ENDPOINT}) cannot be reached ({type(error).__name__})") from None
