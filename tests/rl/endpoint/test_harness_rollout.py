"""A command as a harness: how it ends, what it leaves, and what it may reach."""

import json
import os
import signal
import subprocess
import sys
import urllib.request

import psutil
import pytest

from ptf.data.trajectory import NoResult, Reward
from ptf.rl.endpoint.confined import CONFINED
from ptf.rl.loopback import unproxied
from ptf.rl.rewards.sandbox.syscalls import landlock_version
from tests.rl.endpoint.harnesses import play
from tests.rl.endpoint.served import Scripted
from tests.waiting import until

DAEMON = """
ask()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.closerange(0, 3)
        time.sleep(600)
    os._exit(0)
os.wait()
result(str(os.getpid()))
"""
ENDS = {  # program: the reason of no result
    "ask(); sys.exit(3)": "status 3",
    "ask(); raise KeyError('price')": "KeyError: 'price'",
    "ask(); os.kill(os.getpid(), signal.SIGSEGV)": "status 139",
    "pass": "received no response from the policy",
    "ask(); result('x' * (1 << 21))": "more than 1048576 bytes",
    "ask(); os.symlink('/etc/hostname', os.environ['PTF_RESULT'])": "cannot be read",
    "ask(); os.mkfifo(os.environ['PTF_RESULT'])": "no regular file",
    "ask(); os.mkdir(os.environ['PTF_RESULT'])": "no regular file",
    "ask(model='gpt-5')": "HTTP Error 404",
}


def descendants(marker):
    """Return the processes whose command line holds a text."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(marker in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_harness_that_fails_has_no_result(tokenizer):
    trajectories = play(Scripted(tokenizer), tokenizer, list(ENDS))
    for t, reason in zip(trajectories, ENDS.values(), strict=True):
        assert isinstance(t.outcome, NoResult)
        assert reason in t.outcome.reason


def test_what_a_harness_writes_is_what_the_reward_sees(tokenizer):
    written, nothing, early = play(
        Scripted(tokenizer, lambda i: "same answer"),
        tokenizer,
        ["ask(); result('the result')", "ask()", "result('early'); ask(); sys.stderr.write('e' * 300000)"],
    )
    assert [t.text for t in (written, nothing, early)] == ["the result", "same answer", "early"]
    assert [t.outcome for t in (written, nothing, early)] == [None] * 3  # `reward` gives it
    assert all(len(t.generations) == 1 for t in (written, nothing, early))


def test_a_harness_that_hangs_is_ended_with_all_that_it_started(tokenizer):
    marker = f"mark-{os.getpid()}"
    hang = f"ask(); import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True); '{marker}'\n"
    (t,) = play(Scripted(tokenizer), tokenizer, [hang + "time.sleep(600)"], timeout_s=2.0)
    assert isinstance(t.outcome, NoResult)
    assert "did not end within 2 s" in t.outcome.reason
    assert descendants(marker) == []
    assert not [p for p in psutil.Process().children(recursive=True) if "sleep" in p.cmdline()]


def test_a_daemon_of_a_harness_ends_with_it(tokenizer):
    marker = f"daemon-{os.getpid()}"
    (t,) = play(Scripted(tokenizer), tokenizer, [DAEMON + f"'{marker}'"])
    assert t.text.isdigit()
    assert descendants(marker) == []


def test_a_command_ends_when_its_parent_is_killed(tmp_path):
    """The parent gets no chance to end anything; the command has a process in a session of its own."""
    command = "import os, subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    command += f"; open({str(tmp_path / 'ready')!r}, 'w').close(); time.sleep(600)"
    start = "import os, subprocess, sys, time; subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid()), "
    start += "sys.argv[3], sys.executable, '-c', sys.argv[2]]); time.sleep(600)"
    (place := tmp_path / "place").mkdir()
    parent = subprocess.Popen([sys.executable, "-c", start, CONFINED, command, str(place)])
    try:
        until((tmp_path / "ready").exists, 60)
        below = psutil.Process(parent.pid).children(recursive=True)
        assert len(below) == 3
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    _, alive = psutil.wait_procs(below, timeout=20)
    assert alive == []
    assert not place.exists()


SPY = """
ask()
def tried(attempt):
    try:
        return attempt()
    except OSError as error:
        return type(error).__name__
