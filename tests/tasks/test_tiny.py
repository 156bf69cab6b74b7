"""The tiny models of tasks: transformers computes what ptf does with each of them."""

from pathlib import Path

import pytest
import torch

from ptf.errors import UserError
from ptf.model import bridge, model_writer
from ptf.model.reference import reference
from ptf.tasks.tiny import ARCHITECTURES, write_model


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@torch.no_grad()
def test_transformers_computes_what_ptf_does(tmp_path: Path, model_type: str) -> None:
    write_model(tmp_path / "model", "0123456789+-=", model_type=model_type)
    model = bridge.build(tmp_path / "model")
    model.give_weights(Path(), torch.device("cpu"), random=True, seed=0)
    model_writer.save_hf(model.hf_tensors(), tmp_path / "model", tmp_path / "saved", writes=True)
    tokens = torch.randint(0, 10, (1, 12), generator=torch.Generator().manual_seed(0))
    ours = model(tokens, torch.arange(12)[None], torch.zeros_like(tokens), lambda x, head: head.logits(x))
    theirs = reference(tmp_path / "saved")(input_ids=tokens, use_cache=False).logits
    assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


def test_a_family_without_a_tiny_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="llama has no tiny model; there are qwen3, "):
        write_model(tmp_path / "model", "01", model_type="llama")
