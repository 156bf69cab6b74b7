"""Rewards of one answer, of groups and of batches, for tests."""

import os
import signal
import threading
import time

from ptf.rl.rewards import batched, scores_groups
from ptf.rl.rewards.declarations import one_by_one


def fault(text: str) -> None:
    if text == "raise":
        raise KeyError("gold")
    if text == "hang":
        time.sleep(600)
    if text == "die":
        os.kill(os.getpid(), signal.SIGKILL)


def cut_off(row, text, *, episode):
    """1 for an answer that was cut off."""
    return float(not episode.complete)


def sampled(row, text, *, episode=None):
    """The number of tokens of the answer, and a hundredth of that of the prompt."""
    assert [message["content"] for message in episode.messages] == [row["prompt"], text]
    assert len(episode.logprobs) == len(episode.versions) == len(episode.sampled_ids)
    return len(episode.sampled_ids) + len(episode.prompt_tokens) / 100


def has_episode(row, text, **args):
    """Take any arguments, and so ask for none."""
    return float("episode" in args)


@scores_groups
def rank(row, texts, *, scale=1.0):
    """The share of the group's answers that are shorter."""
    for text in texts:
        fault(text)
    assert len({row["prompt"]}) == 1
    return [scale * sum(len(other) < len(text) for other in texts) / len(texts) for text in texts]


@scores_groups
async def of_group(row, texts, *, episodes):
    """The number of answers to the prompt that were cut off, and the row's own number."""
    assert len(texts) == len(episodes)
    return [sum(not episode.complete for episode in episodes) + row["number"]] * len(texts)


@scores_groups
def noted(row, texts, *, place, episodes):
    """Note the size of the group and what the first episode shows; longer answers have higher rewards."""
    shown = episodes[0]
    assert [view.messages[-1]["content"] for view in episodes] == texts
    assert list(shown.messages[:-1]) == row["messages"]
    assert len(shown.prompt_tokens) > 1
    with open(place, "a") as stream:
        stream.write(f"{len(texts)} {shown.source} {int(shown.versions.max())}\n")
    return [len(view.sampled_ids) + 0.01 * len(text) for view, text in zip(episodes, texts, strict=True)]


@scores_groups
def malformed(row, texts):
    """What a reward of groups can return that is none."""
    return {
        "short": [1.0] * (len(texts) - 1),
        "long": [1.0] * (len(texts) + 1),
        "number": 1.0,
        "text": "1" * len(texts),
        "dictionary": dict.fromkeys(texts, 1.0),
        "nan": [1.0] * (len(texts) - 1) + [float("nan")],
        "none": [None] * len(texts),
        "tuple": (1.0,) * len(texts),
        "numbers": iter([1.0] * len(texts)),
    }[row["prompt"]]


@batched(max_size=4)
class Sizes:
    """The number of answers in the batch; constructed once in a process."""

    constructed = 0

    def __init__(self, *, add: float = 0.0) -> None:
        type(self).constructed += 1
        self.add = add

    def __call__(self, items):
        for _, text in items:
            fault(text)
        assert self.constructed == 1
        return [float("nan") if text == "nan" else len(items) + self.add for _, text in items]


@batched(max_size=3)
async def lengths(items, *, episodes):
    """The number of sampled tokens of each answer of a batch."""
    assert len(items) <= 3
    return [len(episode.sampled_ids) for episode in episodes]


class Counts:
    """Counts its own calls, one after the other."""

    max_concurrent_calls = 1

    def __init__(self, *, start: int) -> None:
        self.calls = start

    def __call__(self, row, text):
        self.calls += 1
        return float(self.calls)


@one_by_one
def in_the_main_thread(row, text):
    """1, in the main thread alone."""
    return float(threading.current_thread() is threading.main_thread())


@batched(8)
def changes_rows(items, *, episodes):
    """How often a row was changed before, of which there must be none; a row and its episode share no message."""
    found = []
    for (row, _), episode in zip(items, episodes, strict=True):
        found.append(float(len(row["seen"]) + ("seen" in episode.messages[0])))
        row["seen"].append(1)
        episode.messages[0]["seen"] = True
    return found


def counts_its_calls(row, text, *, seen):
    """How often these arguments were changed before."""
    row["seen"].append(1)
    seen.append(1)
    return float(len(row["seen"]))


def returned(row, text):
    """What the text names, none of it a reward."""

    async def later():
        return 1.0

    return later() if text == "coroutine" else {"dict": {"score": 1.0}, "list": [1.0], "NoneType": None}[text]
