"""Next baskets of shops: the model of configs/events/head.yaml beside the rivals that count, on each customer's last
basket and on the first one after three dates, without and with the time of the request. Writes
results/events_splits.md.

    python benchmarks/events_splits.py [--shops online_retail] [--splits last 2010-10-01] [--now 0 1] [--seeds 3]

Settings are those of the config and of results/events_rivals.json, both chosen on baskets before the last. A split that
results/events_splits.jsonl has is not made again. `--splits before_last` is for choosing: it is printed, not kept.
"""

import json
import sys
import tempfile
import time
from calendar import timegm
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from commands import ROOT, options
from flow_runs import results_page
from pages import Row, apart, head, here, keep, kept, table

from ptf.config import loads
from ptf.evaluate.measurement import measure_run
from ptf.events.histories import load
from ptf.events.ranking_metrics import interval
from ptf.run import run
from ptf.tasks.shops import prepare

RESULTS = results_page("events_splits.md")
LEDGER, CHOSEN = RESULTS.with_suffix(".jsonl"), RESULTS.with_name("events_rivals.json")
DATES = {
    "online_retail": ["2010-09-01", "2010-10-01", "2010-11-01"],
    "complete_journey": ["2017-09-01", "2017-10-01", "2017-11-01"],
    "movielens_100k": [],
}
SPLITS = ["last", *DATES["online_retail"], *DATES["complete_journey"], "before_last"]
KNOWN = {"1": (1, 1), "2–3": (2, 3), "4+": (4, 10**9)}  # baskets before the one held out
POPULAR = 100  # items
COLUMNS = ("all", "new", "model − it, all", "model − it, new")
Users = list[dict[str, Any]]  # a row of each, in the order of the held-out histories


def ranked(directory: Path, shop: str, split: str, now: bool, seeds: int) -> tuple[dict[str, list[Users]], Path]:
    """Train and rank; return each method's users, of the model once a seed, and where the data are."""
    text = yaml.safe_load((ROOT / "configs" / "events" / "head.yaml").read_text())
    hold_out = split if "last" in split else float(timegm(time.strptime(split, "%Y-%m-%d")))
    made = directory / "made"
    arguments = text["data"].pop("prepare")["args"] | {"shop": shop, "hold_out": hold_out, "request_time": now}
    prepare(str(made), **arguments)
    text["evaluate"]["ranking"]["catalogue"] = str(made / "catalogue.json")
    found: dict[str, list[Users]] = {"model": []}
    for seed in range(seeds):
        rivals = json.loads(CHOSEN.read_text()) if not seed else {}
        text["evaluate"]["ranking"]["baselines"] = rivals
        job = yaml.safe_dump(text | {"output": str(directory / "runs"), "seed": seed})
        loaded = loads(job.replace("prepare:", f"{made}/"))
        there = run(loaded, f"seed_{seed}")
        measure_run(loaded, there)
        found["model"].append(kept(there / "ranked" / "next.jsonl"))
        for name in rivals:
            found[name] = [kept(there / "ranked" / "baselines" / name / "next.jsonl")]
    return found, made


def compared(found: Mapping[str, list[Users]], made: Path) -> Row:
    """The figures of a split: means, differences of the model from each rival, and where they come from."""
    known = load(str(made / "histories.jsonl"))
    prompts = kept(made / "held_out.jsonl")
    count = np.array([len(known[row["user"]]) for row in prompts])
    catalogue = json.loads((made / "catalogue.json").read_text())["items"]
    popular = {item["name"] for item in sorted(catalogue, key=lambda item: -item["popularity"])[:POPULAR]}
    row: Row = {"users": len(prompts), "own share of baskets": own_share(prompts, [p["future"][0] for p in prompts])}
    ndcg = {
        name: {
            task: np.mean([[user.get(f"{task}/ndcg@10", np.nan) for user in users] for users in seeds], 0)
            for task in ("all", "new")
        }
        for name, seeds in found.items()
    }
    for name, seeds in found.items():
        lists = [[user["all/top"] for user in users] for users in seeds]
        row[name] = {
            **{task: float(np.nanmean(x)) for task, x in ndcg[name].items()},
            "seeds": [float(np.mean([user["all/ndcg@10"] for user in users])) for users in seeds],
            **{
                f"known {k}": float(x[(count >= a) & (count <= b)].mean())
                for k, (a, b) in KNOWN.items()
                for x in [ndcg[name]["all"]]
                if ((count >= a) & (count <= b)).any()
            },
            "popular": float(np.mean([[item in popular for item in top] for seed in lists for top in seed])),
            "own": float(np.mean([own_share(prompts, seed) for seed in lists])),
        }
        for task in ("all", "new") if name != "model" else ():
            gap = ndcg["model"][task] - ndcg[name][task]
            row[name][f"model − {task}"] = interval(gap[~np.isnan(gap)])
    return row


