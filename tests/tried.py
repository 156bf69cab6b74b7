"""Rewards, environments and agents for trials, in a module that imports little: each trial starts processes with it."""

import asyncio
import json
import pathlib
import random
import urllib.request

from ptf.rl.environments.protocol import StepResult
from ptf.rl.rewards import scores_groups


def pays_silence(row, text):
    """A reward of short answers, which pays the empty one most."""
    return 1.0 / (1 + len(text))


def first_digit(row, text):
    """A reward that cannot read some rows: those whose answer begins with 3."""
    if str(row["answer"]).startswith("3"):
        raise LookupError(f"no key for {row['answer']}")
    return float(text[:1] == str(row["answer"])[:1])


def reads_nothing(row, text):
    raise LookupError("no key at all")


def prepares_pay(directory):
    """Prepared data: what is paid for a response."""
    pathlib.Path(directory, "pay.json").write_text("0.5")


def paid_by(row, text, *, path):
    """A reward that is read from a file of the prepared data."""
    return json.loads(pathlib.Path(path).read_text())


class Dice:
    """An environment of two turns, which says a number; `seeded` decides where it comes from."""

    def __init__(self, row, seed, seeded=True):
        self.row, self.turns = row, 0
        self.rng = random.Random(seed) if seeded else random.SystemRandom()

    def reset(self):
        return self.row["messages"]

    def step(self, text):
        self.turns += 1
        if self.turns == 2:
            return StepResult(reward=0.25, done=True)
        return StepResult([{"role": "user", "content": str(self.rng.randrange(10**9))}])


def agent(row, base_url, api_key, seed, *, seeded=True):
    """An agent of one call; without `seeded` it asks something else each time."""
    content = row["messages"][-1]["content"] + ("" if seeded else f"+{random.SystemRandom().randrange(10**9)}")
    body = {"model": "policy", "messages": [{"role": "user", "content": content}]}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as reply:
        answer = json.loads(reply.read())["choices"][0]["message"]["content"]
    return float(answer == content)


async def hangs_on_odd_prompts(prompt, policy):
    """A play of one answer, which never ends after some prompts."""
    await policy.generate(prompt.row["messages"])
    if prompt.index % 2:
        await asyncio.sleep(600)
    return policy.trajectory(1.0)


@scores_groups
def group_sizes(row, texts):
    """A reward of groups: the number of answers that it was given."""
    return [float(len(texts))] * len(texts)
