"""Rivals that count, on Online Retail II: their settings are chosen on each customer's basket before the last.
Writes results/events_rivals.md, and the chosen settings into results/events_rivals.json.

    python benchmarks/events_rivals.py            # chooses; does not read the last basket
    python benchmarks/events_rivals.py --test     # the last basket, with the committed settings

Each setting is chosen in turn, in the order of GRIDS, by NDCG@10 of the whole next basket.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pages
from commands import options
from flow_runs import results_page
from pages import head, table, today

from ptf.events.baselines import BASELINES, fit, standardised
from ptf.events.prepare import read_events
from ptf.events.purchases import Purchases
from ptf.events.ranking_metrics import interval
from ptf.tasks.shops import source

RESULTS, CHOSEN, K = results_page("events_rivals.md"), results_page("events_rivals.json"), 10
BATCH = 512  # customers that are scored at once
NEIGHBOURS = {"neighbours": (12, 25, 50, 100, 200), "own_weight": (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)}
GRIDS: dict[str, dict[str, tuple]] = {
    "popularity": {"days": (0.0, 14.0, 30.0, 60.0, 90.0)},
    "personal_frequency": {},
    "recency": {},
    "decayed_frequency": {
        "decay": (0.75, 0.8, 0.85, 0.9, 0.95),
        "popularity": (0.1, 0.3, 1.0, 3.0, 10.0),
        "half_life": (0.0, 30.0, 60.0, 120.0, 240.0),
    },
    "item_knn": {},
    "up_cf": {"recency": (5, 10, 20), "alpha": (0.25, 0.5, 0.75), "locality": (2.0, 5.0, 10.0)},
    "tifu_knn": {
        **NEIGHBOURS,
        "groups": (1, 2, 4, 7, 20),
        "within_decay": (0.8, 0.9, 1.0),
        "group_decay": (0.6, 0.7, 0.8, 0.9),
    },
    "tifu_knn_time": {
        **NEIGHBOURS,
        "group_days": (15.0, 30.0, 60.0, 120.0),
        "within_decay": (0.99, 0.995, 1.0),
        "group_decay": (0.3, 0.45, 0.6, 0.7, 0.8, 0.9),
    },
    "taiw": {**NEIGHBOURS, "prior": (5.0, 20.0, 100.0), "popularity": (1e-4, 1e-3, 1e-2)},
    "ease": {"l2": (12.0, 25.0, 50.0, 150.0, 400.0), "decay": (0.5, 0.7, 0.9, 1.0)},
}
MIXED = {"up_cf": (0.1, 0.3, 1.0), "ease": (0.1, 0.3, 0.6)}  # weights beside TIFU-kNN with weight 1
Users = dict[str, np.ndarray]  # task → NDCG of each customer, NaN where there is nothing to find


class Customers:
    """What may be trained on, and the baskets that are held out."""

    def __init__(self, hold_out: str) -> None:
        facts, every, _ = read_events(**source("online_retail"), hold_out=hold_out)
        self.items, place = list(facts), {item: i for i, item in enumerate(facts)}
        self.train = Purchases.of([(user, s.before) for user, s in every.items() if s.before], self.items)
        self.held = [(user, s.before) for user, s in every.items() if s.before and s.future]
        self.wanted = np.zeros((len(self.held), len(facts)), bool)
        for row, (user, _) in enumerate(self.held):
            self.wanted[row, [place[item] for item in every[user].future[0].items]] = True

        batches = [self.held[start : start + BATCH] for start in range(0, len(self.held), BATCH)]
        self.asked = [Purchases.of(batch, self.items) for batch in batches]
        self.had = np.concatenate([asked.had.toarray() > 0 for asked in self.asked])

    def scores(self, name: str, settings: Mapping[str, Any]) -> np.ndarray:
        """The scores of a baseline with these settings, [customers, items]."""
        scored = fit(name, settings, self.train)
        return np.concatenate([scored(asked) for asked in self.asked])

    def ndcg(self, scores: np.ndarray) -> Users:
        """The NDCG of each customer."""
        new = np.where(self.had, -np.inf, scores)
        return {"all": ndcg(scores, self.wanted), "new": ndcg(new, self.wanted & ~self.had)}


def ndcg(scores: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """As ptf.events.ranking_metrics has it, of many customers: equal scores in the catalogue's order."""
    discounts, found = 1 / np.log2(np.arange(2, K + 2)), []
    least = np.partition(scores, -K, axis=1)[:, -K]
    for row, targets in enumerate(wanted):
        likely = np.flatnonzero(scores[row] >= least[row])
        top = likely[np.argsort(-scores[row, likely], kind="stable")[:K]]
        count = min(K, int(targets.sum()))
        found.append(float((targets[top] * discounts).sum() / discounts[:count].sum()) if count else np.nan)
    return np.array(found)


