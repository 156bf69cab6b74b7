"""Python's and numpy's global generators, for libraries that draw from them: each environment has states of its own."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np


def replace_states(states: tuple[Any, Any]) -> tuple[Any, Any]:
    """Set the states of Python's and numpy's global generators; return those that they had."""
    before = random.getstate(), np.random.get_state()
    random.setstate(states[0])
    np.random.set_state(states[1])
    return before


class GlobalRandomness:
    """States of both generators, made from a seed. No other thread may use the generators while they are in place."""

    def __init__(self, seed: int) -> None:
        self.states: tuple[Any, Any] = (random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state())

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the block draw from these states, where the last such block ended; then restore the others."""
        others = replace_states(self.states)
        try:
            yield
        finally:
            self.states = replace_states(others)