def own_share(prompts: Users, lists: Sequence[Sequence[str]]) -> float:
    """The mean share of items that the customer had."""
    shares = [np.mean([item in row["history"] for item in one]) for row, one in zip(prompts, lists, strict=True)]
    return float(np.mean(shares))


def page(rows: Sequence[Row]) -> str:
    parts = [
        head("Next baskets, beside what counts").rstrip(),
        "",
        "NDCG@10 of the next basket (`all`), and of its items that are new to the customer (`new`). The model is that\n"
        "of configs/events/head.yaml; its figures are means of its seeds. Differences are paired by customer, with\n"
        "95 % bootstrap intervals. *Popular*: share of the lists that is among the 100 most popular items.\n"
        "*Own*: share of the lists that the customer had before. Settings were chosen on baskets before the\n"
        "last (events_rivals.md). *Read*: times that this script has ranked a split, the lines of events_splits.jsonl.",
    ]
    reads = Counter((row["shop"], row["split"], row["now"]) for row in rows)
    for row in rows:
        told = f"{row['shop']}, {row['split']}{', with the time of the request' if row['now'] else ''}"
        names = [name for name in row if isinstance(row[name], dict)]
        best = {task: max((n for n in names if n != "model"), key=lambda n: row[n][task]) for task in ("all", "new")}
        low = row[best["all"]]["model − all"][1]
        high = row[best["all"]]["model − all"][2]
        said = "is above" if low > 0 else "is below" if high < 0 else "is not apart from"
        seeds = ", ".join(f"{x:.4f}" for x in row["model"]["seeds"])
        parts += [
            "",
            f"## {told}",
            "",
            f"{row['users']:,} customers. The model {said} the best that counts, {best['all']}, on all items; the best "
            f"on new items is {best['new']}. Seeds: {seeds}. "
            f"Own share of the baskets: {row['own share of baskets']:.2f}. "
            f"Measured: {row['date']}, commit {row['commit']}. "
            f"Read: {reads[row['shop'], row['split'], row['now']]}.",
            "",
            table(
                ["", *COLUMNS, *(f"known {k}" for k in KNOWN), "popular", "own"],
                [
                    [
                        name,
                        *(f"{row[name][task]:.4f}" for task in ("all", "new")),
                        *(apart(row[name][f"model − {task}"]) if name != "model" else "" for task in ("all", "new")),
                        *(f"{row[name][f'known {k}']:.4f}" if f"known {k}" in row[name] else "–" for k in KNOWN),
                        f"{row[name]['popular']:.2f}",
                        f"{row[name]['own']:.2f}",
                    ]
                    for name in names
                ],
            ),
        ]
    return "\n".join(parts) + "\n"


def main() -> int:
    given = options(__doc__, shops=[*DATES], splits=SPLITS, now=(["0", "1"], "0: without the time"), seeds=3)
    rows = kept(LEDGER)
    there = {(row["shop"], row["split"], row["now"]) for row in rows}
    for shop in given.shops:
        for split in (split for split in ("last", *DATES[shop], "before_last") if split in given.splits):
            for now in (now == "1" for now in given.now):
                if (shop, split, now) in there or (split == "before_last" and len(given.splits) > 1):
                    continue
                with tempfile.TemporaryDirectory() as scratch:
                    found, made = ranked(Path(scratch), shop, split, now, given.seeds)
                    row = {"shop": shop, "split": split, "now": now, **here(), **compared(found, made)}
                print(json.dumps(row), flush=True)
                if split != "before_last":
                    keep(LEDGER, row)
                    rows.append(row)
    RESULTS.write_text(page(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