def tuned(customers: Customers, name: str, grid: Mapping[str, tuple], settings: dict[str, Any]) -> dict[str, Any]:
    best = float(np.nanmean(ndcg(customers.scores(name, settings), customers.wanted)))
    for key, values in grid.items():
        for value in values:
            here = float(np.nanmean(ndcg(customers.scores(name, settings | {key: value}), customers.wanted)))
            if here > best:
                best, settings = here, settings | {key: value}
    print(f"{name}: {best:.4f} {settings}", flush=True)
    return settings


def mixed(customers: Customers, chosen: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The weights of the mix, with the chosen settings of what is mixed."""
    parts = {name: standardised(customers.scores(name, chosen[name])) for name in ("tifu_knn", *MIXED)}
    weights, best = {"tifu_knn": 1.0, "up_cf": 0.3, "ease": 0.3}, -1.0
    for name, values in MIXED.items():
        for value in values:
            tried = weights | {name: value}
            scores = np.sum([weight * parts[part] for part, weight in tried.items()], axis=0)
            here = float(np.nanmean(ndcg(scores, customers.wanted)))
            if here > best:
                best, weights = here, tried
    print(f"mix: {best:.4f} {weights}", flush=True)
    return {"of": {name: {"weight": weight, **chosen[name]} for name, weight in weights.items()}}


def apart(a: Users, b: Users, task: str) -> str:
    difference = a[task] - b[task]
    return pages.apart(interval(difference[~np.isnan(difference)]))


def main() -> int:
    given = options(__doc__, test=(False, "read the last basket, with the settings that were chosen before"))
    customers = Customers("last" if given.test else "before_last")
    if given.test:
        chosen = json.loads(CHOSEN.read_text())
    else:
        chosen = {name: tuned(customers, name, grid, {}) for name, grid in GRIDS.items()}
        chosen["mix"] = mixed(customers, chosen)
        CHOSEN.write_text(json.dumps(chosen, indent=1) + "\n")
    return page(customers, chosen, given.test)


def page(customers: Customers, chosen: Mapping[str, dict[str, Any]], test: bool) -> int:
    """Write the page of the chosen settings."""
    found = {name: customers.ndcg(customers.scores(name, chosen[name])) for name in BASELINES}
    rows = [
        [
            name,
            *(f"{np.nanmean(users[task]):.4f}" for task in ("all", "new")),
            *("" if name == "tifu_knn" else apart(users, found["tifu_knn"], task) for task in ("all", "new")),
            f"`{json.dumps(chosen[name])}`",
        ]
        for name, users in found.items()
    ]
    which = "last basket" if test else "basket before the last"
    command = "`python benchmarks/events_rivals.py" + (" --test`" if test else "`")
    text = [
        head("Rivals that count, on Online Retail II", date=today(), command=command).rstrip(),
        "",
        f"NDCG@{K} of the {which} of {len(customers.held)} customers; `new`: of items that are new to the customer.",
        "Settings were chosen on the basket before the last, by `all`, one after the other, from the script's grids.",
        *([] if test else ["The figures are of that same basket, so they flatter what has more settings."]),
        "The last columns are differences from TIFU-kNN, customer by customer, with 95 % bootstrap intervals.",
        "Names and settings are those of `evaluate.ranking.baselines`; `{}`: the defaults.",
        "",
        table(["", "all", "new", "all − TIFU-kNN", "new − TIFU-kNN", "settings"], rows),
    ]
    RESULTS.write_text("\n".join(text) + "\n")
    print(RESULTS.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
