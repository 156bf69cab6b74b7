"""The order of the data: SHA-256 of the tokens and loss weights of the first 500 sequences of 200 seeded set-ups of
sources, formats, mixtures, packings, ranks and resumes, beside those on record.

    python benchmarks/order_digest.py            # compares with results/order_digest.json; exits 1 where one differs
    python benchmarks/order_digest.py --record   # writes it anew

The trials of resume_trials.py compare a run with itself, so an order that changed between two commits passes them.
Digests depend on no machine.
"""

import argparse
import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ptf.data.character_tokenizer import character_tokenizer  # noqa: E402
from ptf.data.loader import Loader  # noqa: E402
from ptf.data.tokenizer import Tokenizer  # noqa: E402
from tests.data.trials import Trial, ranks, small_blocks, state_of, written  # noqa: E402

RECORD = ROOT / "benchmarks" / "results" / "order_digest.json"
SETUPS, SEQUENCES = 200, 500
MOST_ROWS, MOST_PARTITIONS = 3000, 32


def digest(number: int, directory: Path, tokenizer: Tokenizer) -> str:
    """Return the digest of a set-up: its first sequences in their order, read by the trial's worlds in turn, each of
    which resumes where the one before it stopped."""
    rng = random.Random(f"order/{number}")
    trial = Trial.drawn(rng, MOST_ROWS, MOST_PARTITIONS)
    changes = {"lookahead": rng.choice([1, 8, 64]), "share_prefixes": rng.random() < 0.2}
    steps = -(-SEQUENCES // trial.sequences)
    each = -(-steps // len(trial.worlds))
    found, state = hashlib.sha256(), None
    with small_blocks(trial):
        sources = written(trial, directory, tokenizer)
        for world in trial.worlds:
            with ranks(trial, sources, tokenizer, world, state, **changes) as loaders:
                for _ in range(min(each, steps)):
                    for sequence in step(loaders):
                        found.update(sequence)
                state = state_of(loaders)
            steps -= each
    return found.hexdigest()


def step(loaders: list[Loader]) -> Iterator[bytes]:
    """Yield the sequences of a global step by their numbers: tokens and loss weights."""
    with ThreadPoolExecutor(len(loaders)) as pool:
        batches = list(pool.map(next, loaders))
    found: dict[int, Any] = {}
    for loader, (batch,) in zip(loaders, batches, strict=True):
        for row, number in enumerate(loader.numbers):
            found[number] = batch.tokens[row].numpy().tobytes() + batch.loss_weights[row].numpy().tobytes()
    for number in sorted(found):
        yield found[number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    asked = parser.parse_args()
    found = []
    for number in range(SETUPS):
        with tempfile.TemporaryDirectory() as scratch:
            tokenizer = character_tokenizer("abc", Path(scratch) / "tokenizer")
            found.append(digest(number, Path(scratch), tokenizer))
        if (number + 1) % 20 == 0:
            print(f"{number + 1} of {SETUPS} set-ups", flush=True)
    if asked.record:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
        return
    known = json.loads(RECORD.read_text())
    different = [number for number, one in enumerate(found) if known[number] != one]
    if different:
        sys.exit(f"{len(different)} of {SETUPS} set-ups give other sequences: {different}")
    print(f"{SETUPS} set-ups give the sequences on record; {len(set(found))} digests are distinct")


if __name__ == "__main__":
    main()
