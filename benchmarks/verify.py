"""The logit verifier over every family: the largest and the median error of 50 random configs each, the largest of two
configs on two ranks, and how many seeded porting mistakes it catches. Writes benchmarks/results/verify.md.

    python benchmarks/verify.py [--configs 50] [--seed 1] [--only NAME ...]

    python benchmarks/verify.py --checkpoint DIRECTORY

With --checkpoint, the seeded mistakes of dense families are made on real weights, and what caught each is printed: one
that changes nothing there, because the config does not use what it is about, is without effect.

With --only, the rows of these families are measured and put into the page, whose other lines stay as they are; a line
after the table says when and at which commit.
"""

import argparse
import re
import sys
import time
from collections import Counter
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # tests/model/mistakes.py

import torch  # noqa: E402
import transformers  # noqa: E402

from benchmarks.flow_runs import commit, cpu  # noqa: E402
from ptf.model.families import MODULES, Family, family_of  # noqa: E402
from ptf.model.parallel_parity import MESHES, verify_parallel  # noqa: E402
from ptf.model.verify import (  # noqa: E402
    DRAWS,
    FACTOR,
    MEMBER,
    MEMBER_LEAST,
    TIE,
    Case,
    Reference,
    verify,
)
from tests.model.mistakes import CASTS, MISTAKES, Mistake  # noqa: E402

PAGE = ROOT / "benchmarks" / "results" / "verify.md"


def caught(mistake: Mistake) -> bool:
    with mistake.made():
        return not all(case.passed for case in verify(mistake.model_type, configs=12, change=mistake.model))


# whose mistakes are tried on a checkpoint
DENSE = ("llama", "qwen2", "qwen3", "mistral", "granite", "smollm3")
NO_EFFECT = "without effect"


def same(right: Family, wrong: Family, config: dict[str, Any]) -> bool:
    """Whether a family reads this config as another one does."""
    return replace(right, decoder=wrong.decoder) == wrong and right.config(config) == wrong.config(config)


@torch.no_grad()
def on_checkpoint(reference: Reference) -> dict[str, str]:
    """What caught each mistake on a checkpoint, "without effect", or "MISSED". All show in the forward pass."""
    model_type, right, found = reference.config["model_type"], reference.compare(), dict[str, str]()
    assert right.passed, right
    for seeded in (*MISTAKES, *CASTS):
        if seeded.model_type not in DENSE or seeded.name in found:
            continue
        found[seeded.name] = what_caught(replace(seeded, model_type=model_type), reference, right)
        print(f"{seeded.name}: {found[seeded.name]}", flush=True)
    return found


def what_caught(mistake: Mistake, reference: Reference, right: Case) -> str:
    family = family_of(reference.config)
    if mistake.family and same(family, mistake.family(family), reference.config):
        return NO_EFFECT
    try:
        with mistake.made():
            report = reference.compare(mistake.model)
    except (AttributeError, TypeError) as error:  # it changes what this config has not
        if "NoneType" not in str(error) and "Identity" not in str(error):
            raise
        return NO_EFFECT
    if (report.findings, report.problems) == (right.findings, right.problems):
        return NO_EFFECT
    told = [*report.problems, *(finding.what for finding in report.findings if not finding.passed), "MISSED"]
    return told[0]


def row(model_type: str, cases: list[Case], found: int, total: int) -> str:
    members = [case for case in cases if not case.mesh]
    passed = sum(case.passed for case in members)
    numbers = []
    for what in ("random tokens", "gradient of"):
        errors = [f.ours for case in members for f in case.findings if what in f.what]
        numbers += [max(errors, default=float("inf")), median(errors or [float("inf")])]
    numbers += [worst(cases, mesh) for mesh in MESHES]
    cells = " | ".join(f"{n:.1e}" for n in numbers)
    mistakes = f"{found} / {total}" if total else "–"
    return f"| {model_type} | {passed} / {len(members)} | {cells} | {mistakes} |"


def worst(cases: list[Case], mesh: str) -> float:
    """The largest error on a mesh: of a loss, a gradient or the logits of what was saved."""
    return max((f.ours for case in cases if case.mesh == mesh for f in case.findings), default=float("inf"))


def redrawn(model_type: str, cases: list[Case]) -> list[str]:
    """The configs whose tokens were drawn again, and why."""
    return [f"{model_type}, config {i}: {note}" for i, case in enumerate(cases) for note in case.notes]


