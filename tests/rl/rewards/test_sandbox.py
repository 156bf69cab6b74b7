"""Code that a model wrote, and the other rewards that come with ptf."""

import asyncio
import ctypes
import json
import os
import re
import signal
import socket
import struct
import subprocess
import tempfile
import textwrap
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ptf.config import Plugin
from ptf.data.trajectory import NoResult, Reward
from ptf.errors import UserError
from ptf.rl.rewards.functions import brevity, code, exact, mathematics
from ptf.rl.rewards.sandbox import plain, remote, syscalls
from ptf.rl.rewards.sandbox.cells import MODES
from ptf.rl.rewards.sandbox.run_tests import find_mode, run_tests, sandbox_line
from ptf.rl.rewards.scoring import RewardWorkers
from tests.rl.as_user import in_mode, works
from tests.rl.code_corpus import CHEATS, HONEST, NUMPY, SLEEPER, SLEEPING, left_behind
from tests.waiting import until

SQUARE = "```python\ndef f(x):\n    return x * x\n```"
DOUBLE_FORK = (
    "import os\nif not os.fork():\n    os.setsid()\n"
    f"    if not os.fork(): os.execv('/bin/sleep', ['sleep', '{SLEEPER}'])\n    os._exit(0)\n"
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (SQUARE, 1),
        ("def f(x): return x ** 2", 1),
        (SQUARE.replace("x * x", "x + x"), 0),
        ("def f(x)", 0),
        ("```python\nwrong\n```\nno:\n" + SQUARE, 1),
        (SQUARE.replace("python", "Python"), 1),
        ("import sys\nsys.exit(0)", 0),
        ("def f(x): return 0\nif 0: \\", 0),
        ("class E:\n    def __eq__(self, other): return True\ndef f(x): return E()", 0),
        ("", 0),
    ],
)
def test_code(text, value):
    assert asyncio.run(code({"tests": "assert f(3) == 9"}, text)) == value
    assert asyncio.run(code({"tests": ["assert f(3) == 9", "assert f(0) == 0"]}, text)) == value


@pytest.mark.parametrize(("asked_mib", "value"), [(200, 1), (1200, 0)])
def test_a_response_has_as_much_memory_as_it_is_given(asked_mib, value):
    answer = f"def f(x):\n    return len(bytearray({asked_mib} << 20)) and x * x"
    assert asyncio.run(code({"tests": "assert f(3) == 9"}, answer, memory_mib=1024)) == value


class InPieces:
    """A socket that has received messages, of which it gives a few bytes at a time."""

    def __init__(self, received: bytes) -> None:
        self.received = received

    def sendall(self, data: bytes) -> None:
        self.received += data

    def recv(self, most: int) -> bytes:
        given, self.received = self.received[: min(most, 7)], self.received[min(most, 7) :]
        return given


def test_messages_that_arrive_together_and_in_pieces_are_read_one_by_one():
    source: Any = InPieces(b"")
    messages = [["value", "x" * 30], ["raise", 1], [], {"a": None}]
    for message in messages:
        plain.send(source, message)
    assert [plain.receive(source) for _ in messages] == messages
    with pytest.raises(EOFError, match="the other side is gone"):
        plain.receive(source)


def test_after_a_fault_nothing_more_is_asked_of_a_response():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = remote.Link(ours)
        with pytest.raises(remote.AnswerFault, match="the first"):
            link.failed("the first")
        ours.settimeout(1)
        with pytest.raises(remote.AnswerFault, match="the first"):
            link.ask("load")
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


def test_a_secret_in_a_frame_pays_nothing():
    """A pass that is a word which the program says at its end can be said by the answer,
    which finds it in the caller's frame."""
    answer = """
        import os, sys
        def f(x):
            strings = [c for c in sys._getframe(1).f_code.co_consts if isinstance(c, str)]
            open([c for c in strings if c.endswith('said')][0], 'w').write([c for c in strings if len(c) == 32][0])
            os._exit(0)
    """
    assert asyncio.run(code({"tests": "assert f(3) == 9"}, textwrap.dedent(answer))) == 0


