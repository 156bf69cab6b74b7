"""The DPO step beside TRL's DPOTrainer, in one interleaved run (A, B, A, B, …): real tokens per CPU-second of one
thread, on the same pairs from the same weights, so that the losses of every step must be the same too.

    make peers                                    # .venv-peers from benchmarks/requirements-peers.txt
    python benchmarks/dpo_step.py [--models small4 bigvocab] [--rounds 3]

Pairs: a prompt (log-normal, median 90 tokens) and two answers (median 180), of at most 600 each; 8 pairs a step. Both
train Qwen3 shapes, AdamW, one thread, beside a reference that is a model of its own. ptf packs a step's pairs into
sequences of up to 2,048, a sequence a pass. TRL pads the pairs of a pass to the longest, so it runs twice: all pairs of
a step in one pass, and each in a pass of its own (gradient accumulation), which pads less. Prints a JSON line a round
and writes results/dpo_step.md.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from flow_runs import ROOT, cpu
from train_step import HEADS, MODELS, PEER, WIDTH, round_of

RESULTS = ROOT / "benchmarks" / "results" / "dpo_step.md"
PAIRS, LR, BETA = 8, 2e-5, 0.1
SYSTEMS = {"ptf": PAIRS, "TRL, all pairs in one pass": PAIRS, "TRL, a pair a pass": 1}  # pairs in a pass
# the most that losses of the same step may differ by: AdamW turns the rounding of small gradients into steps
APART = 1e-3


def pairs(path: Path, vocab: int, count: int) -> None:
    """`lengths` [count, 3] of prompt, chosen and rejected answer; `tokens`, one after the other."""
    rng = np.random.default_rng(0)
    drawn = [
        np.clip(rng.lognormal(np.log(mean), spread, count), 4, 600)
        for mean, spread in ((90, 0.7), (180, 0.74), (180, 0.74))
    ]
    lengths = np.stack(drawn, 1).astype(int)
    np.savez(path, lengths=lengths, tokens=rng.integers(0, vocab, lengths.sum()))


def ours(given: dict[str, Any]) -> None:
    """One round of ptf: Trainer.step over the packed pairs of each step, as a run does it."""
    from ptf.compute.world import joined
    from ptf.config.sections.model import ModelConfig
    from ptf.config.sections.train import TrainConfig
    from ptf.data.batch import Batch
    from ptf.data.packing import pack_all
    from ptf.data.sample import PackUnit, Sample, length
    from ptf.recipes.dpo.recipe import DPO
    from ptf.train.trainer import Trainer, load_model

    stored = np.load(given["documents"])
    cuts = np.split(stored["tokens"].astype(np.int32), np.cumsum(stored["lengths"].reshape(-1))[:-1])
    units: list[PackUnit] = []
    for prompt, *answers in zip(cuts[::3], cuts[1::3], cuts[2::3], strict=True):
        weights = [(np.arange(len(prompt) + len(answer)) >= len(prompt)).astype(np.float32) for answer in answers]
        units.append(
            tuple(
                Sample(np.concatenate([prompt, answer]), weight)
                for answer, weight in zip(answers, weights, strict=True)
            )
        )
    total = given["steps"] + given["warmup"]
    with joined("cpu", 600, threads=1) as world:
        place = Path(given["model"])
        train = TrainConfig(
            steps=total, lr=LR, schedule="constant", precision=given["dtype"], betas=(0.9, 0.999), weight_decay=0.0
        )
        model, reference = (
            load_model(place, world, ModelConfig(path=str(place)), seed=0, precision=train.precision)[0]
            for _ in range(2)
        )
        reference.requires_grad_(False)
        trainer, recipe = Trainer(model, world, train, {"reference": reference}), DPO(beta=BETA)
        cpu_s, tokens, losses = [], [], []
        for step in range(total):
            sequences = pack_all(units[step * PAIRS : (step + 1) * PAIRS], WIDTH)
            # a run's sequences are full; those of 8 pairs alone are not
            micro = [Batch.of([sequence], sum(map(length, sequence))) for sequence in sequences]
            began = time.process_time()
            losses.append(trainer.step(micro, recipe, step)["loss"])
            if step >= given["warmup"]:
                cpu_s.append(time.process_time() - began)
                tokens.append(sum(sum(batch.lengths) for batch in micro))
    print(json.dumps({"cpu_s": cpu_s, "tokens": tokens, "losses": losses}))


def start(directory: Path, config: dict[str, Any]) -> str:
    """Random weights that both begin with."""
    from ptf.compute.world import World
    from ptf.config.sections.model import ModelConfig
    from ptf.model import bridge
    from ptf.train.trainer import load_model

    place = directory / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    drawn, family = load_model(place, World(), ModelConfig(path=str(place), init="random"), seed=0, precision="fp32")
    bridge.save_hf(bridge.hf_tensors(drawn, family), place, directory / "start", writes=True)
    return str(directory / "start")


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        ours(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    asked = parser.parse_args()
    if not PEER.exists():
        sys.exit("benchmarks/dpo_step.py needs the peer's environment: make peers")
    lines = []
    for name in asked.models:
        with tempfile.TemporaryDirectory() as directory:
            documents, model = Path(directory) / "pairs.npz", start(Path(directory), MODELS[name])
            pairs(documents, MODELS[name]["vocab_size"], PAIRS * (asked.steps + asked.warmup))
            for dtype in asked.dtypes:
                given = {
                    "model": model,
                    "documents": str(documents),
                    "dtype": dtype,
                    "steps": asked.steps,
                    "warmup": asked.warmup,
                }
                given |= {"accumulated": PAIRS, "lr": LR, "beta": BETA, "width": WIDTH}
                found: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
                for number in range(asked.rounds):
                    for system, rounds in found.items():
                        one = given | {"pairs": SYSTEMS[system]}
                        rounds.append(
                            round_of(system[:3], one, "benchmarks/dpo_step.py", "benchmarks/peers/trl_dpo.py")
                        )
                        print(
                            json.dumps(
                                {"model": name, "dtype": dtype, "system": system, "round": number, **rounds[-1]}
                            ),
                            flush=True,
                        )
                lines.append(summary(name, dtype, found))
                print(lines[-1], flush=True)
    write(lines, "python " + " ".join(["benchmarks/dpo_step.py", *sys.argv[1:]]), asked)


def summary(model: str, dtype: str, found: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each way of TRL's. Raises AssertionError where the two did not do the same."""
    first = found["ptf"][0]
    for rounds in found.values():
        for r in rounds:
            assert r["tokens"] == first["tokens"], "all count the same tokens"
            assert max(abs(a - b) for a, b in zip(r["losses"], first["losses"], strict=True)) <= APART, (
                "all have the same losses"
            )
    rates = {system: [sum(r["tokens"]) / sum(r["cpu_s"]) for r in rounds] for system, rounds in found.items()}

    def cell(values):
        return f"{median(values):,.0f} ({min(values):,.0f} – {max(values):,.0f})"

    lines = []
    for system in list(found)[1:]:
        ratios = [a / b for a, b in zip(rates["ptf"], rates[system], strict=True)]
        theirs = found[system][0]["losses"]
        apart = max(abs(a - b) for a, b in zip(first["losses"], theirs, strict=True))
        losses = (
            f"{first['losses'][0]:.6f} → {first['losses'][-1]:.6f} / {theirs[0]:.6f} → {theirs[-1]:.6f}; {apart:.1e}"
        )
        ratio = f"**{median(ratios):.2f}** ({min(ratios):.2f} – {max(ratios):.2f})"
        lines.append(
            f"| {model} | {dtype} | {system} | {cell(rates['ptf'])} | {cell(rates[system])} | {ratio} | {losses} |"
        )
    return "\n".join(lines)


