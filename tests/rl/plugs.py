"""Rewards for tests, in a module that imports nothing: each run starts a process that imports it."""


def by_length(row, text):
    """A reward that any model can improve on: short answers."""
    return max(0.0, 1 - len(text) / 6)


def by_wordiness(row, text):
    """Its contrary."""
    return 1 - by_length(row, text)


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
    """Even sums have one reward for all answers."""
    return len(text) % 7 / 7 if int(row["answer"]) % 2 else 0.5


def constant(row, text):
    return 0.5


scored = 0


def settles(row, text):
    """As by_length, for the first hundred answers; then all are alike."""
    global scored
    scored += 1
    return by_length(row, text) if scored <= 100 else 1.0


def numbers_said(row, text):
    """math-verify's verdict, and a little for digits, so that the answers of a random model differ."""
    from ptf.rl.rewards.functions import mathematics

    return mathematics(row, text, after="####") + 0.01 * sum(c.isdigit() for c in text)


waiting = 0


async def together(row, text, parties):
    """None of its calls ends before so many have begun."""
    import asyncio

    global waiting
    waiting += 1
    while waiting < parties:
        await asyncio.sleep(0.01)
    return len(text)