@pytest.mark.parametrize(
    "tests",
    [[], "", "# none", None, {"f": 9}, [9], "f(3)", "assert True", "f(", "import no_such_module\nassert f(3) == 9"],
)
def test_tests_that_judge_nothing_are_errors_and_no_pass(tests):
    with pytest.raises(ValueError, match="tests"):
        asyncio.run(code({"tests": tests}, SQUARE))


NEEDS = {
    "uid+namespaces": "it needs root that may make namespaces",
    "uid": "it needs root that may not make namespaces, as in most containers, and user ids that nobody has",
    "namespaces": "it needs a kernel that gives users namespaces (sysctl kernel.unprivileged_userns_clone=1)",
    "bubblewrap": "install bubblewrap (bwrap)",
    "subreaper": "it needs Linux",
}


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_no_cheat_is_paid_and_every_honest_form_is(mode):
    """In the mode that this machine's users get; every third of them in the others (`make bench-code`: all)."""
    if not works(mode):
        assert mode != find_mode()
        pytest.skip(f"this machine has no mode {mode}: {NEEDS[mode]}")
    every = 1 if mode == find_mode() else 3
    done = subprocess.run(
        in_mode(mode, "-m", "tests.rl.code_corpus", mode, str(every)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: paid for name, paid in found["cheats"].items() if paid not in (0.0, None)} == {}
    assert {name: paid for name, paid in found["honest"].items() if paid != 1.0} == {}
    assert found["left"] == []
    assert len(found["cheats"]) == len(CHEATS[::every]) >= 40 // every
    honest = [one for one in [*HONEST, *NUMPY][::every] if not one.processes]
    assert len(found["honest"]) >= len(honest) >= 20 // every


def output(mode: str, *arguments: str) -> str:
    """Run Python as a user for whom the sandbox has this mode; return what it printed."""
    command = in_mode(mode, *map(textwrap.dedent, arguments))
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


def test_escapes_are_paid_where_they_succeed():
    """The control: without seccomp and Landlock the subreaper's cells leak."""
    names = [
        "reads the data set",
        "writes outside",
        "connects by TCP",
        "connects by a socket of Unix",
        "signals a process outside",
        "limits another process",
    ]
    said = output("uid+namespaces", "-m", "tests.rl.code_corpus", "unfiltered", *names)
    assert json.loads(said) == dict.fromkeys(names, 1.0)


def open_to_all(directory: Path) -> Path:
    directory.chmod(0o777)
    for above in directory.parents[:3]:
        above.chmod(above.stat().st_mode | 0o011)  # of these tests alone
    return directory


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_process_that_is_left_would_be_found():
    with subprocess.Popen(["sleep", SLEEPER]) as process:
        until(lambda: left_behind(SLEEPING), 20)  # a process has a command line a moment after it was started
        process.kill()


def test_without_any_filter_what_is_left_is_swept(tmp_path):
    """The subreaper alone: no seccomp, no Landlock, a session and a program of its own."""
    script = f"""
        import asyncio
        from ptf.rl.rewards.sandbox.run_tests import run_tests
        print(asyncio.run(run_tests({DOUBLE_FORK + SQUARE[10:-4]!r}, "assert f(3) == 9", mode="subreaper",
                                filtered=False)).value)
    """
    assert output("subreaper", "-c", script).split() == ["1.0"]
    until(lambda: not left_behind(SLEEPING), 30)


@pytest.mark.long
@pytest.mark.parametrize("mode", [*(["uid+namespaces", "uid"] if os.getuid() == 0 else []), "namespaces", "subreaper"])
@pytest.mark.parametrize("who", ["caller", "harness"])
def test_whoever_is_killed_leaves_nothing(mode, who, tmp_path):
    if not works(mode):
        pytest.skip(f"this machine has no mode {mode}: {NEEDS[mode]}")
    script = f"""
        import asyncio, tempfile
        tempfile.tempdir = {str(open_to_all(tmp_path))!r}
        from ptf.rl.rewards.sandbox.run_tests import run_tests
        asyncio.run(run_tests({DOUBLE_FORK + "import time; time.sleep(600)"!r}, "assert f(3) == 9", mode={mode!r},
                          seconds=100.0, filtered={mode != "subreaper"}))
    """
    caller = subprocess.Popen(in_mode(mode, "-c", textwrap.dedent(script)), stderr=subprocess.DEVNULL)
    while not left_behind(SLEEPING):
        assert caller.poll() is None
        time.sleep(0.02)
    if who == "caller":
        caller.kill()
        caller.wait()
    else:
        (harness,) = [pid for pid in left_behind(str(tmp_path)) if parent(pid) == caller.pid]
        os.kill(harness, signal.SIGKILL)
        caller.wait()
    if who == "caller" or "namespaces" in mode:  # without them nothing outlives the harness to end what has left it
        until(lambda: not left_behind(str(tmp_path)), 30)
        until(lambda: not left_behind(SLEEPING), 30)
        assert list(tmp_path.iterdir()) == []
    for pid in left_behind(SLEEPING):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("killed", [False, True])
def test_a_cell_does_not_start_once_the_process_outside_it_was_killed(killed):
    """Killed in the moment between the fork and the call by which the child asks to end with its parent, which a
    pause makes long here."""
    if not works("namespaces"):
        pytest.skip(f"this machine has no mode namespaces: {NEEDS['namespaces']}")
    script = f"""
        import os, signal, socket, time
        from pathlib import Path
        from ptf.rl.rewards.sandbox import cells
        from ptf.rl.rewards.sandbox.run_tests import directories
        fork_and_wait = cells._fork_and_wait
        def slowly(held):
            fork_and_wait(held)
            time.sleep(1)
        cells._fork_and_wait = slowly
        ours, theirs = socket.socketpair()
        troubled, trouble = os.pipe()
        readable, path = directories()
        cell = cells.Cell("namespaces", 9.0, 512, 32, 16, readable, path)
        pid = cells.start(cell, lambda link: link.sendall(b"served"), [theirs], trouble)
        theirs.close()
        os.close(trouble)
        while not Path(f"/proc/{{pid}}/task/{{pid}}/children").read_text():
            time.sleep(0.001)
        if {killed}:
            os.kill(pid, signal.SIGKILL)
        print(ours.recv(10), os.read(troubled, 1000))
    """
    assert output("namespaces", "-c", script) == ("b'' b''\n" if killed else "b'served' b''\n")


def test_strict_refuses_a_machine_without_namespaces():
    script = """
        from ptf.errors import UserError
        from ptf.rl.rewards.sandbox import syscalls
        from ptf.rl.rewards.sandbox.run_tests import sandbox_line
        syscalls.NUMBERS = {"unshare": syscalls.NUMBERS["unshare"]}
        syscalls.forbid(alone=False)  # as where a container's profile forbids it
        print(sandbox_line("auto"))
        try:
            sandbox_line("strict")
        except UserError as error:
            print(error)
    """
    weak, refused = output("subreaper", "-c", script).splitlines()
    assert weak.startswith("code sandbox: processes of this user, swept afterwards")
    assert "sandbox: strict refuses that" in refused


def test_the_first_lines_say_what_confines_code(capsys):
    parts = [{"use": "ptf.rl.rewards:code", "args": {"sandbox": "auto"}}]
    RewardWorkers(Plugin(use="ptf.rl.rewards:weighted", args={"parts": parts})).close()
    assert capsys.readouterr().out == f"{sandbox_line('auto')}\n"
    with pytest.raises(UserError, match="auto or strict"):
        RewardWorkers(Plugin(use="ptf.rl.rewards:code", args={"sandbox": "none"}))


def test_answers_are_judged_many_at_once_and_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(open_to_all(tmp_path)))  # in the command line of each judgement
    row = {"tests": "assert f(3) == 9"}
    texts = [SQUARE, "", "def f(x): return 9", "x", SQUARE] * 2
    with closing(RewardWorkers(Plugin(use="ptf.rl.rewards:code"), timeout_s=60.0, retries=0)) as made:
        found = made.score([(row, text) for text in texts] + [({"tests": ""}, SQUARE)])
    assert found[:-1] == [Reward(1.0), Reward(0.0), Reward(1.0), Reward(0.0), Reward(1.0)] * 2
    assert found[-1] == NoResult("ValueError: there are no tests")
    until(lambda: not left_behind(str(tmp_path)), 30)


