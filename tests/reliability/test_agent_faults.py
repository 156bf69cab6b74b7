"""A run goes on when the program of an agent, its process, or the judge of its answers fails in mid-episode, and all
other episodes have the rewards that they would have had; when the engine fails, the run ends and may be continued."""

import gc
import json
import sys

import pytest
import yaml

from ptf.compute.tracking import read_metrics
from ptf.config import loads
from ptf.rl.engines.native import NativeEngine
from ptf.run import run
from tests.conftest import ROOT
from tests.rl.rewards.loopback import Reply, serving
from tests.tiny import arithmetic, online
from tests.train.test_loop import facts

STEPS, PROMPTS, GROUP = 3, 4, 4
PROGRAM = """
import json, os, signal, sys, urllib.request
task = json.loads(sys.stdin.readline())
body = json.dumps({"model": "policy", "messages": task["messages"]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
json.loads(urllib.request.urlopen(request, timeout=60).read())
if len(sys.argv) > 1 and task["seed"] % 4 == 0:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a function that runs a GRPO of agents with a section `rollout`, and returns what it made."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    raw = online(arithmetic(tmp_path), tmp_path, "", prompts_per_step=PROMPTS, group_size=GROUP)
    raw |= {"checkpoint": {"every": 1}}
    raw["track"] = {"tensorboard": False, "samples_every": 1, "sample_prompts": PROMPTS}
    raw["train"] |= {"steps": STEPS, "deterministic": True}

    def made(name, **rollout):
        usual = raw["rollout"]
        run(loads(yaml.safe_dump({**raw, "rollout": {**usual, "max_no_result_share": 0.6, **rollout}})), name)
        place = tmp_path / "runs" / name
        return facts(place), read_metrics(place / "samples.jsonl"), (place / "model" / "model.safetensors").read_bytes()

    return made


def of_first_step(samples):
    return [row for row in samples if row["step"] == min(row["step"] for row in samples)]


def compared(whole, disturbed):
    """Return the shares of answers of the first step without a result; all others have the rewards of the whole run."""
    pairs = list(zip(of_first_step(whole), of_first_step(disturbed), strict=True))
    assert len(pairs) == PROMPTS * GROUP
    assert all(a["response"] == b["response"] for a, b in pairs)
    assert all(a["reward"] == b["reward"] for a, b in pairs if b["reward"] is not None)
    return sum(b["reward"] is None for _, b in pairs) / len(pairs)


@pytest.mark.long
def test_a_program_that_is_killed_leaves_the_others_their_results(job):
    reward = {"use": "tests.rl.plugs:by_length"}
    _, whole, _ = job("whole", harness={"command": [sys.executable, "-c", PROGRAM]}, reward=reward)
    command = [sys.executable, "-c", PROGRAM, "kill"]
    rows, disturbed, _ = job("killed", harness={"command": command}, reward=reward)
    assert len(rows) == STEPS
    assert 0 < compared(whole, disturbed) < 0.6
    assert rows[0]["no_result_share"] == compared(whole, disturbed)


def test_a_process_of_agents_that_is_killed_is_made_good(job, tmp_path):
    def played(name):
        agents = {"use": "tests.rl.plugs:agent_killed_once", "args": {"place": str(tmp_path)}}
        return job(name, harness={"agent": agents, "python": sys.executable})

    (tmp_path / "killed").touch()
    whole = played("whole")
    (tmp_path / "killed").unlink()
    rows, samples, model = played("killed")
    assert (tmp_path / "killed").exists()
    assert rows[0]["episode/played_again"] > 0
    assert rows[0]["no_result_share"] == 0
    assert compared(whole[1], samples) == 0
    assert (samples, model) == whole[1:]


@pytest.mark.long
def test_a_judge_that_is_gone_for_some_answers_leaves_the_others_their_results(job):
    def score(number, body):
        answer = body["messages"][0]["content"]
        if gone and number % 5 == 0:
            return Reply(closes=True)
        form = answer.rpartition("\\boxed{SCORE, ")[2].partition("}")[0]
        said = f"\\boxed{{{len(answer) % 10}, {form}}}"
        return Reply({"choices": [{"message": {"content": said}, "finish_reason": "stop"}]})

    def judged(name, retries):
        args = {"url": server.url, "model": "judge", "prompt": "{response}", "wait_s": 0.01, "retries": retries}
        judge = {"use": "ptf.rl.rewards.judge_reward:JudgeReward", "args": args}
        return job(name, harness={"agent": {"use": "tests.rl.plugs:asks_once"}}, reward=judge, reward_retries=0)

    with serving(score) as server:
        gone = False
        whole = judged("whole", 3)
        gone = True
        again = judged("again", 3)
        _, lost, _ = judged("lost", 0)
    assert again[1:] == whole[1:]
    assert 0 < compared(whole[1], lost) < 0.6


@pytest.mark.long
def test_an_engine_that_fails_in_mid_episode_ends_a_run_that_continues_to_the_same_bits(job, monkeypatch):
    harness = {"agent": {"use": "tests.rl.plugs:agent"}, "python": sys.executable}
    whole = job("whole", harness=harness)
    answer, asked = NativeEngine.answer, []

    def failing(self, requests):
        asked.append(len(requests))
        if len(asked) == 4:  # the second turns of the second step
            raise MemoryError("no room for the cache")
        return answer(self, requests)

    monkeypatch.setattr(NativeEngine, "answer", failing)
    said = ""
    try:
        job("broken", harness=harness)
    except Exception as error:
        said = str(error)
    gc.collect()  # the frames of the error hold the run's sockets
    assert "no room for the cache" in said
    assert len(asked) == 4
    monkeypatch.setattr(NativeEngine, "answer", answer)
    assert json.dumps(job("broken", harness=harness)[0]) == json.dumps(whole[0])
