"""`python -m tests.rl.as_user UID COMMAND…`: as root, run a command as a user without rights, who can read the
interpreter and this tree even where they lie in root's home. `UID` 0 stays root, without the capability that namespaces
need, as in most containers. Nothing of the machine changes."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from ptf.rl.rewards.sandbox.run_tests import find_mode

CAP_SYS_ADMIN = 21
USER = "54321"


def in_mode(mode: str, *command: str) -> list[str]:
    """Return the command line that runs a command as a user for whom the sandbox has this mode."""
    if os.getuid() or mode == "uid+namespaces":
        return [sys.executable, *command]
    return [sys.executable, "-m", "tests.rl.as_user", "0" if mode == "uid" else USER, sys.executable, *command]


def works(mode: str) -> bool:
    if (mode.startswith("uid") and os.getuid()) or (
        mode != "uid" and not os.getuid() and find_mode() != "uid+namespaces"
    ):
        return False
    tried = f"from ptf.rl.rewards.sandbox.run_tests import try_mode\nassert try_mode({mode!r}).value == 1.0"
    return subprocess.run(in_mode(mode, "-c", tried), capture_output=True, check=False).returncode == 0


def readable(path: Path) -> None:
    """Let everybody reach it in this mount namespace: of directories on the way that only root may enter,
    another stands in their place."""
    from ptf.rl.rewards.sandbox.cells import BIND, RECURSIVE, _mount

    for above in reversed(path.parents):
        if not above.stat().st_mode & 0o001:
            place = os.open(path, os.O_PATH)
            _mount("tmpfs", str(above), "tmpfs", 0, "mode=755")
            path.mkdir(parents=True)
            _mount(f"/proc/self/fd/{place}", str(path), None, BIND | RECURSIVE)
            os.close(place)


def main() -> None:
    from ptf.rl.rewards.sandbox.cells import LIBC, PRIVATE, RECURSIVE, _mount, checked

    uid, *command = sys.argv[1:]
    checked(LIBC.unshare(0x20000), "unshare")
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    places = (Path(os.path.realpath(path)) for path in (sys.base_prefix, sys.prefix, Path(__file__).parents[2]))
    for path in sorted(places, key=lambda path: len(path.parts)):  # what lies in another comes with it
        readable(path)
    os.environ |= {"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    if int(uid):
        os.setgroups([])
        os.setresgid(*[int(uid)] * 3)
        os.setresuid(*[int(uid)] * 3)
    else:
        held = int(Path("/proc/self/status").read_text().split("CapPrm:")[1].split()[0], 16) & ~(1 << CAP_SYS_ADMIN)
        low, high = held & 0xFFFFFFFF, held >> 32
        checked(LIBC.prctl(24, CAP_SYS_ADMIN, 0, 0, 0), "drop a capability")
        checked(
            LIBC.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)),
            "capset",
        )
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