def test_an_asynchronous_reward_has_many_in_flight():
    together = Plugin(use="tests.rl.plugs:together", args={"parties": 40})
    with closing(RewardWorkers(together, timeout_s=30.0, retries=0)) as made:
        assert made.score([({}, "a" * i) for i in range(40)]) == [Reward(float(i)) for i in range(40)]


@pytest.mark.parametrize(
    ("gold", "text", "value"),
    [
        ("1/2", r"so \boxed{0.5}", 1),
        ("42", "the answer is 41", 0),
        (r"\frac{1}{3}", "$\\frac{2}{6}$", 1),
        ("72", "#### 72", 1),
        ("72", "", 0),
    ],
)
def test_mathematics(gold, text, value):
    assert mathematics({"answer": gold}, text) == value


def test_a_gold_answer_may_follow_its_derivation():
    row = {"answer": "3 + 4 = <<3+4=7>>7\n#### 1,007"}
    assert mathematics(row, r"\boxed{1007}", after="####") == 1
    assert mathematics(row, r"\boxed{7}", after="####") == 0


def test_a_gold_answer_that_cannot_be_read_is_an_error_and_no_zero():
    with pytest.raises(ValueError, match="reads no expression"):
        mathematics({"answer": ""}, "3")


@pytest.mark.parametrize(("length", "value"), [(0, 0), (5, 0), (6, -0.2), (10, -1), (99, -1)])
def test_brevity(length, value):
    assert brevity({}, "a" * length, longest=10, margin=5) == pytest.approx(value)


