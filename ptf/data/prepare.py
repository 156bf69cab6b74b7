"""The prepare plugin: user code that makes data, a tokenizer or a model config, run once for each key.

The plugin writes into a temporary sibling directory that is renamed when it is complete, so a directory under its key
is complete or does not exist.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ptf import storage
from ptf.errors import UserError
from ptf.storage import file_verification


def prepare(plugin: Callable[[str], Any], key: str, root: str, verify_up_to: float = float("inf")) -> str:
    """Run `plugin(directory)` and return `{root}/{key}`, which then holds its files and a manifest.

    A directory that an earlier run wrote under this key is verified (ptf.storage.file_verification.verify) and reused.
    `key` must identify the plugin and its arguments. Exceptions of the plugin propagate, and nothing is left behind.
    """
    target = Path(root) / key
    if target.exists() and not (target / storage.MANIFEST).exists():
        raise UserError(f"{target} exists but was not written by prepare (it has no {storage.MANIFEST}): move it away")
    if file_verification.make_once(target, {"key": key}, lambda part: plugin(str(part)), verify_up_to):
        print(f"prepare: reusing {target}")
    return str(target)


def raise_if_damaged(directory: str, up_to: float) -> None:
    """Raise Corrupt unless a directory of prepared data, named by its key, holds what was written under this key."""
    file_verification.raise_if_different(
        directory, {"key": Path(directory).name}, up_to, f"remove {directory}: it is made again"
    )
