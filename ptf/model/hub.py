"""A Hugging Face id to a directory of its cache, with the few files that training reads.

The one idea: the hub is asked once, for a branch may have moved. Where it cannot be reached, and for a commit, which never changes, the cache
answers at once; where the cache has not all of it, the message says what to do.
"""

import re
from functools import partial
from pathlib import Path

from ptf.errors import UserError

FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")
COPIES = ("*/*", "consolidated*", "*.bin", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.ot", "*.pt", "*.pth")  # of the same weights, elsewhere or otherwise
TIMEOUT_S = 5.0


def fetch(path: str, revision: str | None = None) -> Path:
    """The snapshot of `path` at `revision` (branch, tag or commit; default: the main branch), complete.

    Raises UserError where it is not to be had: there is no such model or revision, it may not be read, or the hub cannot be reached and the
    cache has not all of it.
    """
    from huggingface_hub import snapshot_download

    get = partial(snapshot_download, path, revision=revision, allow_patterns=list(FILES), ignore_patterns=list(COPIES))
    commit = revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None
    away = _away(path, revision, ask=not commit)
    if (commit or away) and (found := _cached(get)):
        if away:
            print(f"model.path: {away}; {path} is taken from the cache: commit {found.name}", flush=True)
        return found
    if away:
        raise UserError(_absent(path, revision, away))
    try:
        return Path(get())
    except Exception as error:  # the hub raises a dozen kinds; each means that the model is not to be had
        raise UserError(f"model.path: {path} could not be fetched: {_line(error)}") from error


def _away(path: str, revision: str | None, *, ask: bool) -> str:
    """Why the hub cannot be asked; nothing if it can, and has this revision."""
    import httpx
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    if constants.is_offline_mode():
        return "the hub is not asked (HF_HUB_OFFLINE)"
    if not ask:
        return ""
    try:
        HfApi().model_info(path, revision=revision, timeout=TIMEOUT_S)
    except RevisionNotFoundError as error:
        raise UserError(f"model.revision: {path} has no branch, tag or commit {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise UserError(f"model.path: there is no directory {path} here, and no such model on the hub that you may read (private: set HF_TOKEN)") from error
    except (httpx.HTTPError, HfHubHTTPError, OSError) as error:
        return f"the hub cannot be reached ({type(error).__name__}: {_line(error)})"
    return ""


def _cached(get: partial[str]) -> Path | None:
    """What the cache holds, if that is all of it. Whoever filled it may have taken fewer files than we want: what must be there is a config and
    its weights."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    from ptf.model.tensor_files import weight_map

    try:
        found = Path(get(local_files_only=True))
    except LocalEntryNotFoundError as error:
        partly = getattr(error, "snapshot_path", None)
        if partly is None:
            return None
        found = Path(partly)
    index = found / "model.safetensors.index.json"
    weights = set(weight_map(index).values()) if index.is_file() else {"model.safetensors"}
    return found if all((found / name).is_file() for name in ("config.json", *weights)) else None


def _absent(path: str, revision: str | None, away: str) -> str:
    from huggingface_hub import constants

    at = f" --revision {revision}" if revision else ""
    return (
        f"model.path: there is no directory {path} here, {away}, and its cache ({constants.HF_HUB_CACHE}) does not have all of {path}"
        f"{f' at {revision}' if revision else ''}: run `hf download {path}{at}` where there is a network, with HF_HOME on a disk that this machine"
        " sees, or give a directory"
    )


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
