"""Made-up conversations, and the real ones of PTF_DATA, under every chat template, ours and real: ptf's loss masks
beside an oracle that shares no code with them. Writes benchmarks/results/loss_masks.md;
a run that was interrupted goes on where it stopped.

    python benchmarks/loss_masks.py [--fuzz 1900] [--rows 100] [--seed 1] [--jobs 2] [--templates qwen3 …]
"""

import argparse
import functools
import hashlib
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

from benchmarks.commands import options  # noqa: E402
from benchmarks.flow_runs import cpu, results_page  # noqa: E402
from benchmarks.pages import keep, kept, table  # noqa: E402
from ptf.data.tokenizer import Tokenizer  # noqa: E402
from tests.conftest import SHARED  # noqa: E402
from tests.data.agreement import judge  # noqa: E402
from tests.data.conversations import Conversation, fuzzed, real  # noqa: E402
from tests.data.oracle import Oracle  # noqa: E402
from tests.data.templates import CASES, OURS, REAL, REFUSED, markers, templated  # noqa: E402

PAGE = results_page("loss_masks.md")
NAMES = (*OURS, *sorted(REAL))
CODE = (
    *(
        ROOT / f"ptf/data/{name}.py"
        for name in ("chat", "completion", "context", "added", "incremental_encode", "rendering", "probes", "tokenizer")
    ),
    *(ROOT / f"tests/data/{name}.py" for name in ("agreement", "conversations", "oracle", "templates")),
    *sorted((ROOT / "tests/data/chat_templates").glob("*.jinja")),
)
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
        marks = markers(templated(self.template, SHARED).hf.chat_template)
        for number in self.numbers:
            yield (
                all_real(self.seed)[number]
                if self.source == "real"
                else fuzzed(Random(f"{self.seed}/{self.template}/{number}"), marks)
            )


@functools.cache
def all_real(seed: int) -> list[Conversation]:
    """Shuffled, so that all chunks take about as long."""
    found = list(real(SHARED))
    Random(seed).shuffle(found)
    return found


class Renders:
    """Stands before a tokenizer's chat template, half of the time, so that what one side has rendered of a conversation
    the other need not."""

    def __init__(self, hf: Any):
        self._render, self._known = hf.apply_chat_template, {}
        hf.apply_chat_template = self

    def __call__(self, messages: list[Any], tools: Any, **options: Any) -> str:
        values = {name: value for name, value in options.items() if not callable(value)}
        key = repr((messages, tools and [str(tool) for tool in tools], values))
        if key not in self._known:
            self._known[key] = self._render(messages, tools=tools, **options)
        return self._known[key]

    def forget(self) -> None:
        self._known.clear()


@functools.cache
def judges(template: str) -> tuple[Tokenizer, Oracle, Renders]:
    tokenizer = templated(template, SHARED)
    renders = Renders(tokenizer.hf)
    return tokenizer, Oracle(tokenizer.hf, CASES[template], **tokenizer.rendering.arguments), renders


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
    given = options(
        __doc__,
        fuzz=(1900, "made-up conversations for each template"),
        rows=(100, "real conversations for each template; 0: none"),
        seed=1,
        jobs=(2, "processes"),
        templates=(list(NAMES), "no page is written unless all are run"),
        part=(ROOT / "build" / "loss_masks.jsonl", "what is done so far; another state of the code begins anew"),
    )
    there = (SHARED / "templates").is_dir()
    names = [name for name in given.templates if there or name in OURS]
    began, rows = time.perf_counter(), min(given.rows, len(all_real(given.seed))) if there else 0
    sizes = (("real", rows), ("fuzz", given.fuzz))
    chunks = [
        Chunk(name, source, range(first, min(first + CHUNK, size)), given.seed)
        for name in names
        for source, size in sizes
        for first in range(0, size, CHUNK)
    ]
    found = done_before(given.part)
    todo = [chunk for chunk in chunks if str(chunk) not in found]
    total, done = sum(len(chunk.numbers) for chunk in todo), 0
    given.part.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        for chunk, tally, seconds in pool.imap_unordered(timed, todo):
            found[str(chunk)] = tally, seconds
            keep(given.part, {"code": code(), "chunk": str(chunk), "tally": vars(tally), "seconds": seconds})
            done += len(chunk.numbers)
            rate = done / (time.perf_counter() - began)
            print(
                f"\r{done:,} of {total:,} conversations, {rate:.0f} a second, {(total - done) / rate:.0f} s left   ",
                end="",
                file=sys.stderr,
                flush=True,
            )
    tallies = {name: Tally() for name in names}
    for chunk in chunks:
        tallies[chunk.template] += found[str(chunk)][0]
    for name, tally in tallies.items():
        report(name, tally)
    spent = sum(found[str(chunk)][1] for chunk in chunks)
    if len(tallies) == len(NAMES):
        PAGE.write_text(page(given, tallies, spent))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 1 if any(tally.problems for tally in tallies.values()) else 0


@functools.cache
def code() -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in CODE)).hexdigest()[:16]


