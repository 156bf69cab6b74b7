"""An agent's function in processes of another interpreter, which has nothing of ptf."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from ptf.config.plugin_checks import load_checked
from ptf.config.sections.rollout import HarnessConfig
from ptf.data.trajectory import NoResult, Prompt, Reward
from ptf.errors import UserError
from ptf.rl.endpoint.agent_process import STOPS_WITHIN_S
from ptf.rl.endpoint.harness_rollout import HarnessRollout
from ptf.rl.engines.protocol import Sampling
from ptf.rl.episodes import Episode, run_all
from ptf.rl.policy.policy import Limits
from tests.child import run_python
from tests.conftest import ROOT
from tests.rl.endpoint.served import Scripted
from tests.waiting import until

AGENTS = """
import asyncio, json, os, subprocess, sys, threading, time, urllib.request

try:
    import ptf, numpy
except ImportError:
    pass
else:
    raise RuntimeError("this is the interpreter of ptf")
print("imported")
together = threading.Barrier(2)
if os.path.exists("slow"):
    time.sleep(3)

def ask(base_url, api_key):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "a"}]}).encode()
    request = urllib.request.Request(base_url + "/chat/completions", body, {"authorization": "Bearer " + api_key})
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.loads(response.read())

def plain(row, base_url, api_key, seed, bonus=0):
    ask(base_url, api_key)
    print("a line of the agent")
    what = row["do"]
    if what == "meet":
        together.wait(10)
        return 0.5 + bonus
    if what == "exit":
        sys.exit(3)
    if what == "die" or (what == "die once" and not os.path.exists("died")):
        open("died", "w").close()
        os._exit(9)
    if what == "die once":
        return ask(base_url, api_key)["usage"]["completion_tokens"]
    if what == "hang":
        time.sleep(600)
    if what == "read":  # as a tool that reads its standard input
        return len(subprocess.run(["cat"], capture_output=True, timeout=5).stdout)
    if what == "pid":
        return os.getpid()
    return {"reward": 0.25, "none": None, "true": True, "text": "1", "seed": seed}[what]

async def coroutine(row, base_url, api_key, seed):
    await asyncio.to_thread(ask, base_url, api_key)
    if row["do"] == "hang":
        await asyncio.sleep(600)
    return os.getpid() if row["do"] == "pid" else 0.75

def counts(row, base_url, api_key, seed, seen):
    import installed
    ask(base_url, api_key)
    seen.append(row)
    return len(seen) + installed.BONUS

