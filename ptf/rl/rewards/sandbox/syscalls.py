"""Restrictions of a confined process by the kernel: a seccomp filter, and Landlock's rules for files where there is no
mount namespace.

Both apply to a process and to all processes that it starts, need no privilege, and cannot be removed again.
"""

import ctypes
import os
import struct
from collections.abc import Sequence

LIBC = ctypes.CDLL(None, use_errno=True)
NUMBERS = {  # name: (x86_64, aarch64), from the kernel's tables; None: there is no such call
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "io_uring_setup": (425, 425),
    "open_by_handle_at": (304, 265),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "memfd_create": (319, 279),
    "mq_open": (240, 180),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
}
ALONE = {  # where files and processes are this user's own
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "fork": (57, None),
    "vfork": (58, None),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
}
CLONE, CLONE3, PRLIMIT = (56, 220), (435, 435), (302, 261)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH
CLONE_THREAD, NEW_NAMESPACES = 0x10000, 0x7E020000
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50001, 0x50000 | 38
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


def known() -> bool:
    """Whether this machine's numbers are known; without them there is no filter."""
    return os.uname().machine in MACHINES and struct.calcsize("P") == 8


def forbid(alone: bool) -> None:
    """Refuse the calls above, for ever: sockets, other processes' memory, mounts, memory that no limit counts. `alone`:
    signals, new processes and files' rights too."""
    column, architecture = MACHINES[os.uname().machine]
    program = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if column == 0:
        program += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]  # the x32 calls
    for numbers in [*NUMBERS.values(), *(ALONE.values() if alone else [])]:
        if numbers[column] is not None:
            program += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, EPERM)]
    program += [
        # its flags lie in memory; libraries then use clone
        (EQUAL, 0, 1, CLONE3[column]),
        (RETURN, 0, 0, ENOSYS),
        (EQUAL, 0, 4, PRLIMIT[column]),
        (LOAD, 0, 0, 16),
        (EQUAL, 0, 1, 0),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, EPERM),
        (EQUAL, 0, 5, CLONE[column]),
        (LOAD, 0, 0, 16),
        (ANY_BIT, 0, 1, NEW_NAMESPACES),
        (RETURN, 0, 0, EPERM),
    ]
    program += [(ANY_BIT, 1, 0, CLONE_THREAD), (RETURN, 0, 0, EPERM)] if alone else [(RETURN, 0, 0, ALLOW)] * 2
    program.append((RETURN, 0, 0, ALLOW))
    buffer = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
    given = struct.pack("@HxxxxxxP", len(program), ctypes.addressof(buffer))
    checked(LIBC.prctl(38, 1, 0, 0, 0), "no_new_privs")
    checked(LIBC.prctl(22, 2, given, 0, 0), "seccomp")


def landlock_version() -> int:
    """0 where the kernel has none."""
    return max(0, LIBC.syscall(444, None, ctypes.c_size_t(0), 1))


def restrict_files(readable: Sequence[str], writable: Sequence[str], version: int) -> None:
    """Deny access to all files, except reading and executing those in `readable`, and everything with those in
    `writable`."""
    every = (1 << (16 if version >= 5 else 15 if version >= 3 else 13 + version - 1)) - 1
    of_files, reading = every & 0b1100000000000111, 0b1101
    attributes = struct.pack("=QQQ", every, 3, 3)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    rules = checked(LIBC.syscall(444, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock_create_ruleset")
    for path, rights in [*((p, reading) for p in readable), *((p, every) for p in writable)]:
        place = os.open(path, os.O_PATH)
        allowed = struct.pack("=Qi", rights if os.path.isdir(path) else rights & of_files, place)
        checked(LIBC.syscall(445, rules, 1, allowed, 0), f"landlock_add_rule {path}")
        os.close(place)
    checked(LIBC.prctl(38, 1, 0, 0, 0), "no_new_privs")
    checked(LIBC.syscall(446, rules, 0), "landlock_restrict_self")
    os.close(rules)


def checked(result: int, what: str) -> int:
    """Return the result of a call of the kernel. Raises OSError if it failed."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result
