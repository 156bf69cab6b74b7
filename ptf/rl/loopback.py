"""Addresses of this machine, which are reached without a proxy."""

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")
NAMES = ("NO_PROXY", "no_proxy")  # libraries read one or the other


def unproxied(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a program reaches this machine without the proxy of its environment."""
    given = [entry.strip() for name in NAMES for entry in environment.get(name, "").split(",")]
    entries = dict.fromkeys([*filter(None, given), "127.0.0.1", "localhost", "::1"])
    return dict.fromkeys(NAMES, "*" if "*" in entries else ",".join(entries))


def mounts(url: str) -> dict[str, None] | None:
    """Return the `mounts` of an httpx client that asks this URL: no proxy if it is of this machine."""
    host = urlsplit(url).hostname or ""
    return {f"all://[{host}]" if ":" in host else f"all://{host}": None} if LOOPBACK.fullmatch(host) else None
