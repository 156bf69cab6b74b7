"""Ways in which a run could fail to continue as if nothing had been, each planted in every attempt of a trial:
negative controls."""

import subprocess
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ptf.compute.world import World


def place_in_the_data() -> None:
    """A resumed run begins its data anew."""
    from ptf.data.loader import Loader

    Loader.load_state_dict = lambda self, state: None  # type: ignore[method-assign, assignment]


def place_in_the_prompts() -> None:
    """A resumed online run begins its prompts anew, and trains again on those that it has trained on."""
    from ptf.rl.controller import Controller

    restore = Controller._restore

    def restoring(self: Controller) -> Any:
        state = self.prompts.state_dict()
        found = restore(self)
        self.prompts.load_state_dict(state)
        return found

    Controller._restore = restoring  # type: ignore[method-assign]


def decisions() -> None:
    """A resumed run by the wall clock decides anew what was decided before."""
    from ptf.rl.flight_ledger import FlightLedger

    FlightLedger._read = lambda self, line: None  # type: ignore[method-assign, assignment]


def optimizer() -> None:
    """A resumed run has the weights, and an optimizer that has seen nothing."""
    from ptf.compute import checkpoint

    load = checkpoint.load_tensors

    def loading(directory: str, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
        load(directory, model, optimizer, world)
        optimizer.state.clear()

    checkpoint.load_tensors = loading


def half_made() -> None:
    """Nobody removes what a killed process has left half-made."""
    from ptf.workspace import scratch

    scratch.sweep = lambda root, depth: []


def orphan() -> None:
    """A process that does not end with the one that started it."""
    subprocess.Popen(["sleep", "600"], start_new_session=True)


FAULTS: dict[str, Callable[[], None]] = {
    f.__name__: f for f in (place_in_the_data, place_in_the_prompts, decisions, optimizer, half_made, orphan)
}