def idle(row, base_url, api_key, seed):
    return 1.0
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Return an interpreter without packages."""
    place = tmp_path_factory.mktemp("other")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    return str(place / "bin" / "python")


@pytest.fixture
def harness(tmp_path, tokenizer, python, monkeypatch):
    """Return a function that makes the play of an agent of `AGENTS`."""
    (tmp_path / "their_agents.py").write_text(AGENTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = []

    def make(name, args=None, **more):
        agent = {"use": f"their_agents:{name}", "args": args or {}}
        made.append(HarnessRollout(HarnessConfig(agent=agent, python=python, **more), tokenizer))
        return made[-1]

    yield make
    for play in made:
        play.close()
        assert all(process.process.poll() is not None for process in play.processes.processes)


def outcomes(*args, **more):
    """Return what becomes of episodes that are played at once."""
    found = [t.outcome for t in trajectories(*args, **more)]
    return [outcome.value if isinstance(outcome, Reward) else outcome for outcome in found]


def trajectories(harness, tokenizer, what, timeout_s=20.0):
    """Return episodes that are played at once."""
    limits, episodes = Limits(Sampling(50, 1.0, tokenizer.stop_ids), 4000), []
    for i, do in enumerate(what):
        prompt = Prompt(np.array([9], np.int32), {"messages": [], "do": do}, "a", i)
        seeds = lambda number, i=i: 1000 * i + number + 1  # noqa: E731
        episodes.append(Episode(prompt, limits, tokenizer, seeds, harness, timeout_s=timeout_s))
    return asyncio.run(run_all(Scripted(tokenizer), episodes))


def test_episodes_are_played_at_once_in_one_process(harness, tokenizer):
    play = harness("plain", {"bonus": 0.125})
    assert outcomes(play, tokenizer, ["meet", "meet", "reward", "none"]) == [0.625, 0.625, 0.25, None]
    first, second = outcomes(play, tokenizer, ["pid", "pid"])
    assert first == second != os.getpid()
    a, b = outcomes(play, tokenizer, ["seed", "seed"])
    assert b - a == 1000
    assert outcomes(play, tokenizer, ["pid"]) == [first]


def test_an_agent_has_arguments_of_its_own_and_its_files_hide_no_installed_module(
    harness, tokenizer, python, tmp_path, monkeypatch
):
    (packages,) = Path(python).parents[1].glob("lib/*/site-packages")
    (packages / "installed.py").write_text("BONUS = 0.5\n")
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "installed.py").write_text("BONUS = 0\n")
    monkeypatch.setenv("PTF_PLUGIN_PATH", str(tmp_path / "beside"))
    assert outcomes(harness("counts", {"seen": []}), tokenizer, ["a", "b"]) == [1.5, 1.5]


def test_episodes_are_divided_over_the_processes(harness, tokenizer):
    play = harness("plain", processes=2)
    assert len(set(outcomes(play, tokenizer, ["pid"] * 4))) == 2


def test_an_agent_that_fails_has_no_result(harness, tokenizer):
    found = outcomes(harness("plain"), tokenizer, ["text", "other", "exit", "reward", "true"])
    assert found[3:] == [0.25, 1.0]
    for outcome, reason in zip(found, ["returned a str", "their_agents.py:", "SystemExit: 3"], strict=False):
        assert isinstance(outcome, NoResult)
        assert reason in outcome.reason
    (outcome,) = outcomes(harness("idle"), tokenizer, ["reward"])
    assert "received no response" in outcome.reason


@pytest.mark.long
def test_episodes_of_a_process_that_dies_are_played_again_once(harness, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # of the agents
    play = harness("plain")
    again, other = trajectories(play, tokenizer, ["die once", "hang"], timeout_s=10.0)
    assert isinstance(again.outcome, Reward), again.outcome
    assert again.counts["played_again"] == 1
    assert "did not end within 10 s" in other.outcome.reason
    assert len(again.generations) == 2  # those of the second time alone
    hangs, dies = outcomes(play, tokenizer, ["hang", "die"])
    for outcome in (hangs, dies):
        assert isinstance(outcome, NoResult)
        assert "ended with status 9" in outcome.reason
    assert outcomes(play, tokenizer, ["reward"]) == [0.25]


def test_what_an_agent_starts_reads_no_tasks(harness, tokenizer):
    assert outcomes(harness("plain"), tokenizer, ["read", "read", "reward", "reward"]) == [0, 0, 0.25, 0.25]


def test_a_replacement_that_starts_slowly_is_waited_for(harness, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    play = harness("plain")
    (tmp_path / "slow").touch()
    (dies,) = outcomes(play, tokenizer, ["die"], timeout_s=1.5)
    assert isinstance(dies, NoResult)
    (late,) = outcomes(play, tokenizer, ["reward"], timeout_s=1.0)
    assert "did not end within 1 s" in late.reason
    assert outcomes(play, tokenizer, ["reward"]) == [0.25]


@pytest.mark.parametrize(("name", "same"), [("plain", False), ("coroutine", True)])
def test_an_agent_that_hangs_is_ended(harness, tokenizer, name, same):
    """A coroutine is cancelled; a thread cannot be, so its process is replaced when nothing else is in it."""
    play = harness(name)
    (before,) = outcomes(play, tokenizer, ["pid"])
    hangs, other = outcomes(play, tokenizer, ["hang", "pid"], timeout_s=1.5)
    assert "did not end within 1.5 s" in hangs.reason
    assert other == before
    time.sleep(STOPS_WITHIN_S)
    (after,) = outcomes(play, tokenizer, ["pid"])
    assert (after == before) is same
    assert psutil.pid_exists(int(before)) is same


def test_wrong_agents_and_interpreters_are_refused(harness, tokenizer, python):
    with pytest.raises(UserError, match="has no attribute 'missing'"):
        harness("missing")
    with pytest.raises(UserError, match="No module named 'nothing'"):
        HarnessRollout(HarnessConfig(agent={"use": "nothing:agent"}, python=python), tokenizer)
    with pytest.raises(UserError, match="there is no program /nothing/python"):
        HarnessRollout(HarnessConfig(agent={"use": "a:b"}, python="/nothing/python"), tokenizer)
    with pytest.raises(UserError, match="this is the interpreter of ptf"):
        HarnessRollout(HarnessConfig(agent={"use": "their_agents:plain"}, python=sys.executable), tokenizer)
    assert not [p for p in psutil.Process().children(recursive=True) if "agent_program" in " ".join(p.cmdline())]


def test_a_config_s_agent_is_not_imported_here(tmp_path):
    base = "recipe: grpo\nmodel: {path: m}\ndata: {sources: {a: {path: a.jsonl, kind: prompt}}}\n"
    base += "train: {steps: 1, lr: 1e-3}\nrollout:\n  harness:\n"
    own, other = tmp_path / "own.yaml", tmp_path / "other.yaml"
    own.write_text(base + '    agent: {use: "nothing_here:agent"}\n')
    other.write_text(base + '    agent: {use: "nothing_here:agent"}\n    python: python3\n')
    with pytest.raises(UserError, match="no module 'nothing_here'"):
        load_checked(own)
    assert load_checked(other).rollout.harness.python == "python3"
    with pytest.raises(UserError, match=r"limits rollout\.environment; rollout\.harness decides"):
        load_checked(other, overrides=["rollout.max_turns=3"])
    with pytest.raises(UserError, match="a command names its own interpreter"):
        load_checked(other, overrides=["rollout.harness.agent=null", "rollout.harness.command=[agent]"])


@pytest.mark.parametrize(
    ("lines", "key", "message"),
    [
        (
            "def agent(row, base_url, api_key): ...",
            "harness: {agent",
            r"does not take \(row, base_url, api_key, seed\)",
        ),
        ("def agent(row, base_url, api_key, seed, *, must): ...", "harness: {agent", "missing a required"),
        ("def agent(prompt, policy): ...", "play", "is no coroutine function: write `async def`"),
        ("async def agent(prompt): ...", "play", r"does not take \(prompt, policy\)"),
    ],
)
def test_what_cannot_be_called_is_found_before_the_run(tmp_path, lines, key, message):
    name = f"theirs_{abs(hash(lines))}"
    (tmp_path / f"{name}.py").write_text(lines + "\n")
    config = tmp_path / "job.yaml"
    config.write_text(
        "recipe: grpo\nmodel: {path: m}\ndata: {sources: {a: {path: a.jsonl, kind: prompt}}}\n"
        f'train: {{steps: 1, lr: 1e-3}}\nrollout:\n  {key}: {{use: "{name}:agent"}}{"}" * key.count("{")}\n'
    )
    with pytest.raises(UserError, match=message):
        load_checked(config)


KILLED = """
import os, signal, sys
from ptf.config.sections.rollout import HarnessConfig
from ptf.rl.endpoint.agent_process import AgentProcess
process = AgentProcess(HarnessConfig(agent={"use": "tests.rl.plugs:agent"}, python=sys.executable))
if sys.argv[1] == "ready":
    process.wait_until_ready()
print(process.place, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["ready", "starting"])
def test_a_run_that_is_killed_leaves_no_directory_of_its_agents(when):
    for _ in range(4):  # the process may hear of it by its input or by a signal
        killed = run_python("-c", KILLED, when, cwd=ROOT, timeout=60)
        place = Path(killed.stdout.strip())
        assert place.name.startswith("ptf-agent-")
        until(lambda place=place: not place.exists(), 20)
