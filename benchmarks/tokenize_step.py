"""The tokenize step beside Dataset.map over apply_chat_template, from a file of JSON lines to a file of ids, in one
interleaved run: real tokens a CPU-second, and a second in 1 and 2 processes.

    make peers                                    # .venv-peers from benchmarks/requirements-peers.txt
    python benchmarks/tokenize_step.py [--rows 8000] [--rounds 3]

Two sets of PTF_DATA: GSM8K (one turn) and OpenAssistant (several), shuffled: ptf encodes what a row shares with the
row before it once, and OpenAssistant's file has the paths of one tree together. ptf renders each assistant turn as a
server would, verifies its span, and writes ids and loss weights; the peer renders each conversation once and keeps ids
alone, so it does less. Both read the file within the time; the peer's time without it stands beside. Also: the same
texts encoded in batches and one by one.
Prints a JSON line a round and writes results/tokenize.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from flow_runs import ROOT, cpu

RESULTS = ROOT / "benchmarks" / "results" / "tokenize.md"
PEER = ROOT / ".venv-peers" / "bin" / "python"
SYSTEMS = {"peer": 1, "ptf": 1, "peer, 2 processes": 2, "ptf, 2 processes": 2}
TOGETHER = 256  # texts


def ours(path: str, directory: str, processes: int, scratch: str) -> dict[str, Any]:
    from ptf.data import tokenized
    from ptf.data.encode import encode_document
    from ptf.data.sources.rows import SourceSpec
    from ptf.data.tokenizer import Tokenizer

    tokenized.FEW_BYTES = 0  # as many processes as were asked for, however small the set
    tokenizer = Tokenizer.load(directory)
    began, spent = time.perf_counter(), sum(os.times()[:4])
    manifest = tokenized.write(
        f"{scratch}/tokenized",
        SourceSpec(path),
        "chats",
        encode=lambda row, name: encode_document(row, tokenizer, name),
        seq_len=1 << 20,
        too_long="error",
        tokenizer=tokenizer,
        config_fingerprint="",
        processes=processes,
    )
    return {
        "rows": manifest["rows"],
        "tokens": manifest["tokens"],
        "cpu_s": sum(os.times()[:4]) - spent,
        "wall_s": time.perf_counter() - began,
    }


def together(path: str, directory: str) -> dict[str, float]:
    """CPU-seconds of encoding the rendered chats in batches and one by one."""
    from ptf.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(directory)
    texts = [tokenizer.render_text(json.loads(line)["messages"], False) for line in Path(path).read_text().splitlines()]
    began = time.process_time()
    single = [tokenizer.encode(text) for text in texts]
    middle = time.process_time()
    batched = [ids for at in range(0, len(texts), TOGETHER) for ids in tokenizer.encode_all(texts[at : at + TOGETHER])]
    done = time.process_time()
    assert single == batched
    return {"one_by_one_s": middle - began, "batched_s": done - middle}


def round_of(system: str, path: str, directory: str, processes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        peer = system.startswith("peer")
        script = (
            ["benchmarks/peers/hf_tokenize.py"]
            if peer
            else ["benchmarks/tokenize_step.py", f"--{system.split(',')[0]}"]
        )
        command = [str(PEER) if peer else sys.executable, *script, path, directory, str(processes), scratch]
        environment = os.environ | {
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": "" if peer else str(ROOT),
            "HF_HOME": scratch,
        }
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600, check=False
        )
    if done.returncode:
        sys.exit(f"{system} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def prepare(scratch: Path, shared: Path, rows: int) -> dict[str, str]:
    """The sets as jsonl, shuffled, each repeated up to `rows`, and a tokenizer with the template of Qwen2.5."""
    import numpy as np

    from tests.data.conversations import real
    from tests.data.templates import templated

    templated("qwen2.5", shared).save(scratch / "tokenizer")
    sets: dict[str, list[Any]] = {"gsm8k": [], "oasst": []}
    for conversation in real(shared):
        if conversation.source in sets:
            sets[conversation.source].append(conversation.messages)
    for name, chats in sets.items():
        order = np.random.default_rng(0).permutation(rows) % len(chats)
        lines = [json.dumps({"messages": chats[i]}) + "\n" for i in order]
        print(json.dumps({"set": name, "conversations": len(chats), "rows": rows}), flush=True)
        (scratch / f"{name}.jsonl").write_text("".join(lines))
    return {name: str(scratch / f"{name}.jsonl") for name in sets}


def main() -> None:
    if sys.argv[1:2] == ["--ptf"]:
        print(json.dumps(ours(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])))
        return
    if sys.argv[1:2] == ["--together"]:
        print(json.dumps(together(sys.argv[2], sys.argv[3])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    if not PEER.exists():
        sys.exit("benchmarks/tokenize_step.py needs the peer's environment: make peers")
    shared = Path(os.environ.get("PTF_DATA") or ROOT.parent / "shared" / "data")
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        sets = prepare(Path(scratch), shared, asked.rows)
        for number in range(asked.rounds):
            for name, path in sets.items():
                for system, processes in {**SYSTEMS, "together": 1}.items():
                    result = round_of(system, path, f"{scratch}/tokenizer", processes)
                    found.setdefault((name, system), []).append(result)
                    print(json.dumps({"set": name, "system": system, "round": number, **result}), flush=True)
    write(found, list(sets), asked)


def spread(values: list[float], form: str = ",.0f") -> str:
    return f"{median(values):{form}} ({min(values):{form}} – {max(values):{form}})"


def ratios_of(ours: list[float], theirs: list[float]) -> list[float]:
    """Ours divided by theirs, round by round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def write(found: dict[tuple[str, str], list[dict[str, Any]]], sets: list[str], asked: argparse.Namespace) -> None:
    lines, batches, ratios = [], [], []
    for name in sets:
        rates = {system: [r["tokens"] / r["cpu_s"] for r in found[name, system]] for system in SYSTEMS}
        mapped = [r["tokens"] / r["map_cpu_s"] for r in found[name, "peer"]]
        ratios.append(
            f"| {name} | {spread(ratios_of(rates['ptf'], rates['peer']), '.2f')} "
            f"| {spread(ratios_of(rates['ptf'], mapped), '.2f')} |"
        )
        for system in SYSTEMS:
            rounds = found[name, system]
            lines.append(
                f"| {name} | {system} | {rounds[0]['rows']:,} | {rounds[0]['tokens']:,} | {spread(rates[system])} | "
                f"{median(r['tokens'] / r['wall_s'] for r in rounds):,.0f} "
                f"| {median(r['rows'] / r['wall_s'] for r in rounds):,.0f} |"
            )
        batches.append(f"{name} {spread([r['one_by_one_s'] / r['batched_s'] for r in found[name, 'together']], '.2f')}")
    RESULTS.write_text(
        "# The tokenize step\n\n"
        f"Command: `{' '.join(['python', 'benchmarks/tokenize_step.py', *sys.argv[1:]])}`  \nHardware: {cpu()}  \n"
        f"Date: {time.strftime('%Y-%m-%d')}\n\n"
        f"{asked.rounds} rounds in turn, medians (range); Qwen3's vocabulary with Qwen2.5's template. "
        "The peer (versions in\n`benchmarks/requirements-peers.txt`) is `Dataset.map` over\n"
        "`load_dataset`'s rows with `apply_chat_template`, which renders a conversation once and keeps its ids; "
        "ptf renders every turn as served, verifies which ids are the\n"
        "assistant's, and writes ids and weights. The time of both runs from a file of JSON lines to one of ids. "
        "The rows are shuffled; a set of fewer conversations repeats them.\n"
        f"Load average at the end, with what else ran on the machine: "
        f"{os.getloadavg()[2]:.0f}; other work inflates CPU-seconds.\n\n"
        "Tokens per CPU-second of ptf in one process, divided by the peer's:\n\n"
        "| set | ptf / peer | ptf, which reads the file / `Dataset.map` alone, which does not |\n|---|---|---|\n"
        + "\n".join(ratios)
        + "\n\n| set | system | rows | tokens | tokens per CPU-second | tokens per second | rows per second |\n"
        "|---|---|---|---|---|---|---|\n"
        + "\n".join(lines)
        + (
            f"\n\nTexts encoded {TOGETHER} at a time against one by one, the tokenizer alone: "
            f"{'; '.join(batches)} times as fast.\n"
        )
    )
    print(f"wrote {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
