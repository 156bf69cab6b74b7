"""Next baskets of Online Retail II: models trained by configs/events/sft.yaml and head.yaml, and what
configs/events/grpo.yaml makes of the first, beside popularity, personal frequency, recency, item-kNN, co-occurrence and
a SASRec-style transformer, on the same split, user by user. Writes results/events.md and events.svg.

    python flows/sft_flow.py run --config configs/events/sft.yaml
    python flows/sft_flow.py run --config configs/events/head.yaml
    python flows/grpo_flow.py run --config configs/events/grpo.yaml
    python benchmarks/events.py [--sft RUN] [--head RUN] [--grpo RUN] [--hold-out last] [--sasrec-minutes 10]

The business reward is of slates of ten items (ptf.tasks.slates), drawn as in training and said greedily.
"""

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pages
import torch
from commands import ROOT, options
from flow_runs import results_page
from pages import head, kept, table, today
from torch import nn

from ptf.config import load
from ptf.config.sections.rollout import ConstrainedDecodingConfig
from ptf.data.tokenizer import Tokenizer
from ptf.events.baselines import fit
from ptf.events.catalogue import Catalogue
from ptf.events.histories import Split
from ptf.events.prepare import read_events
from ptf.events.purchases import Purchases
from ptf.events.ranking_metrics import coverage, diversity, interval, measures
from ptf.rl.engines.native import NativeEngine
from ptf.rl.engines.protocol import Request, Sampling
from ptf.tasks.shops import prepare, source
from ptf.tasks.slates import worth

RESULTS = results_page("events.md")
K = 10
MEASURES = ("NDCG", "HR", "recall", "MRR", "revenue recall", "diversity", "coverage")
COUNTED = {  # in the page → in ptf.events.baselines
    "popularity": "popularity",
    "personal frequency": "personal_frequency",
    "recency": "recency",
    "item-kNN": "item_knn",
}
DRAWN = 4  # slates of each user
Scores = Callable[[Split], np.ndarray]  # of one user: a score for every item
Users = dict[str, dict[str, float]]  # user → measures


def judged(
    scores: Scores, splits: Mapping[str, Split], items: Sequence[str], value: Mapping[str, float], vectors: np.ndarray
) -> tuple[Users, dict[str, float]]:
    place = {item: i for i, item in enumerate(items)}
    found: Users = {}
    lists: dict[str, list[list[int]]] = {"all": [], "new": []}
    for user, s in splits.items():
        had = {place[item] for basket in s.before for item in basket.items}
        wanted = [place[item] for item in s.future[0].items]
        those = scores(s)
        unseen = those.copy()
        unseen[list(had)] = -np.inf
        row = {}
        for task, ranked_by, target in (
            ("all", those, wanted),
            ("new", unseen, [item for item in wanted if item not in had]),
        ):
            if target:
                ranked = np.argsort(-ranked_by, kind="stable")[:K].tolist()
                lists[task].append(ranked)
                row |= {
                    f"{task}/{name}": x
                    for name, x in measures(ranked, {item: value[items[item]] for item in target}, K).items()
                }
                row[f"{task}/diversity@{K}"] = diversity(vectors[ranked])
        found[user] = row
    return found, {f"{task}/coverage@{K}": coverage(lists[task], len(items)) for task in lists}


def simple(splits: Mapping[str, Split], items: Sequence[str]) -> dict[str, Scores]:
    """The baselines of ptf.events.baselines, and the items that are in baskets with those of the last one."""
    place, histories = {item: i for i, item in enumerate(items)}, [(user, s.before) for user, s in splits.items()]
    train = Purchases.of(histories, items)
    fitted = {shown: fit(name, {}, train) for shown, name in COUNTED.items()}
    _, basket = np.unique([train.user, train.basket], axis=1, return_inverse=True)
    table_of = np.zeros((basket.max() + 1, len(items)), np.float32)
    table_of[basket.ravel(), train.item] = 1
    together = cosine(table_of)

    def by(scores) -> Scores:
        return lambda s: scores(Purchases.of([("", s.before)], items))[0]

    return {shown: by(scores) for shown, scores in fitted.items()} | {
        "co-occurrence, last basket": lambda s: together[[place[item] for item in s.before[-1].items]].sum(0)
    }


