"""Cheats and honest forms judged by the code reward, in every mode that this machine has. Writes
benchmarks/results/code_reward.md.

python benchmarks/code_reward.py
"""

import time
from typing import Any

from commands import last_line
from flow_runs import results_page
from pages import head, table, write_page

from ptf.rl.rewards.sandbox.cells import MODES
from tests.rl.as_user import in_mode, works


def judged(mode: str) -> dict[str, Any]:
    began = time.perf_counter()
    found = last_line(in_mode(mode, "-m", "tests.rl.code_corpus", mode, "1"), mode)
    return found | {"seconds": time.perf_counter() - began}


def summary(mode: str, found: dict[str, Any] | None) -> list[object]:
    if found is None:
        return [mode, MODES[mode], "not on this machine", "", "", "", ""]
    cheats, honest = list(found["cheats"].values()), list(found["honest"].values())
    paid = sum(value not in (0.0, None) for value in cheats)
    counts = [f"**{paid}** of {len(cheats)}", f"{cheats.count(0.0)}, {cheats.count(None)}"]
    counts += [f"**{honest.count(1.0)}** of {len(honest)}", len(found["left"]), f"{found['seconds']:.0f}"]
    return [mode, MODES[mode], *counts]


def outcome(value: Any) -> str:
    return (
        "no result" if value is None else f"{value:g}" if isinstance(value, float) else str(value).replace("|", "\\|")
    )


def outcomes(kind: str, results: dict[str, dict[str, Any]]) -> str:
    names = dict.fromkeys(name for found in results.values() for name in found[kind])
    rows = (
        [f"`{name}`", *(outcome(of[kind][name]) if name in of[kind] else "refused" for of in results.values())]
        for name in names
    )
    return table(["", *results], rows)


ABOUT = """\
Each answer is judged as `ptf.rl.rewards:code` does, with the tests of its row. A cheat must get 0 or no result, an
honest form 1.0. Many cheats return the right value exactly where an escape succeeds. `tests/rl/code_corpus.py` has them
all, `tests/rl/rewards/test_sandbox.py` runs them. As root, the modes of other users are tried as such a user
(`tests/rl/as_user.py`). What is promised: [SECURITY.md](../../SECURITY.md).

"""
NAMES = "mode | confined by | cheats paid | 0, no result | honest forms paid | processes and directories left | seconds"
SECONDS = """
Seconds are those of the whole corpus, eight judgements at a time; several cheats hang until their limit of 2 s.

## Cheats
"""
HONEST = """
## Honest forms

The subreaper mode refuses answers that start processes; that form is not tried there.
"""


def main() -> None:
    results = {mode: judged(mode) if works(mode) else None for mode in MODES}
    here = {mode: found for mode, found in results.items() if found is not None}
    modes = table(NAMES, [summary(mode, found) for mode, found in results.items()])
    print(modes)
    about = head("The code reward: cheats that were tried, and honest forms", "") + ABOUT
    lines = [modes, SECONDS, outcomes("cheats", here), HONEST, outcomes("honest", here)]
    write_page(results_page("code_reward.md"), about, lines)


if __name__ == "__main__":
    main()