def done_before(part: Path) -> dict[str, tuple[Tally, float]]:
    """Chunk → what it came to, and CPU seconds, where the code was the same."""
    found = {}
    for row in kept(part):
        if row["code"] == code():
            tally = row["tally"] | {"refused": Counter(row["tally"]["refused"])}
            found[row["chunk"]] = Tally(**tally), row["seconds"]
    return found


def timed(chunk: Chunk) -> tuple[Chunk, Tally, float]:
    began = time.process_time()
    _, tally = judged(chunk)
    return chunk, tally, time.process_time() - began


def report(name: str, tally: Tally) -> None:
    facts = vars(tally) | {
        "expansion": tally.expansion,
        "problems": tally.problems[:5],
        "disagreements": len(tally.problems),
    }
    print("\r" + json.dumps({"template": name} | facts, ensure_ascii=False), flush=True)


def page(given: argparse.Namespace, tallies: dict[str, Tally], seconds: float) -> str:
    reasons = list(sum((tally.refused for tally in tallies.values()), Counter()))
    rows, refused = [], []
    for name, t in tallies.items():
        shows = CASES[name].shows or "real"
        counts = [f"{n:,}" for n in (t.real, t.fuzzed, t.spans, t.refused.total())]
        rows.append([name, shows, *counts, len(t.problems), t.expansion])
        refused.append([name, *(f"{t.refused[reason]:,}" for reason in reasons)])
    problems = "\n".join(f"* {name}, {problem}" for name, t in tallies.items() for problem in t.problems[:5]) or "None."
    sums = [
        sum(values)
        for values in zip(
            *((t.real, t.fuzzed, t.spans, t.refused.total(), len(t.problems)) for t in tallies.values()), strict=True
        )
    ]
    rows.append(["all", "", *(f"{n:,}" for n in sums), ""])
    names = (
        "template | what it shows | real | fuzzed | agreed spans | agreed refusals | disagreements | tokens, of the "
        "longest sample's"
    )
    of_models = [refused_row(model, names_, tallies) for model, names_ in REFUSED.items()]
    return f"""# Loss masks beside an oracle

Command: `python benchmarks/loss_masks.py --fuzz {given.fuzz} --rows {given.rows} --seed {given.seed} --jobs \
{given.jobs}`  
Hardware: {cpu()}, transformers {transformers.__version__}, {seconds / 60:.1f} CPU minutes  
Date: {date.today()}

{sums[0] + sums[1]:,} conversations, {sums[2]:,} trained turns, **{sums[4]} disagreements**.

The oracle (`tests/data/oracle.py`) shares no code with ptf. It renders a turn and its context again with other words \
in place of their parts, reads spans
off the characters of the text, finds tokens by their offsets, and knows by hand where the turns of each template end \
(`tests/data/templates.py`). They agree
on a conversation if ids and masks are equal token by token in the same samples, \
or if both refuse it at the same turn for the same reason. Templates with
a description are ours (`tests/data/chat_templates`), with a byte-level tokenizer that the tests train; \
the 13 real ones are tried with the Qwen3 tokenizer,
their special tokens added; `own/…` is a tokenizer directory as it is. Behind a comma stand the keys that are set: \
of `data`
(`render`, `omitted_context`), or arguments in `model.template_args`. Real conversations are GSM8K,
OpenAssistant, SGD with its tools, τ-bench airline, and the last answers of the preference data, \
with ids of calls renumbered to the nine characters that
Mistral-Nemo asks for. Fuzzed ones are short, with all that could go wrong in what is said: \
the template's own special tokens, tags of thinking and calls,
white space, Unicode, empty parts, thoughts, calls, tools, developers, further systems, arguments of the row's own, \
roles out of order.

{table(names, rows)}

Spans are trained turns. The last column is what splitting costs where every turn of a real conversation is trained: \
tokens of all its samples over those
of the longest.

## Models that were refused

By the templates of ours that behave like theirs: turns that were trained, of conversations that were not refused, \
by default and with each key.

{table("model | by default | with a key", of_models)}

## Refusals

Conversations refused, by reason of the first turn that cannot be verified:

{table(["template", *reasons], refused)}

Disagreements: {problems}

What it says: *never served*, the generation prompt is not how the rendered turn begins; *left out*, \
the template does not show a part of the turn (dropped
calls, thoughts, what is said beside a call); *unseen context*, it does not show tools, results, a developer, \
a later system, an earlier answer; *stop inside*,
an end-of-turn token stands within what is said; *speaks first*, the first answer answers nothing; *no tags*, \
*thinking closed*, *call not served*:
`data.response_rendering: append` cannot put the turn together. In fuzzed conversations most rows have one of
these on purpose.
"""


def refused_row(model: str, names: tuple[str, ...], tallies: dict[str, Tally]) -> list[str]:
    def counted(name: str) -> str:
        t = tallies[name]
        return f"{t.spans:,} turns, {t.refused.total():,} of {t.real + t.fuzzed:,} conversations refused"

    keys = "; ".join(f"`{name.partition(', ')[2]}`: {counted(name)}" for name in names[1:])
    return [model, counted(names[0]), keys or "–"]


if __name__ == "__main__":
    sys.exit(main())
