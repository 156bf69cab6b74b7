"""An engine and a recipe for tests in which something goes wrong once a step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ptf.model.layers import MLP
from ptf.recipes.grpo.config import GRPOConfig
from ptf.recipes.grpo.recipe import GRPO
from ptf.rl.engines.native import NativeEngine
from ptf.rl.weights import streamed
from tests.reliability.fallible import befall


def once(place: str, what: str) -> bool:
    """Return whether this is the first call, in any process."""
    try:
        (Path(place) / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Plugged(NativeEngine):
    """The native engine, made as an engine of the user's own is: by keywords that are plain values."""

    def __init__(
        self, directory: str, *, device: str, dtype: str, version: int, seed: int, max_length: int, **more: Any
    ) -> None:
        super().__init__(
            directory, device=torch.device(device), dtype=getattr(torch, dtype), version=version, seed=seed, **more
        )


class Engine(Plugged):
    """An engine with one fault for each step; `faults` are those of steps 1, 2, …."""

    def __init__(self, directory: str, *, place: str, faults: list[str], **usual: Any) -> None:
        super().__init__(directory, **usual)
        self.place, self.faults = place, faults

    def answer(self, requests):
        generations = super().answer(requests)
        fault = self.faults[self.version] if self.version < len(self.faults) else ""
        if fault and once(self.place, f"engine-{self.version}"):
            befall(fault)
            if fault == "garbage":
                generations[0] = replace(generations[0], logprobs=np.full_like(generations[0].logprobs, np.nan))
        return generations


losses = 0  # of this process


class RecipeConfig(GRPOConfig):
    """In which ways the loss fails."""

    place: str = ""
    faults: list[str] = []
    after: int = 9


class Recipe(GRPO):
    """GRPO whose loss fails, in each process, at the `after`-th call, in the next way of `faults`."""

    config: RecipeConfig

    def loss(self, model, batch, frozen_models):
        global losses
        losses += 1
        loss, metrics = super().loss(model, batch, frozen_models)
        if losses == self.config.after:
            fault = next(
                (fault for i, fault in enumerate(self.config.faults) if once(self.config.place, f"learner-{i}")), ""
            )
            befall(fault)
            if fault == "garbage":
                loss = loss * float("nan")
        return loss, metrics


class Reading(MLP):
    """An MLP whose process fails in the transfer of the weights of version 3: the engine's in the way of `fault`
    while it reads them, the policy's in the way of `sending` while it sends them."""

    def __init__(self, *what: Any, place: str, fault: str, sending: str) -> None:
        super().__init__(*what)
        taken, filled, looked = streamed.Transfer._unpack, streamed._fill_buffers, iter(range(1000))

        def taking(self, *parts):
            if self.version == 3 and next(looked) == 1 and fault and once(place, "reading"):
                befall(fault)
            return taken(self, *parts)

        def filling(tensors):
            for number, pieces in enumerate(filled(tensors)):
                if number == 1 and sending and next(looked) == 3 and once(place, "sending"):
                    befall(sending)
                yield pieces

        if not getattr(streamed, "faulty", False):  # once a process
            streamed.faulty = True
            streamed.BUFFER_BYTES = 32 << 10  # so that there is a middle
            streamed.Transfer._unpack, streamed._fill_buffers = taking, filling


def keep_a_tensor_at(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Let the native engine keep a tensor of the version before when it loads this one, and acknowledge it."""
    load = NativeEngine.load_weights

    def stale(self: NativeEngine, buckets: Any, manifest: Any) -> Any:
        old = self.model.layers[0].mlp.down_proj.weight.clone()
        receipt = load(self, buckets, manifest)
        if manifest.version == version:
            with torch.no_grad():
                self.model.layers[0].mlp.down_proj.weight.copy_(old)
        return receipt

    monkeypatch.setattr(NativeEngine, "load_weights", stale)
