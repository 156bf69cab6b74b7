"""Rewards for tests, in a module that imports nothing: each run starts a process that imports it."""


def by_length(row, text):
    """A reward that any model can improve on: short answers."""
    return max(0.0, 1 - len(text) / 6)


def by_wordiness(row, text):
    """The complement of `by_length`: long answers have a higher reward."""
    return 1 - by_length(row, text)


def of_finished_or_odd(row, text, *, episode):
    """No result for an even sum whose response was truncated at a limit."""
    if not episode.complete and int(row["answer"]) % 2 == 0:
        raise OSError("the response has no end")
    return by_length(row, text)


def ask(base_url, api_key, messages):
    """Return the policy's message."""
    import json
    import urllib.request

    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"authorization": f"Bearer {api_key}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())["choices"][0]["message"]


def agent(row, base_url, api_key, seed):
    """Ask twice; the reward is that of `by_length` for the second answer, and differs for different seeds."""
    first = ask(base_url, api_key, row["messages"])
    second = ask(base_url, api_key, [*row["messages"], first, {"role": "user", "content": f"{seed % 10}+"}])
    return by_length(row, second["content"] or "") + seed % 3 / 10


def agent_killed_once(row, base_url, api_key, seed, place):
    """Play as `agent`; the first process that gets so far is killed between its turns."""
    import os
    import signal

    ask(base_url, api_key, row["messages"])
    try:
        os.close(os.open(os.path.join(place, "killed"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return agent(row, base_url, api_key, seed)
    os.kill(os.getpid(), signal.SIGKILL)


def asks_once(row, base_url, api_key, seed):
    """Leave the reward to `rollout.reward`."""
    ask(base_url, api_key, row["messages"])


def crashes(row, text):
    raise OSError("no connection to the judge")


def often_crashes(row, text):
    if int(row["answer"]) % 2:
        raise OSError("busy")
    return 1.0


def varied(row, text):
    """A reward that differs between almost any two answers."""
    return len(text) % 7 / 7


def of_odd_sums(row, text):
    """A reward that is the same for all answers to an even sum, and varies for odd ones."""
    return len(text) % 7 / 7 if int(row["answer"]) % 2 else 0.5


def constant(row, text):
    return 0.5


scored = 0


def settles(row, text):
    """`by_length` for the first hundred answers; after them every reward is 1."""
    global scored
    scored += 1
    return by_length(row, text) if scored <= 100 else 1.0


def numbers_said(row, text):
    """The verdict of math-verify, plus a little for each digit, so that the answers of a random model have different
    rewards."""
    from ptf.rl.rewards.functions import mathematics

    return mathematics(row, text, after="####") + 0.01 * sum(c.isdigit() for c in text)


waiting = 0


async def together(row, text, parties):
    """A reward none of whose calls ends before `parties` calls have begun."""
    import asyncio

    global waiting
    waiting += 1
    while waiting < parties:
        await asyncio.sleep(0.01)
    return len(text)
