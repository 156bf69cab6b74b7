"""The main job, end to end: SFT on sums and differences, stopped early, then GRPO from what it published;
a table of what came of it.

    python benchmarks/main_job.py
    python benchmarks/main_job.py --seeds 0 1 2 --jobs 2 --control 0 --longer-sft 0

The first is what `make run` does: one seed, about 9 minutes on 2 cores. The second is what `make bench` does; it writes
results/main_job.md.

Every stage is the command a user would type; the numbers come from the manifests that the publish stage wrote.
`--control` repeats GRPO with the answers shuffled between prompts (it must not learn);
`--longer-sft` goes on with SFT for as long as GRPO took.
"""

from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from commands import options
from flow_runs import ROOT, flow, published, results_page
from pages import head, table, write_page


def line(name: str, metrics: dict[str, float], prefix: str, more: str = "") -> str:
    return f"{name:<28}{metrics[f'{prefix}greedy_pass_rate/test']:>10.3f}{metrics[f'{prefix}pass@8/test']:>10.3f}{more}"


def seed_run(seed: int, base: str, control: bool, longer: bool, jobs: int = 1) -> dict[str, dict[str, Any]]:
    """All runs of one seed, by name. With several jobs at once each run has one thread and writes to a log. Under
    runs/main_job/ what is published already is not run again."""
    demo = base == "runs/tiny"
    common = [] if demo else [f"seed={seed}"]
    common += ["compute.threads=1", "track.tensorboard=false"] if jobs > 1 else []
    log = ROOT / base / "log.txt" if jobs > 1 else None
    found: dict[str, dict[str, Any]] = {}

    def run(title: str, name: str, recipe: str, *more: str) -> None:
        spent = ROOT / base / name / "seconds"
        if demo or not spent.exists():
            spent.parent.mkdir(parents=True, exist_ok=True)
            output = [] if demo and name == recipe else [f"output={base}/{name}"]
            seconds = flow(recipe, f"configs/tiny/{recipe}.yaml", [*output, *common, *more], log)
            spent.write_text(f"{seconds:.1f}")
        found[title] = published(f"{base}/{name}") | {"wall_s": float(spent.read_text())}

    start = [] if demo else [f"model.path={base}/sft/published"]
    run("SFT", "sft", "sft")
    run("GRPO", "grpo", "grpo", *start)
    if control:
        run("GRPO, shuffled answers", "control", "grpo", *start, "data.prepare.args.shuffle_answers=true")
    if longer:
        steps = max(100, round(found["GRPO"]["train_s"] / found["SFT"]["step_s"]))
        further = [
            f"train.steps={steps}",
            "train.lr_decay_at_loss=null",
            "train.validate_every=0",
            "checkpoint.every=1000",
            f"model.path={base}/sft/published",
            "model.init=pretrained",
        ]
        run("SFT, for as long as GRPO", "longer", "sft", *further)
    return found


def summary(found: dict[str, dict[str, Any]]) -> str:
    sft = found["SFT"]["metrics"]
    lines = [
        f"{'held-out exact match':<28}{'greedy':>10}{'pass@8':>10}{'steps':>8}{'s/step':>9}{'wall s':>8}",
        line("untrained", sft, "starting_model/"),
    ]
    lines += [
        line(n, r["metrics"], "", f"{r['steps']:>8}{r['step_s']:>9.3f}{r['wall_s']:>8.0f}") for n, r in found.items()
    ]
    lines.append("")
    for name, run in found.items():
        lines.append(f"{name}: run {run['run']}, metrics {run['run']}/metrics.jsonl, published {run['published']}")
    return "\n".join(lines)


def write_results(every: dict[int, dict[str, dict[str, Any]]]) -> None:
    rows, gains = [], []
    names = list(max(every.values(), key=len))
    for seed, found in every.items():
        sft, start = found["SFT"]["metrics"], found["SFT"]["metrics"]["starting_model/greedy_pass_rate/test"]
        cells = [
            f"{found[n]['metrics']['greedy_pass_rate/test']:.3f} / {found[n]['metrics']['pass@8/test']:.3f}"
            if n in found
            else "–"
            for n in names
        ]
        gain = found["GRPO"]["metrics"]["greedy_pass_rate/test"] - sft["greedy_pass_rate/test"]
        gains.append(gain)
        rows.append([seed, f"{start:.3f}", *cells, f"{100 * gain:+.1f}"])
    diffs = [row["logprob_diff_max"] for found in every.values() for row in found["GRPO"]["rows"]]
    times = []
    for name in names:
        runs = [f[name] for f in every.values() if name in f]
        walls = [r["wall_s"] for r in runs]
        medians = [f"{median(r['steps'] for r in runs):.0f}", f"{median(r['step_s'] for r in runs):.3f}"]
        times.append([name, *medians, f"{min(walls):.0f} – {max(walls):.0f}"])
    about = head("The main job: SFT, then GRPO, on sums and differences") + (
        "Held-out exact match on 500 questions whose pairs of operands were never trained on, one greedy answer "
        "(greedy accuracy) / any of 8\nsamples at temperature 1 (pass@8). A single greedy accuracy of 0.5 on 500 "
        "questions has a 95 % interval of ± 0.044.\n\n"
    )
    words = (
        f"\nGRPO over its SFT start: {100 * min(gains):+.1f} to {100 * max(gains):+.1f} points. Largest log-prob "
        f"difference between vLLM and the trainer in\nall {len(diffs)} GRPO steps: {max(diffs):.2e} (median of the "
        f"steps' maxima {median(diffs):.2e}).\n"
    )
    seeds = table(["seed", "untrained", *names, "GRPO over SFT, points"], rows)
    spent = table("run | steps | s per step (median) | wall seconds of the flow", times)
    write_page(results_page("main_job.md"), about, [seeds, words, spent])


def main() -> None:
    given = options(
        __doc__,
        seeds=([], "several seeds, under runs/main_job/, with a results page"),
        jobs=(1, "seeds at once, one thread each"),
        control=([], "GRPO with shuffled answers, too, on these seeds"),
        longer_sft=([], "SFT for as long as GRPO took, too, on these seeds"),
    )
    if not given.seeds:
        print(f"\n{summary(seed_run(0, 'runs/tiny', 0 in given.control, 0 in given.longer_sft))}")
        return
    every: dict[int, dict[str, dict[str, Any]]] = {}
    (ROOT / ".metaflow").mkdir(exist_ok=True)  # two first runs at once would both make it, and one would fail
    with ThreadPoolExecutor(given.jobs) as pool:
        futures = {
            s: pool.submit(seed_run, s, f"runs/main_job/{s}", s in given.control, s in given.longer_sft, given.jobs)
            for s in given.seeds
        }
        for seed, future in futures.items():
            every[seed] = future.result()
            print(f"\nseed {seed}\n{summary(every[seed])}\n", flush=True)
    write_results(every)


if __name__ == "__main__":
    main()