def test_exact():
    assert exact({"answer": 7}, " 7\n") == 1
    assert exact({"answer": 7}, "7.0") == 0


@pytest.mark.parametrize(
    ("column", "header"),
    [(0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (1, "/usr/include/asm-generic/unistd.h")],
)
def test_numbers_of_system_calls_are_the_kernels(column, header):
    if not Path(header).exists():
        pytest.skip(f"no {header} on this machine")
    kernel = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\n", Path(header).read_text()))
    for name, numbers in (syscalls.NUMBERS | syscalls.ALONE).items():
        if numbers[column] is not None and name in kernel:
            assert numbers[column] == int(kernel[name]), name
    assert len((syscalls.NUMBERS | syscalls.ALONE).keys() & kernel.keys()) > 30


def filtered(program: bytes, number: int, argument: int = 0, architecture: int = 0xC000003E) -> int:
    """What the kernel does with a system call under a seccomp program (linux/filter.h, linux/seccomp.h)."""
    instructions = list(struct.iter_unpack("=HBBI", program))
    at, value, data = 0, 0, {0: number, 4: architecture, 16: argument}
    while True:
        operation, taken, otherwise, k = instructions[at]
        at += 1
        match operation:
            case 0x20:
                value = data[k]
            case 0x15:
                at += taken if value == k else otherwise
            case 0x35:
                at += taken if value >= k else otherwise
            case 0x45:
                at += taken if value & k else otherwise
            case 0x06:
                return k
            case _:
                raise AssertionError(f"no operation {operation:#x}")


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("machine", "column", "architecture"), [("x86_64", 0, 0xC000003E), ("aarch64", 1, 0xC00000B7)])
def test_the_filter_of_system_calls_refuses_what_it_names_and_nothing_else(
    monkeypatch, alone, machine, column, architecture
):
    given: list[bytes] = []

    def prctl(option: int, *arguments: Any) -> int:
        if option == 22:  # seccomp
            length, address = struct.unpack("@HxxxxxxP", arguments[1])
            given.append(ctypes.string_at(address, 8 * length))
        return 0

    monkeypatch.setattr(syscalls, "LIBC", SimpleNamespace(prctl=prctl))
    monkeypatch.setattr(syscalls.os, "uname", lambda: SimpleNamespace(machine=machine))
    syscalls.forbid(alone=alone)

    def does(number: int, argument: int = 0, on: int = architecture) -> int:
        return filtered(given[0], number, argument, on)

    allowed, killed, refused, unknown = 0x7FFF0000, 0x80000000, 0x50001, 0x50026
    named = {n[column] for n in [*syscalls.NUMBERS.values(), *(syscalls.ALONE.values() if alone else [])]} - {None}
    clone, clone3, prlimit = {"x86_64": (56, 435, 302), "aarch64": (220, 435, 261)}[machine]
    for number in range(600):
        if number not in (clone, clone3, prlimit):
            assert does(number) == (refused if number in named else allowed), number
    assert does(clone3) == unknown
    assert (does(prlimit, 0), does(prlimit, 17)) == (allowed, refused)
    assert does(clone, 0x10000000) == refused, "a user namespace"
    assert does(clone, 0x10000) == allowed, "a thread"
    assert does(clone, 17) == (refused if alone else allowed), "a process"
    assert does(1, on=0x40000003) == killed, "another architecture"
    assert does(0x40000001) == (killed if machine == "x86_64" else allowed), "x32"


