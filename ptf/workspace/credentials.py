"""Secrets: tokens, keys and passwords. A config is stored, shown and published whole, so it holds only their names
(`env:NAME`).

A secret is read from the environment of the process that needs it, where it is needed, so nothing that is written can
contain it. The text of an error passes through `redacted` before it is printed, because libraries put addresses and
headers into their messages.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

from ptf.errors import UserError

REFERENCE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
WORDS = (
    r"api_?key|access_?key(?:_?id)?|secret(?:_?key)?|passw(?:or)?d|passphrase|private_?key|auth_?token|access_?token|"
    r"bearer"
)
KEY = re.compile(rf"(?:^|.*_)(?:{WORDS})", re.IGNORECASE)
VARIABLE = re.compile(rf"(?:^|.*_)(?:{WORDS}|token|key|pat|credentials?)", re.IGNORECASE)
KINDS = r"hf_|sk-|ghp_|gho_|github_pat_|glpat-|AKIA|ASIA|xox[abprs]-|eyJ"  # how tokens of well-known services begin
VALUE = re.compile(rf"(?:{KINDS})[A-Za-z0-9_\-.]{{16,}}")
PASSWORD = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*://[^/@\s:]*):[^/@\s]+@")
SHORTEST = 8  # characters of a value that is looked for in texts
HIDDEN = "***"


def is_secret(value: object, key: str, *, variable: bool = False) -> bool:
    """Return whether a value, found under this key (or as this environment variable), is a secret itself.

    The name of an environment variable (`env:NAME`) and the path of a file with a secret are not secrets.
    """
    if not isinstance(value, str) or value in ("", HIDDEN) or REFERENCE.fullmatch(value):
        return False
    named = (VARIABLE if variable else KEY).fullmatch(key) is not None and not value.startswith(("/", "~"))
    return named or VALUE.search(value) is not None or PASSWORD.search(value) is not None


def from_environment(value: str, key: str) -> str:
    """Return what a reference stands for; any other text as it is. Raise UserError where the variable is not set."""
    match = REFERENCE.fullmatch(value)
    if match is None:
        return value
    if match[1] not in os.environ:
        raise UserError(f"{key} is {value}, but the environment variable {match[1]} is not set where this runs")
    return os.environ[match[1]]


def resolved(arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keyword arguments with references in place of secrets looked up;
    under other keys `env:…` is a text like any other."""
    return {
        key: from_environment(value, f"{where}: {key}") if isinstance(value, str) and KEY.fullmatch(key) else value
        for key, value in arguments.items()
    }


def redacted(text: str) -> str:
    """Return a text without secrets.

    Those are the values of secret variables of this process's environment, what looks like a token, and passwords in
    addresses.
    """
    held = {
        value for name, value in os.environ.items() if len(value) >= SHORTEST and is_secret(value, name, variable=True)
    }
    for value in sorted(held, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return PASSWORD.sub(rf"\1:{HIDDEN}@", VALUE.sub(HIDDEN, text))
