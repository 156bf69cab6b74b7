"""Every property test on random examples, once with each of some fresh seeds: `make test-random`, for the night. (`make
test` draws a fixed set of examples, so that it says the same every time.)

    python -m tests.random_examples [SEEDS [what pytest is to run …]]
"""

import os
import secrets
import sys

import pytest

AGAIN = "HYPOTHESIS_PROFILE=random python -m pytest -m hypothesis --hypothesis-seed="


def main(seeds: int = 20, *what: str) -> str | None:
    """What failed, and how to run it again."""
    os.environ["HYPOTHESIS_PROFILE"] = "random"  # before tests/conftest.py is imported
    failed = []
    for at in range(1, seeds + 1):
        seed = secrets.randbelow(2**32)
        print(f"\n{at} of {seeds}: seed {seed}", flush=True)
        if pytest.main(["-q", "--durations=0", "-m", "hypothesis", f"--hypothesis-seed={seed}", *what]):
            failed.append(seed)
    return "failed; again with " + "\n".join(f"{AGAIN}{seed}" for seed in failed) if failed else None


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2]), *sys.argv[2:]))
