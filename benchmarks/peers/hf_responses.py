"""The SFT step as a loop over transformers' model that makes the logits of responses alone, timed: a peer of
benchmarks/train_step.py, run by the Python of requirements-peers.txt.

Reads a cell of the grid (sft_cell.py) with one document a pass, and prints one JSON line. No Trainer does this; all
else is as in hf_sft.py.
"""

from functools import partial
from typing import Any

from hf_sft import measured
from sft_cell import printed
from torch import Tensor


def logits_of(one: dict[str, Tensor]) -> dict[str, Any]:
    """A document's inputs, with the logits of its last positions alone: those of its response, which is its end, and
    the one before, at which the response is predicted."""
    kept = int((one["labels"] != -100).sum()) + 1
    return one | {"labels": one["labels"][:, -kept:], "logits_to_keep": kept}


if __name__ == "__main__":
    printed(partial(measured, logits_of=logits_of))
