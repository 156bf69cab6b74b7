"""Code that a model wrote, and the other rewards that come with ptf."""

import time

import pytest

from ptf.rl.rewards import brevity, code, exact, mathematics, weighted
from ptf.rl.sandbox import run_python

SQUARE = "```python\ndef f(x):\n    return x * x\n```"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (SQUARE, 1),
        ("def f(x): return x ** 2", 1),
        (SQUARE.replace("x * x", "x + x"), 0),
        ("def f(x)", 0),
        ("```python\nwrong\n```\nno:\n" + SQUARE, 1),
        ("import sys\nsys.exit(0)", 0),  # an early end is no pass
        ("import os\nos._exit(0)", 0),
        ("", 0),
    ],
)
def test_code(text, value):
    assert code({"tests": "assert f(3) == 9"}, text) == value


@pytest.mark.parametrize(
    "source",
    ["while True: pass", "import time; time.sleep(60)", "x = bytearray(10**9)", "open('big', 'wb').write(bytes(10**8))",
     "import socket; socket.create_connection(('127.0.0.1', 9), 1)", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"],
)  # fmt: skip
def test_code_that_goes_too_far_does_not_pass(source):
    assert not run_python(source, seconds=1.0, memory_mib=256)


def test_it_sees_neither_our_environment_nor_our_directory(monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    assert run_python("import os\nassert 'SECRET' not in os.environ\nassert os.listdir() == []", seconds=4.0, memory_mib=256)


def test_what_it_started_ends_with_it(tmp_path):
    beat = tmp_path / "beat"
    beat.touch()
    source = f"import os, time\nif not os.fork():\n    for _ in range(100):\n        time.sleep(0.1)\n        open({str(beat)!r}, 'a').write('.')"
    assert run_python(source + "\n        pass\n    os._exit(1)", seconds=4.0, memory_mib=256)
    time.sleep(0.3)
    before = beat.read_text()
    time.sleep(0.5)
    assert beat.read_text() == before


@pytest.mark.parametrize(
    ("gold", "text", "value"),
    [("1/2", r"so \boxed{0.5}", 1), ("42", "the answer is 41", 0), (r"\frac{1}{3}", "$\\frac{2}{6}$", 1), ("72", "#### 72", 1), ("72", "", 0)],
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


def test_sums_of_rewards():
    parts = [{"use": "ptf.rl.rewards:exact", "weight": 2.0}, {"use": "ptf.rl.rewards:brevity", "args": {"longest": 10, "margin": 5}}]
    assert weighted({"answer": "12345"}, "12345", parts=parts) == 2.0
    assert weighted({"answer": "1234567"}, "1234567", parts=parts) == pytest.approx(2.0 - 0.4)
    with pytest.raises(KeyError):
        weighted({}, "1", parts=parts)


@pytest.mark.parametrize(("length", "value"), [(0, 0), (5, 0), (6, -0.2), (10, -1), (99, -1)])
def test_brevity(length, value):
    assert brevity({}, "a" * length, longest=10, margin=5) == pytest.approx(value)


def test_exact():
    assert exact({"answer": 7}, " 7\n") == 1
    assert exact({"answer": 7}, "7.0") == 0