above = int(next(line for line in open(f"/proc/{os.getppid()}/status") if line.startswith("PPid")).split()[1])
result(json.dumps({
    "environment": dict(os.environ),
    "task": task,
    "environ": [str(tried(lambda pid=pid: open(f"/proc/{pid}/environ", "rb").read())) for pid in (os.getppid(), above)],
    "memory": [str(tried(lambda pid=pid: open(f"/proc/{pid}/mem", "rb").read(1))) for pid in (os.getppid(), above)],
    "files": [str(tried(lambda pid=pid: os.readlink(f"/proc/{pid}/fd/2"))) for pid in (os.getppid(), above)],
    "signal": tried(lambda: os.kill(above, 0)),
}))
"""


def test_a_harness_gets_what_it_needs_and_reaches_no_other_process(tokenizer, monkeypatch):
    secrets = {name: f"hidden {name}" for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "OTHER")}
    for name, value in {**secrets, "WANTED": "1"}.items():
        monkeypatch.setenv(name, value)
    (t,) = play(Scripted(tokenizer), tokenizer, [SPY], env_vars=["WANTED"])
    found = json.loads(t.text)
    allowed = {"PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "HOME", "TMPDIR", "PTF_RESULT", "WANTED", "LC_CTYPE"}
    allowed |= {"NO_PROXY", "no_proxy"}
    assert set(found["environment"]) <= allowed | {"OPENAI_BASE_URL", "OPENAI_API_KEY"}
    assert set(found["task"]) == {"messages", "shown", "seed"}
    assert "hidden" not in t.text
    if landlock_version():  # elsewhere a user's processes are open to each other (SECURITY.md)
        assert found["environ"] + found["memory"] + found["files"] == ["PermissionError"] * 6


@pytest.fixture
def proxied(monkeypatch):
    """The variables of a machine whose proxy does not answer."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "intranet.example")
    monkeypatch.delenv("no_proxy", raising=False)


def test_a_proxy_is_not_asked_for_the_endpoint(tokenizer, proxied):
    program = "ask(); result(os.environ['no_proxy'] + ' ' + os.environ['http_proxy'])"
    (t,) = play(Scripted(tokenizer), tokenizer, [program], env_vars=["http_proxy", "HTTP_PROXY"])
    assert t.text == "intranet.example,127.0.0.1,localhost,::1 http://127.0.0.1:9"


def asking(row, base_url, api_key, seed):
    body = json.dumps({"model": "policy", "messages": row["messages"]}).encode()
    request = urllib.request.Request(base_url + "/chat/completions", body, {"authorization": f"Bearer {api_key}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return float("choices" in json.loads(response.read()))


def test_a_proxy_is_not_asked_by_an_agent_in_this_process(tokenizer, proxied):
    harness = {"command": [], "columns": [], "agent": {"use": f"{__name__}:asking"}}
    (t,) = play(Scripted(tokenizer), tokenizer, [""], **harness)
    assert t.outcome == Reward(1.0)


@pytest.mark.parametrize(
    ("given", "entries"),
    [({}, []), ({"NO_PROXY": "a, b", "no_proxy": "b,::1"}, ["a", "b"]), ({"no_proxy": "*,a"}, None)],
)
def test_entries_of_the_user_are_kept(given, entries):
    made = unproxied(given)
    assert made["NO_PROXY"] == made["no_proxy"]
    assert set(made["NO_PROXY"].split(",")) == (
        {*entries, "127.0.0.1", "localhost", "::1"} if entries is not None else {"*"}
    )
