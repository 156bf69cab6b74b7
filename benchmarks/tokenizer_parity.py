"""A million texts: the ids that ptf trains on beside AutoTokenizer's. Writes results/tokenizer_parity.md, and
tokenizer_parity.jsonl as it goes.

    python benchmarks/tokenizer_parity.py [--texts 1000000] [--minutes 7]

In batches of 20,000 by tokenizer and seed (tests/data/parity.py says what is compared); a batch that
tokenizer_parity.jsonl has is not made again, and after so many minutes no further one is begun. Ends with status 1 on a
difference. Against vLLM's ids: benchmarks/serving_ids.py.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("RAYON_NUM_THREADS", "1")

from commands import options
from flow_runs import results_page
from pages import Row, head, keep, kept, table, write_page

from ptf.data.tokenizer import Tokenizer
from tests.data.parity import compared, pairs, shared_data

RESULTS = results_page("tokenizer_parity.md")
BATCH = 20_000


ABOUT = """\
Ids that ptf trains on, made by the tokenizer that a job has in memory (with the tokens that it adds), beside those that
AutoTokenizer of transformers {version} makes of the files that ptf saves. Texts are fuzzed: words, numbers, code,
whitespace, many scripts, emoji, control characters, what looks like special tokens, and, where the job adds some, added
tokens and semantic ids (*with added*: texts in which ptf found one). Every text is encoded by the batch, as it stands;
one in 50 is encoded as a document to train on, too, with what the tokenizer puts before it. *Refused*: texts for which
ptf says that the tokenizer has no id. A saved tokenizer must also have the fingerprint of the one in memory.

"""


def page(found: list[Row], place: Path, texts: int) -> int:
    """Write the page; return 1 on a difference."""
    import transformers

    keys = ("texts", "with_added", "documents", "refused", "differ")
    names = dict.fromkeys(b["tokenizer"] for b in found)
    rows = [[name, *(f"{sum(b[key] for b in found if b['tokenizer'] == name):,}" for key in keys)] for name in names]
    rows.append(["**together**", *(f"**{sum(b[key] for b in found):,}**" for key in keys)])
    spent = f"; {sum(b['cpu_s'] for b in found):.0f} s of one core"
    command = f"`python benchmarks/tokenizer_parity.py --texts {texts}` (`make parity`)"
    about = head("Tokenizer parity", spent, command=command).rstrip()
    about += "  \nEach batch: [tokenizer_parity.jsonl](tokenizer_parity.jsonl)\n\n"
    about += ABOUT.format(version=transformers.__version__)
    lines = table("tokenizer | texts | with added | documents | refused | differ", rows)
    return write_page(place, about, [lines], [b["tokenizer"] for b in found if b["differ"]])


def main() -> int:
    asked = options(__doc__, texts=1_000_000, minutes=float("inf"), results=RESULTS)
    ledger, ends = asked.results.with_suffix(".jsonl"), time.monotonic() + 60 * asked.minutes
    found = kept(ledger)
    done = {(b["tokenizer"], b["seed"]) for b in found}
    with tempfile.TemporaryDirectory() as scratch:
        every = list(pairs(Path(scratch), shared_data()))
        for pair in every:
            if Tokenizer.load(str(Path(scratch) / "saved" / pair.name)).identity != pair.ours.identity:
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
            began, row = time.process_time(), {"tokenizer": pair.name, "seed": seed}
            row |= compared(pair, seed, BATCH)
            found.append(row | {"cpu_s": round(time.process_time() - began, 1)})
            keep(ledger, found[-1])
            print(json.dumps(found[-1]), flush=True)
    print(f"{len(wanted) + len(done) - len(found)} batches are missing")
    return page(found, asked.results, asked.texts)


if __name__ == "__main__":
    sys.exit(main())
