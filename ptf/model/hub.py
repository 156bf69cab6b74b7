"""From a Hugging Face id to a directory of the local cache, with the few files that training reads.

The hub is asked once, because a branch may have moved. Where the hub cannot be reached, and for a commit, which never
changes, the cache answers at once; where the cache is incomplete, the message says what to do.
"""

import re
from functools import partial
from pathlib import Path

from ptf.errors import UserError, first_line
from ptf.storage.hub import Unreachable, at_revision, commit_at, refusal

FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")
# files that hold the same weights in another place or format; in directories all but chat templates (.jinja)
COPIES = ("*/*[!a]", "consolidated*", "*.bin", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.ot", "*.pt", "*.pth")


def is_id(path: str) -> bool:
    """Return whether a path that is no directory names a model of the hub."""
    return at_revision(path)[0].count("/") == 1 and not path.startswith((".", "/", "~"))


def fetch(path: str) -> Path:
    """Return the complete snapshot of `owner/name` or `owner/name@revision` (branch, tag or commit; default: the main
    branch).

    Raise UserError where it cannot be had: there is no such model or revision, it may not be read, or the hub cannot be
    reached and the cache is incomplete.
    """
    from huggingface_hub import constants

    id, revision = at_revision(path)
    commit = revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None
    obstacle = ""  # why the hub cannot be asked
    if not commit or constants.is_offline_mode():
        try:
            commit_at("model", id, revision)
        except Unreachable as error:
            obstacle = str(error)
        except UserError as error:
            raise UserError(f"model.path: {error}") from None
    if (commit or obstacle) and (snapshot := cached(path)):
        if obstacle:
            print(f"model.path: {obstacle}; {path} is taken from the cache: commit {snapshot.name}", flush=True)
        return snapshot
    if obstacle:
        at = f" --revision {revision}" if revision else ""
        raise UserError(
            f"model.path: there is no directory {path} here, {obstacle}, and its cache ({constants.HF_HUB_CACHE}) "
            f"does not have all of {path}: run `hf download {id}{at}` where there is a network, "
            "with HF_HOME on a disk that this machine "
            "can read, or give a directory"
        )
    try:
        return Path(_download(path)())
    except Exception as error:  # the hub raises a dozen kinds; each means that the model cannot be had
        why = refusal(error, "model", id, revision) or f"{path} could not be fetched: {first_line(error)}"
        raise UserError(f"model.path: {why}") from error


def _download(path: str) -> partial[str]:
    from huggingface_hub import snapshot_download

    id, revision = at_revision(path)
    return partial(snapshot_download, id, revision=revision, allow_patterns=list(FILES), ignore_patterns=list(COPIES))


def cached(path: str) -> Path | None:
    """Return the complete snapshot of `path` in the cache, without asking the hub; None if there is none.

    Whoever filled the cache may have taken fewer files than we want: a config and its weights must be there.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot = Path(_download(path)(local_files_only=True))
    except LocalEntryNotFoundError as error:
        partly = getattr(error, "snapshot_path", None)
        if partly is None:
            return None
        snapshot = Path(partly)
    from ptf.model.tensor_files import weight_map

    index = snapshot / "model.safetensors.index.json"
    weights = set(weight_map(index).values()) if index.is_file() else {"model.safetensors"}
    return snapshot if all((snapshot / name).is_file() for name in ("config.json", *weights)) else None
