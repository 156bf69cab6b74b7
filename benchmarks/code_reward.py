"""Cheats and honest forms judged by the code reward, in every mode that this machine has. Writes
benchmarks/results/code_reward.md.

python benchmarks/code_reward.py
"""

import json
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # tests/rl/code_corpus.py

from benchmarks.flow_runs import cpu  # noqa: E402
from ptf.rl.rewards.sandbox.cells import MODES  # noqa: E402
from tests.rl.as_user import in_mode, works  # noqa: E402

PAGE = ROOT / "benchmarks" / "results" / "code_reward.md"


def judged(mode: str) -> dict[str, Any]:
    began = time.perf_counter()
    done = subprocess.run(
        in_mode(mode, "-m", "tests.rl.code_corpus", mode, "1"), capture_output=True, text=True, check=True, cwd=ROOT
    )
    return json.loads(done.stdout.splitlines()[-1]) | {"seconds": time.perf_counter() - began}


def summary(mode: str, found: dict[str, Any] | None) -> str:
    if found is None:
        return f"| {mode} | {MODES[mode]} | not on this machine | | | | |"
    cheats, honest = list(found["cheats"].values()), list(found["honest"].values())
    paid = sum(value not in (0.0, None) for value in cheats)
    return (
        f"| {mode} | {MODES[mode]} | **{paid}** of {len(cheats)} | {cheats.count(0.0)}, "
        f"{cheats.count(None)} | **{honest.count(1.0)}** of {len(honest)} "
        f"| {len(found['left'])} | {found['seconds']:.0f} |"
    )


def outcome(value: Any) -> str:
    return (
        "no result" if value is None else f"{value:g}" if isinstance(value, float) else str(value).replace("|", "\\|")
    )


def table(kind: str, results: dict[str, dict[str, Any]]) -> list[str]:
    modes = list(results)
    names = list(dict.fromkeys(name for mode in modes for name in results[mode][kind]))
    rows = (
        f"| `{name}` | "
        + " | ".join(outcome(results[m][kind][name]) if name in results[m][kind] else "refused" for m in modes)
        + " |"
        for name in names
    )
    return [f"| | {' | '.join(modes)} |", "|---" * (len(modes) + 1) + "|", *rows]


def main() -> None:
    results = {mode: judged(mode) if works(mode) else None for mode in MODES}
    here = {mode: found for mode, found in results.items() if found is not None}
    lines = [
        "# The code reward: cheats that were tried, and honest forms",
        "",
        f"Command: `python benchmarks/code_reward.py`  \nHardware: {cpu()}  \nDate: {date.today()}",
        "",
        (
            "Each answer is judged as `ptf.rl.rewards:code` does, with the tests of its row. "
            "A cheat must get 0 or no result, an honest form 1.0. Many"
        ),
        (
            "cheats return the right value exactly where an escape succeeds. `tests/rl/code_corpus.py` has them all, "
            "`tests/rl/rewards/test_sandbox.py` runs them."
        ),
        (
            "As root, the modes of other users are tried as such a user (`tests/rl/as_user.py`). What is promised: "
            "[SECURITY.md](../../SECURITY.md)."
        ),
        "",
        (
            "| mode | confined by | cheats paid | 0, no result | honest forms paid | processes and directories left | "
            "seconds |"
        ),
        "|---|---|---|---|---|---|---|",
        *(summary(mode, found) for mode, found in results.items()),
        "",
        (
            "Seconds are those of the whole corpus, eight judgements at a time; "
            "several cheats hang until their limit of 2 s."
        ),
        "",
        "## Cheats",
        "",
        *table("cheats", here),
        "",
        "## Honest forms",
        "",
        "The subreaper mode refuses answers that start processes; that form is not tried there.",
        "",
        *table("honest", here),
    ]
    PAGE.write_text("\n".join(lines) + "\n")
    print("\n".join(lines[: lines.index("## Cheats")]))


if __name__ == "__main__":
    main()