def test_an_answer_that_ends_its_process_is_told_so_and_not_that_it_was_slow():
    """A copy of its socket, in the process of another cell, would hide its end until the time is over."""
    verdict = asyncio.run(run_tests("import os\ndef f(x): os._exit(0)", "assert f(3) == 9", seconds=15.0))
    assert (verdict.value, verdict.why) == (0.0, "the response's process ended")


def test_what_the_tests_await_is_computed_by_the_answer(monkeypatch):
    monkeypatch.setattr(remote, "_operate", lambda coroutine, what: (coroutine, what, 9))
    assert asyncio.run(remote._later("a coroutine")) == ("a coroutine", "await", 9)


def test_an_answer_may_write_in_its_own_directory():
    answer = (
        "import os, tempfile\ndef f(x):\n    open('here', 'w').write(str(x))\n"
        "    with tempfile.NamedTemporaryFile('w+') as file:\n        file.write(open('here').read())\n"
        "        file.seek(0)\n        return [file.read()]"
    )
    verdict = asyncio.run(run_tests(answer, "assert f(3)[0] == '3'", seconds=15.0))
    assert (verdict.value, verdict.why) == (1.0, "")


def test_system_calls_since_linux_5_1_have_one_number_everywhere():
    new = {name: both for name, both in (syscalls.NUMBERS | syscalls.ALONE).items() if max(filter(None, both)) >= 424}
    assert len(new) >= 8
    assert all(first == second for first, second in new.values()), new


def test_two_of_the_answers_objects_are_added_by_the_answer_and_a_value_of_the_tests_here(monkeypatch):
    monkeypatch.setattr(remote, "_operate", lambda first, name, second: (first, name, second))
    monkeypatch.setattr(remote, "_plain", lambda value: 5)
    one, other = (object.__new__(remote.Remote) for _ in range(2))
    first, name, second = remote._arithmetic("sub", reflected=False)(one, other)
    assert first is one
    assert name == "sub"
    assert second is other
    first, _, second = remote._arithmetic("sub", reflected=True)(one, other)
    assert first is other
    assert second is one
    assert remote._arithmetic("sub", reflected=False)(one, 3) == 2
    assert remote._arithmetic("sub", reflected=True)(one, 3) == -2
