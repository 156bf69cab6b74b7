"""Every conversation of PTF_DATA and made-up ones under every chat template: ptf's loss masks beside an oracle that shares no code with them.
Writes benchmarks/results/loss_masks.md.

    python benchmarks/loss_masks.py [--fuzz 8000] [--seed 1] [--jobs 2] [--templates qwen3 …]
"""

import argparse
import functools
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # tests/data/oracle.py

import transformers  # noqa: E402

from benchmarks.flow_runs import cpu  # noqa: E402
from ptf.data.tokenizer import Tokenizer  # noqa: E402
from tests.conftest import SHARED  # noqa: E402
from tests.data.agreement import judge  # noqa: E402
from tests.data.conversations import Conversation, fuzzed, real  # noqa: E402
from tests.data.oracle import Oracle  # noqa: E402
from tests.data.templates import ONE_SAMPLE, OWN, SPLIT, UNSERVED, markers, templated  # noqa: E402

PAGE = ROOT / "benchmarks" / "results" / "loss_masks.md"
NAMES = (*sorted([*ONE_SAMPLE, *SPLIT, *UNSERVED]), *OWN)
CHUNK = 250  # conversations


@dataclass
class Tally:
    """What became of conversations; `tokens` and `whole` are those of real ones of which every turn is trained."""

    real: int = 0
    fuzzed: int = 0
    spans: int = 0
    tokens: int = 0
    whole: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __iadd__(self, other: "Tally") -> "Tally":
        for key, value in vars(other).items():
            setattr(self, key, getattr(self, key) + value)
        return self

    @property
    def expansion(self) -> str:
        return f"{self.tokens / self.whole:.2f}" if self.whole else "–"


@dataclass(frozen=True)
class Chunk:
    template: str
    source: str  # real or fuzz
    numbers: range
    seed: int

    def conversations(self) -> Iterator[Conversation]:
        marks = markers(templated(SHARED, self.template).hf.chat_template)
        for number in self.numbers:
            yield all_real(self.seed)[number] if self.source == "real" else fuzzed(Random(f"{self.seed}/{self.template}/{number}"), marks)


@functools.cache
def all_real(seed: int) -> list[Conversation]:
    """Shuffled, so that all chunks take about as long."""
    found = list(real(SHARED))
    Random(seed).shuffle(found)
    return found


class Renders:
    """Stands before a tokenizer's chat template, half of the time, so that what one side has rendered of a conversation the other need not."""

    def __init__(self, hf: Any):
        self._render, self._known = hf.apply_chat_template, {}
        hf.apply_chat_template = self

    def __call__(self, messages: list[Any], tools: Any, **options: bool) -> str:
        key = repr((messages, tools and id(tools), options))
        if key not in self._known:
            self._known[key] = self._render(messages, tools=tools, **options)
        return self._known[key]

    def forget(self) -> None:
        self._known.clear()


@functools.cache
def judges(template: str) -> tuple[Tokenizer, Oracle, Renders]:
    tokenizer = templated(SHARED, template)
    renders = Renders(tokenizer.hf)
    return tokenizer, Oracle(tokenizer.hf), renders


def judged(chunk: Chunk) -> tuple[Chunk, Tally]:
    tally = Tally()
    tokenizer, oracle, renders = judges(chunk.template)
    for number, conversation in zip(chunk.numbers, chunk.conversations(), strict=True):
        renders.forget()
        try:
            verdict = judge(tokenizer, oracle, conversation)
        except Exception as e:  # neither samples nor a UserError: a disagreement like the others
            tally.problems.append(f"{chunk.source} {number}: {e!r}")
            continue
        tally.spans += verdict.spans
        if verdict.refusal:
            tally.refused[verdict.refusal.reason] += 1
        if verdict.problem:
            tally.problems.append(f"{chunk.source} {number}: {verdict.problem}")
        if chunk.source == "real" and conversation.train_on == "assistant":
            tally.tokens, tally.whole = tally.tokens + verdict.tokens, tally.whole + verdict.whole
    tally.real, tally.fuzzed = (len(chunk.numbers), 0) if chunk.source == "real" else (0, len(chunk.numbers))
    return chunk, tally