def cosine(x: np.ndarray) -> np.ndarray:
    both = x.T @ x
    size = np.sqrt(np.maximum(np.diag(both), 1e-9))
    both /= size[:, None] * size
    np.fill_diagonal(both, 0)
    return both


class SASRec(nn.Module):
    """Kang and McAuley 2018: a causal transformer over items with places that are learned; here with a softmax over all
    items, which does better than the paper's one negative (Klenitskiy and Vasilev 2023)."""

    def __init__(
        self, items: int, dim: int = 128, layers: int = 2, heads: int = 2, longest: int = 200, drop: float = 0.2
    ) -> None:
        super().__init__()
        self.longest = longest
        self.items, self.places = nn.Embedding(items + 1, dim, padding_idx=items), nn.Embedding(longest, dim)
        nn.init.normal_(self.items.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            dim, heads, 4 * dim, drop, batch_first=True, norm_first=True, activation="gelu"
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.drop = nn.LayerNorm(dim), nn.Dropout(drop)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        """[B, T], padded on the left → [B, T, D]."""
        t = items.shape[1]
        x = self.drop(self.items(items) * self.items.embedding_dim**0.5 + self.places.weight[-t:])
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
        return self.norm(self.layers(x, mask=hidden))


def sasrec(splits: Mapping[str, Split], items: Sequence[str], minutes: float, seed: int = 0) -> tuple[Scores, str]:
    torch.manual_seed(seed)
    rng, place, n = np.random.default_rng(seed), {item: i for i, item in enumerate(items)}, len(items)

    def told(s):
        return [place[item] for basket in s.before for item in basket.items]

    model = SASRec(n)
    pieces = []
    for s in splits.values():
        ids = told(s)
        pieces += [ids[max(0, at - model.longest - 1) : at] for at in range(len(ids), 1, -model.longest)]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    began, passes = time.process_time(), 0
    while time.process_time() - began < 60 * minutes:
        order = rng.permutation(len(pieces))
        lengths = np.array([len(pieces[i]) for i in order])
        for at in range(0, len(order), 1024):  # of like lengths together
            order[at : at + 1024] = order[at : at + 1024][np.argsort(lengths[at : at + 1024])]
        starts = rng.permutation(range(0, len(order), 32))
        for at in starts:
            rows = [pieces[i] for i in order[at : at + 32]]
            width = max(map(len, rows)) - 1
            x, y = (torch.full((len(rows), width), n) for _ in range(2))
            for row, ids in enumerate(rows):
                x[row, width - len(ids) + 1 :] = torch.tensor(ids[:-1])
                y[row, width - len(ids) + 1 :] = torch.tensor(ids[1:])
            hidden = model(x)[y < n]
            loss = nn.functional.cross_entropy(hidden @ model.items.weight[:n].T, y[y < n])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        passes += 1
    model.eval()

    @torch.no_grad()
    def scores(s: Split) -> np.ndarray:
        return (model(torch.tensor([told(s)[-model.longest :]]))[0, -1] @ model.items.weight[:n].T).numpy()

    return scores, f"{passes} passes, {time.process_time() - began:.0f} CPU-seconds"


def mean(users: Users, name: str) -> float:
    return float(np.mean([row[name] for row in users.values() if name in row]))


def apart(a: Users, b: Users, name: str) -> tuple[float, float, float]:
    """a − b over the users who have it, and its interval."""
    return interval(np.array([a[user][name] - b[user][name] for user in a if name in a[user]]))


def cells_of(users: Users, coverages: Mapping[str, float]) -> list[str]:
    """Of one model, by task and measure."""
    names = ("ndcg", "hr", "recall", "mrr", "revenue_recall", "diversity")
    tasks = [
        [*(f"{mean(users, f'{task}/{name}@{K}'):.4f}" for name in names), f"{coverages[f'{task}/coverage@{K}']:.3f}"]
        for task in ("all", "new")
    ]
    return list(itertools.chain(*tasks))


def losing(cells: Mapping[str, Sequence[str]]) -> list[str]:
    """Where a baseline is better than every model of ptf's, and where training on made it worse;
    of the figures of the page's table."""
    ours = [name for name in cells if name.startswith("ptf ")]
    places = {f"{task} {measure}": i for i, (task, measure) in enumerate(itertools.product(("all", "new"), MEASURES))}
    worse, beaten = [], dict[str, list[str]]()
    for place, i in places.items():
        best = max(ours, key=lambda name: float(cells[name][i]))
        better = sorted(
            (name for name in cells if name not in ours and float(cells[name][i]) > float(cells[best][i])),
            key=lambda name: -float(cells[name][i]),
        )
        beaten[place] = better
        if better:
            names = ", ".join(f"{name} ({cells[name][i]})" for name in better)
            worse.append([place, names, f"{best} ({cells[best][i]})"])
    said = []
    for task, what in (
        ("all", "the next basket, items bought before included"),
        ("new", "items that are new to the user"),
    ):
        better = beaten[f"{task} NDCG"]
        tell = (
            f"**{' and '.join(better)} beat{'s' if len(better) == 1 else ''} every model of ptf's**"
            if better
            else "no baseline beats ptf's best model"
        )
        said.append(f"* By NDCG, of {what} (`{task}`): {tell}.")
    after, before = (
        float(cells[name][places["all NDCG"]]) if name in cells else 0.0 for name in ("ptf GRPO", "ptf SFT")
    )
    if 0.0 < after < before:
        said.append(
            f"* GRPO on slates lowers NDCG of the next basket from {before:.4f} to {after:.4f}: "
            "its reward is another (below)."
        )
    rows = ["", "By every measure, the baselines that are better than the best of ptf's models:", ""]
    return ["## What loses", "", *said, *([*rows, table(" | better | ptf's best", worse)] if worse else [])]


def main() -> int:
    told = "a run's directory; default: the newest in runs/events/"
    runs = {name: ("", f"{told}{name}") for name in ("sft", "head", "grpo")}
    given = options(__doc__, **runs, hold_out="last", sasrec_minutes=10.0, seed=0)
    given.sft, given.head, given.grpo = (
        Path(getattr(given, name)) if getattr(given, name) else newest(name) for name in runs
    )
    if given.sft is None:
        sys.exit(
            "there is no evaluated run in runs/events/sft: python flows/sft_flow.py run --config "
            "configs/events/sft.yaml makes one"
        )
    hold_out = given.hold_out if given.hold_out in ("last", "before_last") else float(given.hold_out)
    facts, every, _ = read_events(**source("online_retail"), hold_out=hold_out)
    items, value = list(facts), {name: item.value for name, item in facts.items()}
    trained = {user: s for user, s in every.items() if s.before}
    held = {user: s for user, s in trained.items() if s.future}
    found: dict[str, Users] = {}
    coverages: dict[str, dict[str, float]] = {}
    scratch = tempfile.TemporaryDirectory()
    made = Path(scratch.name)
    job = load(str(given.sft / "job.yaml"))
    assert job.data.prepare is not None
    prepare(str(made), **{**job.data.prepare.args, "hold_out": hold_out})
    vectors = np.load(made / "vectors.npy")
    for name, scores in simple(trained, items).items():
        found[name], coverages[name] = judged(scores, held, items, value, vectors)
        print(f"{name}: {mean(found[name], f'all/ndcg@{K}'):.4f} {mean(found[name], f'new/ndcg@{K}'):.4f}", flush=True)
    scores, cost = sasrec(trained, items, given.sasrec_minutes, given.seed)
    found["SASRec-style"], coverages["SASRec-style"] = judged(scores, held, items, value, vectors)
    runs = {"ptf SFT": given.sft, "ptf SFT, set-wise head": given.head, "ptf GRPO": given.grpo}
    for name, run in ((name, run) for name, run in runs.items() if run):
        rows = kept(run / "ranked" / "next.jsonl")
        found[name] = {row["user"]: {key: x for key, x in row.items() if isinstance(x, float)} for row in rows}
        other = f"{run} was evaluated on other users than --hold-out {given.hold_out} holds out"
        assert found[name].keys() == held.keys(), other
        coverages[name] = {
            f"{task}/coverage@{K}": len({item for row in rows for item in row.get(f"{task}/top", ())}) / len(items)
            for task in ("all", "new")
        }
    cells = {name: cells_of(found[name], coverages[name]) for name in found}
    names = ["", *(f"{task} {name}" for task in ("all", "new") for name in MEASURES)]
    command = f"`python benchmarks/events.py --hold-out {given.hold_out} --sasrec-minutes {given.sasrec_minutes:g}`"
    date = f"{today()}; seed {given.seed}; SASRec-style: {cost}"
    text = [
        head("Next baskets of Online Retail II", date=date, command=f"{command}, after the flows").rstrip(),
        "",
        f"{len(held)} users have a basket held out, of whom "
        f"{sum(f'new/ndcg@{K}' in row for row in found['popularity'].values())} have an item in it that is "
        "new to them. `all`: the next basket; `new`: those of its items that the user had not had, "
        f"among all that they had not. All measures are at {K}.",
        "",
        *losing(cells),
        "",
        "## All models",
        "",
        table(names, [[name, *row] for name, row in cells.items()]),
        "",
        "![NDCG of all models](events.svg)",
        "",
        "## Beside each other, user by user",
        "",
        f"Differences of NDCG@{K}, with 95 % bootstrap intervals over users (10,000 draws).",
        "",
    ]
    pairs = [("ptf SFT", name) for name in found if name not in ("ptf SFT", "ptf GRPO")]
    pairs += [("ptf GRPO", "ptf SFT")] if given.grpo else []
    differences = [
        [f"{a} − {b}", *(pages.apart(apart(found[a], found[b], f"{task}/ndcg@{K}")) for task in ("all", "new"))]
        for a, b in pairs
    ]
    text.append(table(" | all | new", differences))
    if given.grpo:
        fell = mean(found["ptf GRPO"], f"all/ndcg@{K}") / mean(found["ptf SFT"], f"all/ndcg@{K}") - 1
        text += [
            "",
            f"GRPO changes NDCG@{K} over all items by {fell:+.1%} of SFT's.",
            "",
            *business(given.sft, given.grpo, made),
        ]
        text += ["", "![The reward of slates by step](events_reward.svg)"]
        curve(kept(given.grpo / "metrics.jsonl"), RESULTS.with_name("events_reward.svg"))
    RESULTS.write_text("\n".join(text) + "\n")
    plot(
        {name: tuple(mean(users, f"{task}/ndcg@{K}") for task in ("all", "new")) for name, users in found.items()},
        RESULTS.with_suffix(".svg"),
    )
    print("\n".join(text), f"\nwrote {RESULTS.relative_to(ROOT)}")
    return 0


def newest(kind: str) -> Path | None:
    """The run that was evaluated last."""
    runs = sorted((ROOT / "runs" / "events" / kind).glob("*/ranked/next.jsonl"), key=lambda file: file.stat().st_mtime)
    return runs[-1].parents[1] if runs else None


def business(sft: Path, grpo: Path, made: Path) -> list[str]:
    """What the two models' slates are worth: drawn as they were trained to be, and said greedily."""
    job = load(str(grpo / "job.yaml"))
    assert job.rollout is not None
    assert job.rollout.constrained_decoding is not None
    rows = []
    for how, temperature in (
        (f"drawn at temperature {job.rollout.temperature:g}, {DRAWN} a user", job.rollout.temperature),
        ("greedy", 0.0),
    ):
        parts = {
            who: slates(run / "model", made, job.rollout.constrained_decoding, temperature)
            for who, run in (("SFT", sft), ("GRPO", grpo))
        }
        rows, lines = [*rows, "", f"Slates of ten, {how}:", ""], []
        for name in ("reward", "revenue", "diversity", "novelty", "distinct", "invalid"):
            before, after = (np.array([p[name] for p in parts[who]]) for who in ("SFT", "GRPO"))
            lines.append([name, f"{before.mean():.4f}", f"{after.mean():.4f}", pages.apart(interval(after - before))])
        rows.append(table(" | SFT | GRPO | difference, 95 % interval", lines))
    return [
        "## The business reward",
        "",
        "Revenue recall + 0.1 diversity + 0.1 novelty (ptf.tasks.slates), of held-out baskets.",
        *rows,
    ]


def slates(model: Path, made: Path, allowed: ConstrainedDecodingConfig, temperature: float) -> list[dict[str, float]]:
    """Of each user the mean of what their slates are worth."""
    engine = NativeEngine(str(model), device=torch.device("cpu"), dtype=torch.float32, version=0)
    tokenizer = Tokenizer.load(str(model))
    catalogue = str(made / "catalogue.json")
    items = Catalogue.load(catalogue)
    trie = items.trie(tokenizer, allowed.lines_per_response, allowed.distinct)
    sampling = Sampling(trie.longest, temperature, tokenizer.stop_ids, trie=trie)
    rows = kept(made / "held_out.jsonl")
    contexts = [np.array(tokenizer.render(row["messages"], True), np.int32) for row in rows]
    order, times = sorted(range(len(rows)), key=lambda i: len(contexts[i])), DRAWN if temperature else 1
    found: dict[int, dict[str, float]] = {}
    for at in range(0, len(order), 128):
        here = order[at : at + 128]
        generations = engine.answer([Request(contexts[i], sampling, DRAWN * i + n) for i in here for n in range(times)])
        for j, i in enumerate(here):
            said = [
                tokenizer.decode(generation.sampled_ids[:-1]) for generation in generations[times * j : times * (j + 1)]
            ]
            worths = [
                worth(text, rows[i]["future"][0], catalogue=catalogue)
                | {"invalid": float(np.mean([x is None for x in items.read(text)]))}
                for text in said
            ]
            found[i] = {name: float(np.mean([w[name] for w in worths])) for name in worths[0]}
    return [found[i] for i in range(len(rows))]


def plot(bars: Mapping[str, tuple[float, ...]], path: Path) -> None:
    most, height = max(max(pair) for pair in bars.values()), 28
    shapes = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{height * len(bars) + 40}" '
            'font-family="sans-serif" font-size="12">'
        ),
        f'<text x="10" y="16">NDCG@{K}: next basket (dark), items new to the user (light)</text>',
    ]
    for i, (name, pair) in enumerate(bars.items()):
        y = 30 + i * height
        shapes.append(f'<text x="170" y="{y + 14}" text-anchor="end">{name}</text>')
        for j, (x, colour) in enumerate(zip(pair, ("#36648b", "#9fc5e8"), strict=True)):
            width = 400 * x / most
            shapes.append(f'<rect x="180" y="{y + 10 * j}" width="{width:.1f}" height="9" fill="{colour}"/>')
            shapes.append(f'<text x="{185 + width:.1f}" y="{y + 10 * j + 9}" font-size="9">{x:.3f}</text>')
    path.write_text("\n".join([*shapes, "</svg>"]) + "\n")


