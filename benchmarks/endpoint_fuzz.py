"""Random agents before the endpoint, with a scripted engine: what their clients received beside what is trained."""

import itertools
import os
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from commands import ROOT, options
from flow_runs import commit, cpu, results_page
from pages import keep, kept, table, write_page

from tests.data.templates import templated
from tests.rl.endpoint.fuzz import fuzz

RESULTS = results_page("endpoint_fuzz.md")
OURS = ("plain", "drops_thinking", "thinking_switch", "next_role_stop", "two_stops")
REAL = ("qwen3", "qwen2.5", "smollm3", "own/minimind", "own/phi3-mini")  # PTF_DATA
EPISODES, CALLS = 8, 30  # at once, and in each
ABOUT = """# Random agents before the endpoint

Command: `python benchmarks/endpoint_fuzz.py` (`make fuzz-endpoint`)  
Hardware: {cpu}; {seconds:.0f} s of one core  
Date: {date}; commit {commit}  
Each part: [endpoint_fuzz.jsonl](endpoint_fuzz.jsonl), which the next run continues (`--anew` begins it again)

Agents with raw sockets call an endpoint whose engine is scripted: branches, sub-agents, tool calls in another form,
dropped thinking, compaction, `n`, stop strings, limits, frozen models, equal requests at once, retries with and without
the SDK's header, and connections that are closed or reset before, during and after the answer. Answers hold thinking,
tool calls, characters of several tokens, random tokens and tokenizations that no text is encoded to.

The log-probs of the engine name the call and the position of every token. After each episode the samples are compared
with what the clients read from their sockets: every token of a received answer is trained once, with the ids and behind
the context that were served; nothing else is trained; the counts are right; streamed deltas add up to the message.

A *doubtful* answer was read to its last byte by a client that then reset the connection: a server cannot tell it from
one that was not read. It is trained if a later request continues it, and never twice.

"""


def main() -> int:
    given = options(
        __doc__,
        calls=100_000,
        anew=(False, "begin a new ledger; otherwise it is continued"),
        jobs=(2, "processes"),
        minutes=(1e9, "limit; the page has the calls until then"),
    )
    shared = Path(os.environ.get("PTF_DATA", ROOT / "data"))
    names = [*OURS, *(REAL if (shared / "tokenizers").is_dir() else ())]
    ledger, ends = RESULTS.with_suffix(".jsonl"), time.monotonic() + 60 * given.minutes
    if given.anew:
        ledger.unlink(missing_ok=True)
    parts = kept(ledger)
    waiting = ((names[i % len(names)], i * EPISODES) for i in itertools.count(len(parts)))
    with ProcessPoolExecutor(given.jobs) as pool:
        running = {pool.submit(part, *next(waiting), shared) for _ in range(given.jobs)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for made in (future.result() for future in done):
                parts.append(made)
                keep(ledger, made)
                for violation in made["violations"]:
                    print(f"{made['template']}: {violation}", flush=True)
            calls = sum(made["calls"] for made in parts)
            print(f"{calls} calls", flush=True)
            if calls < given.calls and time.monotonic() < ends:
                running |= {pool.submit(part, *next(waiting), shared) for _ in done}
    return write(parts)


def part(name: str, seed: int, shared: Path) -> dict[str, Any]:
    """Play a few episodes; return what was found, and the seconds of one core."""
    tokenizer, began = templated(name, shared if name in REAL else None), time.process_time()
    found = fuzz(tokenizer, range(seed, seed + EPISODES), CALLS)
    made = {"template": name, "seed": seed, "seconds": time.process_time() - began, "commit": commit()}
    kinds, counts = dict(found.kinds), dict(found.counts)
    return {**made, "calls": found.calls, "counts": counts, "kinds": kinds, "violations": found.violations}


def write(parts: list[dict[str, Any]]) -> int:
    columns = ("retries", "undelivered", "doubtful", "history_restored", "history_reencoded")
    counted = {name for made in parts for name in made["counts"]}
    assert counted.issuperset(columns), f"nothing counts {sorted({*columns} - counted)}"
    rows = []
    for name in [*dict.fromkeys(made["template"] for made in parts), "**all**"]:
        own = [made for made in parts if name in (made["template"], "**all**")]
        counts = [f"{sum(made['counts'].get(column, 0) for made in own):,}" for column in columns]
        calls, wrong = sum(made["calls"] for made in own), sum(len(made["violations"]) for made in own)
        rate = calls / sum(made["seconds"] for made in own)
        rows.append([name, f"{calls:,}", *counts, f"{rate:.0f}", wrong])
    lines = [table(["template", "calls", *columns, "calls/s", "violations"], rows)]
    lines += ["", "`calls/s`: per second of one core's time, with the agents, the engine and the oracle.", ""]
    wrong, seconds = any(made["violations"] for made in parts), sum(made["seconds"] for made in parts)
    kinds = sum((Counter(made["kinds"]) for made in parts), Counter[str]())
    lines.append(table("what the agents did | times", [(kind, f"{n:,}") for kind, n in sorted(kinds.items())]))
    date, commits = time.strftime("%Y-%m-%d", time.gmtime()), ", ".join(dict.fromkeys(made["commit"] for made in parts))
    about = ABOUT.format(cpu=cpu(), seconds=seconds, date=date, commit=commits)
    return write_page(RESULTS, about, lines, ["violations"] if wrong else [])


if __name__ == "__main__":
    raise SystemExit(main())
