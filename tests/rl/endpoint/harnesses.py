"""Harnesses for tests: programs that play one episode, and how they are played."""

import asyncio
import sys
from typing import Any

import numpy as np

from ptf.config.sections.rollout import HarnessConfig
from ptf.data.trajectory import Prompt, Trajectory
from ptf.rl.endpoint.harness_rollout import HarnessRollout
from ptf.rl.engines.protocol import Sampling
from ptf.rl.episodes import Episode, run_all
from ptf.rl.policy.policy import Limits

ASK = """
import json, os, sys, time, signal, urllib.request
task = json.loads(sys.stdin.readline())
def ask(path="/chat/completions", key=os.environ["OPENAI_API_KEY"], base=os.environ["OPENAI_BASE_URL"], **more):
    body = {"model": "policy", "messages": [{"role": "user", "content": "a"}], **more}
    headers = {"authorization": f"Bearer {key}"}
    request = urllib.request.Request(base + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.loads(response.read())
def result(text):
    open(os.environ["PTF_RESULT"], "w").write(text)
"""


def play(engine: Any, tokenizer: Any, programs: list[str], timeout_s: float = 20.0, **more: Any) -> list[Trajectory]:
    """Play one episode with each program, all at once."""
    limits = Limits(Sampling(50, 1.0, tokenizer.stop_ids), 4000)
    row = {"messages": [{"role": "user", "content": "a"}], "answer": "secret", "shown": "public"}
    episodes = []
    for i, program in enumerate(programs):
        command = [sys.executable, "-I", "-S", "-c", ASK + program]
        harness = HarnessRollout(HarnessConfig(**{"command": command, "columns": ["shown"], **more}), tokenizer)
        prompt = Prompt(np.array([9], np.int32), row, "a", i)
        seed_of = lambda number, i=i: 1000 * i + number + 1  # noqa: E731
        episodes.append(Episode(prompt, limits, tokenizer, seed_of, harness, timeout_s=timeout_s))
    return asyncio.run(run_all(engine, episodes))
