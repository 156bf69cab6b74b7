"""docs/components.md: its example trains, exports and comes back, in three families."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ptf.compute.world import joined
from ptf.config.section import Plugin
from ptf.config.sections.model import ModelConfig
from ptf.config.sections.train import TrainConfig
from ptf.model import model_writer
from ptf.recipes.sft.recipe import SFT
from ptf.train.trainer import Trainer, load_model
from tests.model.test_components import DENSE, checkpoint
from tests.recipes.of_keys import of_keys
from tests.tiny import packed as packed_sequences

TEXT = (Path(__file__).parents[2] / "docs" / "components.md").read_text()
REPLACED = {"layers.*.mlp": Plugin(use="components_page:SharedExpertMLP", args={"width": 16})}


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (source,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "components_page.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("components_page", None)


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("model_type", DENSE)
def test_the_example_trains_and_comes_back(model_type: str, tmp_path: Path) -> None:
    directory = checkpoint(model_type, tmp_path / "m")
    spec = ModelConfig(path=str(directory), replace=REPLACED, head=Plugin(use="components_page:BiasedHead"))
    with joined("cpu", 60) as world:
        model = load_model(directory, world, spec, seed=0, precision="fp32")
        plain = load_model(directory, world, ModelConfig(path=str(directory)), seed=0, precision="fp32")
        batch = packed_sequences([[20, 11], [30]], 32)
        hidden = [m(batch.tokens, batch.positions, batch.segments, lambda x, head: x) for m in (model, plain)]
        assert torch.equal(*hidden)  # what is added begins as nothing
        trainer = Trainer(model, world, TrainConfig(steps=3, lr=1e-2, schedule="constant", precision="fp32"))
        losses = [trainer.step([batch], of_keys(SFT), step)["loss"] for step in range(3)]
        assert losses[-1] < losses[0]
        model_writer.save_hf(model.hf_tensors(), directory, tmp_path / "out", writes=True)
        back = load_model(
            tmp_path / "out", world, spec.model_copy(update={"path": str(tmp_path / "out")}), seed=1, precision="fp32"
        )
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), back.parameters(), strict=True))