def main() -> int:
    parser = argparse.ArgumentParser(description="ptf's loss masks beside an oracle, on all conversations of PTF_DATA and made-up ones")
    parser.add_argument("--fuzz", type=int, default=8000, help="made-up conversations for each template")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--templates", nargs="+", default=NAMES, choices=NAMES, help="no page is written unless all are run, with all rows")
    parser.add_argument("--rows", type=int, help="only so many of the real conversations")
    options = parser.parse_args()
    began, rows = time.perf_counter(), len(all_real(options.seed))
    sizes = (("real", min(rows, options.rows or rows)), ("fuzz", options.fuzz))
    chunks = [
        Chunk(name, source, range(first, min(first + CHUNK, size)), options.seed)
        for name in options.templates for source, size in sizes for first in range(0, size, CHUNK)
    ]  # fmt: skip
    left, total, done = Counter(chunk.template for chunk in chunks), sum(len(chunk.numbers) for chunk in chunks), 0
    tallies = {name: Tally() for name in options.templates}
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for chunk, tally in pool.imap_unordered(judged, chunks):
            tallies[chunk.template] += tally
            done, left[chunk.template] = done + len(chunk.numbers), left[chunk.template] - 1
            rate = done / (time.perf_counter() - began)
            print(f"\r{done:,} of {total:,} conversations, {rate:.0f} a second, {(total - done) / rate:.0f} s left   ", end="", file=sys.stderr, flush=True)
            if not left[chunk.template]:
                report(chunk.template, tallies[chunk.template])
    if options.rows is None and len(tallies) == len(NAMES):
        PAGE.write_text(page(options, tallies, time.perf_counter() - began))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 1 if any(tally.problems for tally in tallies.values()) else 0


def report(name: str, tally: Tally) -> None:
    facts = vars(tally) | {"expansion": tally.expansion, "problems": tally.problems[:5], "disagreements": len(tally.problems)}
    print("\r" + json.dumps({"template": name} | facts, ensure_ascii=False), flush=True)


def page(options: argparse.Namespace, tallies: dict[str, Tally], seconds: float) -> str:
    reasons = list(sum((tally.refused for tally in tallies.values()), Counter()))
    rows, refused = [], []
    for name, t in tallies.items():
        rows.append(f"| {name} | {t.real:,} | {t.fuzzed:,} | {t.spans:,} | {t.refused.total():,} | {len(t.problems)} | {t.expansion} |")
        refused.append(f"| {name} | " + " | ".join(f"{t.refused[reason]:,}" for reason in reasons) + " |")
    problems = "\n".join(f"* {name}, {problem}" for name, t in tallies.items() for problem in t.problems[:5]) or "None."
    sums = [sum(values) for values in zip(*((t.real, t.fuzzed, t.spans, t.refused.total(), len(t.problems)) for t in tallies.values()), strict=True)]
    nl = "\n"
    return f"""# Loss masks beside an oracle

Command: `python benchmarks/loss_masks.py --fuzz {options.fuzz} --seed {options.seed} --jobs {options.jobs}`  
Hardware: {cpu()}, transformers {transformers.__version__}, {seconds / 60:.1f} minutes beside other work  
Date: {date.today()}

The oracle (`tests/data/oracle.py`) shares no code with ptf. It renders a turn again with other words in place of its parts, reads spans off the
characters of the text and finds tokens by their offsets. They agree on a conversation if ids and masks are equal token by token in the same samples, or if
both refuse it at the same turn for the same reason. All 13 templates are tried with the Qwen3 tokenizer, their special tokens added; `own/…` is
a tokenizer directory as it is. Real conversations are GSM8K, OpenAssistant, SGD with its tools, τ-bench airline, and the last answers of the preference data,
with ids of calls renumbered to the nine characters that Mistral-Nemo asks for. Fuzzed ones are short, with all that could go wrong in what is said: the
template's own special tokens, tags of thinking and calls, white space, Unicode, empty parts, thoughts, calls, roles out of order.

| template | real | fuzzed | agreed spans | agreed refusals | disagreements | tokens, of the longest sample's |
|---|---|---|---|---|---|---|
{nl.join(rows)}
| all | {" | ".join(f"{n:,}" for n in sums)} | |

Spans are trained turns. The last column is what splitting costs where every turn of a real conversation is trained: tokens of all its samples over those
of the longest.

Conversations refused, by reason of the first turn that cannot be verified:

| template | {" | ".join(reasons)} |
|---|{"---|" * len(reasons)}
{nl.join(refused)}

Disagreements: {problems}

What it says: *never served*, the generation prompt is not how the rendered turn begins: R1-distill and QwQ write `<think>` there alone, Mistral-Nemo
moves the system message, minimind writes an empty thought where there is one, gpt-oss drops what was thought before a call once the answer is there.
*Left out*, the template does not show a part of the turn: Granite, Phi-3.5 and SmolLM3 drop calls, gpt-oss all calls but the first, Mistral-Nemo what is said
beside a call, most templates thoughts. *Stop inside*, an end-of-turn token stands within what is said. *Speaks first*, the first answer answers nothing.
"""


if __name__ == "__main__":
    sys.exit(main())
