"""Passes that compile before the first step: which shapes they have, and that a run makes all that it needs."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from ptf.config import loads
from ptf.model.decoder import Decoder
from ptf.rl import roles
from ptf.run import run
from ptf.train import loop
from ptf.train.trainer import Trainer
from ptf.train.warm_up import in_passes
from tests.tiny import arithmetic, online


@pytest.mark.parametrize(
    ("sequences", "most", "found"), [(8, 8, {8}), (8, 3, {3, 2}), (2, 8, {2}), (9, 4, {4, 1}), (1, 1, {1})]
)
def test_the_passes_of_a_step_have_these_numbers_of_sequences(sequences, most, found):
    batches = [min(most, sequences - first) for first in range(0, sequences, most)]
    assert in_passes(sequences, most) == set(batches) == found


def watched(monkeypatch: pytest.MonkeyPatch, module: Any) -> tuple[list[tuple[Any, set[int], set[int]]], set[int]]:
    """Lists that a run fills: what it compiles (models, and the sequences in their passes with gradients and without),
    and the sequences in the passes of its steps."""
    compiled, used, step = [], set[int](), Trainer.step

    def noted(model: Any, world: Any, seq_len: int, *, trained: Any = (), scored: Any = (), **more: Any) -> None:
        assert not used, "before the first step"
        compiled.append((model, set(trained), set(scored)))

    def stepped(self: Trainer, micro: Any, *args: Any) -> dict[str, float]:
        used.update(len(batch.tokens) for batch in micro)
        return step(self, micro, *args)

    monkeypatch.setattr(module, "warm_up", noted)
    monkeypatch.setattr(Trainer, "step", stepped)
    return compiled, used


@pytest.mark.parametrize(("most", "validates"), [(3, True), (8, False)])
def test_a_run_compiles_for_the_batches_of_its_steps(tmp_path: Path, monkeypatch, most: int, validates: bool) -> None:
    raw = arithmetic(tmp_path)
    changes = {"steps": 2, "micro_batch_sequences": most, "validate_every": 2 * validates}
    raw["train"] = {**raw["train"], **changes}
    compiled, used = watched(monkeypatch, loop)
    run(loads(yaml.safe_dump(raw)), "a")
    ((model, trained, scored),) = compiled
    assert isinstance(model, Decoder)
    assert trained == used
    assert scored == ({most} if validates else set())


def test_the_roles_compile_for_their_passes(tmp_path: Path, monkeypatch) -> None:
    raw = online(arithmetic(tmp_path), tmp_path, group_size=2, max_new_tokens=4) | {"algo": {"kl_coef": 0.1}}
    raw["train"] |= {"steps": 1, "micro_batch_sequences": 2}
    compiled, _ = watched(monkeypatch, roles)
    run(loads(yaml.safe_dump(raw)), "a")
    assert sorted((sorted(trained), sorted(scored)) for _, trained, scored in compiled) == [([], [2]), ([2], [2])]
