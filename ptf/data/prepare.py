"""The prepare plug: code of the user's that makes data, a tokenizer or a model config, run once for each key.

The one idea: it works in a temporary sibling that is renamed when complete, so a directory under its key is whole, or is not there.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ptf import storage, verified
from ptf.errors import UserError


def prepare(plug: Callable[[str], Any], key: str, root: str, verify_up_to: float = float("inf")) -> str:
    """Run `plug(directory)` and return `{root}/{key}`, which then holds what it wrote and a manifest. What an earlier run made under this key is reused,
    once it is verified (ptf.verified.verify).
    `key` is to name the plug and its arguments. Whatever the plug raises is passed on, and nothing is left behind."""
    target = Path(root) / key
    if target.exists() and not (target / storage.MANIFEST).exists():
        raise UserError(f"{target} is there but was not written by prepare (it has no {storage.MANIFEST}): move it away")
    if verified.made(target, {"key": key}, lambda part: plug(str(part)), verify_up_to):
        print(f"prepare: reusing {target}")
    return str(target)


def refuse_damaged(directory: str, up_to: float) -> None:
    """Raises Corrupt unless a directory of prepared data, named by its key, holds what was written under this key."""
    verified.refuse_other(directory, {"key": Path(directory).name}, up_to, f"remove {directory}: it is made again")
