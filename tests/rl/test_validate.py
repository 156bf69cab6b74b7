"""How much is evaluated where a config leaves it open."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from ptf.config import Job, loads
from ptf.data.trajectory import Prompt
from ptf.rl.validate import CPU_FLOPS, LEAST, affordable
from tests.tiny import arithmetic

PROMPTS = [Prompt(np.zeros(10, np.int32), {}, "dev", i) for i in range(512)]


def job(place: Path, metric: str | None = None, **evaluate: object) -> Job:
    raw = arithmetic(place)
    sources = {"dev": {"path": "dev.jsonl", "kind": "prompt"}}
    raw["evaluate"] = {"sources": sources, "reward": {"use": "a:b"}, "max_new_tokens": 90, **evaluate}
    return loads(yaml.safe_dump(raw | {"publish": {"metric": metric}}))


def measured(
    place: Path, parameters: int, gpu: bool = False, models: int = 1, metric: str | None = None, **keys: object
) -> tuple[int, int]:
    """Return the number of prompts and of samples for a model of this size."""
    planned = job(place, metric, **keys)
    if gpu:  # of the cluster, whatever this machine has
        cluster = planned.compute.model_copy(update={"device": "auto", "address": "ray://head:10001"})
        planned = planned.model_copy(update={"compute": cluster})
    save_file({"x": torch.zeros(parameters)}, place / "model" / "model.safetensors")
    prompts, found = affordable({"dev": PROMPTS}, planned, place / "model", models)
    assert prompts["dev"] == PROMPTS[: len(prompts["dev"])]
    return len(prompts["dev"]), found.evaluate.samples_per_prompt or 0


def test_what_is_left_open_fits_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A model for which everything would take twice as long as permitted loses the samples, a larger one prompts; what
    a config names is kept, and so is everything on a GPU."""
    monkeypatch.setattr("ptf.rl.validate.CPU_FLOPS", CPU_FLOPS / 1e4)
    small, greedy = 1, 512 * 100
    large = int(CPU_FLOPS / 1e4 / 2 / greedy * 4)  # four times as many operations as permitted
    assert measured(tmp_path, small) == (512, 8)
    assert measured(tmp_path, large // 8) == (512, 1)
    assert measured(tmp_path, large)[0] == pytest.approx(128, abs=8)
    assert measured(tmp_path, large, models=2)[0] == pytest.approx(64, abs=4)
    assert measured(tmp_path, 100 * large) == (LEAST, 1)
    assert "16 of 512 prompts, greedy, by 1 models: at most 1,600 tokens, about " in capsys.readouterr().out
    assert measured(tmp_path, 100 * large, gpu=True) == (512, 8)
    assert measured(tmp_path, 100 * large, limit=512, samples_per_prompt=8) == (512, 8)
    assert measured(tmp_path, large, metric="pass@8/dev")[1] == 8