def write(lines: list[str], command: str, asked: argparse.Namespace) -> None:
    RESULTS.write_text(
        "# The DPO step beside TRL\n\n"
        f"Command: `{command}`  \nHardware: {cpu()}, one thread, no GPU  \nDate: {time.strftime('%Y-%m-%d')}\n\n"
        f"Interleaved rounds ({asked.rounds} of each), {asked.steps} timed steps a round after {asked.warmup} of "
        f"warm-up, {PAIRS} pairs a step, the same for\n"
        "both and from the same weights; the policy's forward and backward pass, a reference's forward pass, AdamW. "
        "Prompts: log-normal lengths, median\n"
        "90; answers: median 180. ptf: packed sequences of up to 2,048 tokens, a sequence a pass, none filled up.\n"
        "TRL: DPOTrainer, versions in `benchmarks/requirements-peers.txt`; "
        "it pads the pairs of a pass to the longest of\n"
        "them (`padding_free` is switched off in that version). `small4`: Qwen3 shape, width 256, 4 layers, "
        f"{HEADS}, vocabulary 4,096; `bigvocab`: vocabulary\n"
        "151,936, tied.\n"
        "Losses: of the first and the last step, and the largest difference of any, "
        f"which the script holds to {APART:g}. These ratios are a CPU's.\n\n"
        "| model | dtype | beside | ptf, real tokens per CPU-second | TRL | ratio | loss, ptf / TRL; apart |\n|"
        + 7 * "---|"
        + "\n"
        + "\n".join(lines)
        + "\n"
    )
    print(f"wrote {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