def curve(steps: Sequence[Mapping[str, float]], path: Path) -> None:
    """The reward of GRPO's slates: a step's mean over what was drawn, and greedily for the customers held out."""
    drawn = [(row["step"], row["reward"]) for row in steps]
    held = [(row["step"], row["greedy_reward/slates"]) for row in steps if "greedy_reward/slates" in row]
    last, (low, high) = drawn[-1][0], (min(y for _, y in drawn), max(y for _, y in drawn))

    def at(x, y):
        return f"{50 + 560 * x / last:.1f},{230 - 190 * (y - low) / (high - low):.1f}"

    shapes = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="260" font-family="sans-serif" font-size="12">',
        (
            '<text x="10" y="16">Reward of a slate by step: drawn in training (line), '
            "greedy on held-out baskets (dots)</text>"
        ),
        f'<polyline fill="none" stroke="#36648b" points="{" ".join(at(*point) for point in drawn)}"/>',
        *(f'<circle r="4" fill="#c0504d" cx="{at(*p).split(",")[0]}" cy="{at(*p).split(",")[1]}"/>' for p in held),
        *(f'<text x="5" y="{at(0, y).split(",")[1]}">{y:.2f}</text>' for y in (low, high)),
        f'<text x="590" y="250">{last}</text>',
    ]
    path.write_text("\n".join([*shapes, "</svg>"]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