def failures(model_type: str, cases: list[Case]) -> list[str]:
    """What is known of each config that did not pass."""
    return [
        f"{model_type}, {case.mesh or f'config {number}'}: "
        + "; ".join([f"{f.what} {f.ours:.1e} {f.place}" for f in case.findings if not f.passed] + [*case.problems])
        for number, case in enumerate(cases)
        if not case.passed
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--configs", type=int, default=50)
    parser.add_argument(
        "--seed", type=int, default=1, help="other configs than those that the mistakes are sought in (0)"
    )
    parser.add_argument("--only", nargs="+", choices=[*MODULES], metavar="NAME", help="families to measure")
    parser.add_argument("--checkpoint", type=Path, metavar="DIRECTORY", help="make the mistakes on its weights")
    options = parser.parse_args()
    if options.checkpoint:
        with torch.no_grad():
            return int("MISSED" in on_checkpoint(Reference(options.checkpoint)).values())
    if options.only:
        return measure_only(options)
    began = time.perf_counter()
    missed: list[Mistake] = []
    for mistake in MISTAKES:
        if not caught(mistake):
            missed.append(mistake)
            print(f"MISSED  {mistake.model_type}: {mistake.name}", flush=True)
    print(f"{len(MISTAKES) - len(missed)} of {len(MISTAKES)} mistakes caught", flush=True)
    totals, lost = Counter(m.model_type for m in MISTAKES), Counter(m.model_type for m in missed)
    rows: list[str] = []
    failed: list[str] = []
    close: list[str] = []
    for model_type in MODULES:
        cases = [*verify(model_type, options.configs, options.seed), *verify_parallel(model_type, 2, options.seed)]
        failed += failures(model_type, cases)
        close += redrawn(model_type, cases)
        rows.append(row(model_type, cases, totals[model_type] - lost[model_type], totals[model_type]))
        print(rows[-1], *failed, *redrawn(model_type, cases), sep="\n", flush=True)
    PAGE.write_text(page(options, rows, failed, close, missed, time.perf_counter() - began))
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 1 if failed or missed else 0


def page(
    options: argparse.Namespace,
    rows: list[str],
    failed: list[str],
    close: list[str],
    missed: list[Mistake],
    seconds: float,
) -> str:
    table, lost = "\n".join(rows), "".join(f" Missed: {m.model_type}: {m.name}." for m in missed)
    return f"""# The logit verifier

Command: `python benchmarks/verify.py --configs {options.configs} --seed {options.seed}`  
Hardware: {cpu()}, no GPU, torch {torch.__version__}, transformers {transformers.__version__}, fp32, \
{torch.get_num_threads()} thread(s), \
{seconds / 60:.1f} minutes beside other work  
Date: {date.today()}, commit {commit()}

Each family against transformers' model on small random members of it: \
five documents of 1 to 52 tokens packed into sequences for ptf, one at a time for
transformers, from one saved checkpoint. The exact result is that of transformers in fp64; errors are relative to its \
largest magnitude. A config passes if ptf's error is at most
{FACTOR:g} times that of transformers in fp32 (which counts as {MEMBER_LEAST:g} at least), and at most {MEMBER:g}, and \
every tensor comes back from ptf byte for byte. A gradient's error is the worst tensor's.
On two ranks: two configs that two processes divide, with FSDP and with tensor parallelism (TP); \
the largest error of the loss, of a gradient, and of the logits
of the model that they save after a step, loaded by transformers, which takes the same step.

| family | passed | logits, max | median | gradients, max | median | two ranks: FSDP | TP | mistakes caught |
|---|---|---|---|---|---|---|---|---|
{table}

Not passed: {"; ".join(failed) or "none"}.

## Where rounding decides

If transformers chooses experts for a token by a margin of at most {TIE:g} of the largest score, either \
choice is right and the results differ; and if its own error is above {MEMBER:g}, nothing can be judged:
other tokens are drawn, {DRAWS} times at most. This looks at transformers alone, so no mistake of ptf is drawn away.

{chr(10).join(f"* {line}" for line in close) or "None here."}

Mistakes: the {len(MISTAKES)} of `tests/model/mistakes.py`, each a wrong config mapping, \
wrong names or a wrong computation that one would make in porting the
family; caught: {len(MISTAKES) - len(missed)} of {len(MISTAKES)}, each within 12 configs of seed 0.{lost}
"""


def measure_only(options: argparse.Namespace) -> int:
    """Measure some families and put their rows into the page."""
    rows, passed = {}, True
    for model_type in options.only:
        mistakes = [mistake for mistake in MISTAKES if mistake.model_type == model_type]
        missed = [mistake for mistake in mistakes if not caught(mistake)]
        cases = [*verify(model_type, options.configs, options.seed), *verify_parallel(model_type, 2, options.seed)]
        rows[model_type] = row(model_type, cases, len(mistakes) - len(missed), len(mistakes))
        print(rows[model_type], *(f"MISSED  {model_type}: {mistake.name}" for mistake in missed), sep="\n", flush=True)
        print(*failures(model_type, cases), *redrawn(model_type, cases), sep="\n", flush=True)
        passed = passed and all(case.passed for case in cases) and not missed
    note = f"{date.today()}, commit {commit()}, --configs {options.configs} --seed {options.seed}"
    PAGE.write_text(with_rows(PAGE.read_text(), rows, note))
    print(f"wrote {PAGE.relative_to(ROOT)}" + ("" if passed else "; say there what did not pass, and why"))
    return 0 if passed else 1


SINCE = "Measured since, each by itself: "


def with_rows(text: str, rows: dict[str, str], note: str) -> str:
    """Return the page with these rows in place of the families' former ones, or after the last, and with what is said
    of when they were measured. The number of mistakes is that of all rows; everything else stays."""
    lines = text.split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith("| family |")) + 2
    end = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    table = {line.split("|")[1].strip(): line for line in lines[first:end]} | rows
    after = next((i for i in range(end, len(lines)) if lines[i].startswith(SINCE)), None)
    said = lines.pop(after).removeprefix(SINCE).removesuffix(".").split("; ") if after is not None else []
    told = dict(one.removesuffix(")").split(" (", 1) for one in said) | dict.fromkeys(rows, note)
    since = SINCE + "; ".join(f"{name} ({when})" for name, when in told.items()) + "."
    rest = lines[end:] if after is None else lines[end + 1 :]
    text = "\n".join([*lines[:first], *table.values(), "", since, *rest])
    counts = [line.split("|")[-2].split("/") for line in table.values() if "/" in line.split("|")[-2]]
    found, total = (sum(int(count[i]) for count in counts) for i in (0, 1))
    text = re.sub(r"the \d+ of `tests/model/mistakes.py`", f"the {total} of `tests/model/mistakes.py`", text)
    return re.sub(r"caught: \d+ of \d+", f"caught: {found} of {total}", text)


if __name__ == "__main__":
    sys.exit(main())
