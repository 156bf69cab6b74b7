"""A million texts: the ids that ptf trains on beside AutoTokenizer's. Writes results/tokenizer_parity.md, and
tokenizer_parity.jsonl as it goes.

    python benchmarks/tokenizer_parity.py [--texts 1000000] [--minutes 7]

In batches of 20,000 by tokenizer and seed (tests/data/parity.py says what is compared); a batch that
tokenizer_parity.jsonl has is not made again, and after so many minutes no further one is begun. Ends with status 1 on a
difference. Against vLLM's ids: benchmarks/serving_ids.py.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAYON_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.flow_runs import commit, cpu, results_page  # noqa: E402
from ptf.data.tokenizer import Tokenizer  # noqa: E402
from tests.data.parity import compared, pairs, shared_data  # noqa: E402

RESULTS = results_page("tokenizer_parity.md")
BATCH = 20_000


def page(found: list[dict[str, Any]], command: str) -> str:
    import transformers

    rows, keys = "", ("texts", "with_added", "documents", "refused", "differ")
    for name in dict.fromkeys(b["tokenizer"] for b in found):
        rows += (
            f"| {name} | "
            + " | ".join(f"{sum(b[key] for b in found if b['tokenizer'] == name):,}" for key in keys)
            + " |\n"
        )
    rows += "| **together** | " + " | ".join(f"**{sum(b[key] for b in found):,}**" for key in keys) + " |\n"
    return (
        "# Tokenizer parity\n\n"
        f"Command: `{command}` (`make parity`)  \nHardware: {cpu()}; {sum(b['cpu_s'] for b in found):.0f} s of one "
        "core  \n"
        f"Date: {time.strftime('%Y-%m-%d')}; commit {commit()}  \nEach batch: "
        "[tokenizer_parity.jsonl](tokenizer_parity.jsonl)\n\n"
        "Ids that ptf trains on, made by the tokenizer that a job has in memory (with the tokens that it adds), "
        "beside those that AutoTokenizer of\n"
        f"transformers {transformers.__version__} makes of the files that ptf saves. Texts are fuzzed: words, "
        "numbers, code, whitespace, many scripts, emoji,\n"
        "control characters, what looks like special tokens, and, where the job adds some, "
        "added tokens and semantic ids (*with added*: texts in which ptf\n"
        "found one). Every text is encoded by the batch, as it stands; "
        "one in 50 is encoded as a document to train on, too, with what the tokenizer puts\n"
        "before it. *Refused*: texts for which ptf says that the tokenizer has no id. "
        "A saved tokenizer must also have the fingerprint of the one in\n"
        "memory.\n\n"
        f"| tokenizer | texts | with added | documents | refused | differ |\n|---|---|---|---|---|---|\n{rows}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    ledger, ends = asked.results.with_suffix(".jsonl"), time.monotonic() + 60 * asked.minutes
    found = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    done = {(b["tokenizer"], b["seed"]) for b in found}
    with tempfile.TemporaryDirectory() as scratch:
        every = list(pairs(Path(scratch), shared_data()))
        for pair in every:
            if Tokenizer.load(str(Path(scratch) / "saved" / pair.name)).fingerprint() != pair.ours.fingerprint():
                sys.exit(f"{pair.name}: saved and loaded again it has another fingerprint")
        wanted = [
            (pair, seed)
            for seed in range(-(-asked.texts // (BATCH * len(every))))
            for pair in every
            if (pair.name, seed) not in done
        ]
        for pair, seed in wanted:
            if time.monotonic() > ends:
                break
            began = time.process_time()
            found.append(
                {
                    "tokenizer": pair.name,
                    "seed": seed,
                    **compared(pair, seed, BATCH),
                    "cpu_s": round(time.process_time() - began, 1),
                }
            )
            with ledger.open("a") as file:
                file.write(json.dumps(found[-1]) + "\n")
            print(json.dumps(found[-1]), flush=True)
    asked.results.write_text(page(found, f"python benchmarks/tokenizer_parity.py --texts {asked.texts}"))
    print(f"wrote {asked.results}; {len(wanted) + len(done) - len(found)} batches are missing")
    sys.exit(1 if any(b["differ"] for b in found) else 0)


if __name__ == "__main__":
    main()
