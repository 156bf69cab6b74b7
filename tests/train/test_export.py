"""What an export says of itself beside the checkpoint that it was made from."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from ptf.compute.world import World
from ptf.config.sections.model import ModelConfig
from ptf.data.character_tokenizer import character_tokenizer
from ptf.train.export import beside, export
from ptf.train.trainer import load_model
from tests.tiny import checkpoint


def test_an_export_says_how_it_differs_from_its_source(tmp_path, capsys):
    source = checkpoint(tmp_path / "m")
    character_tokenizer("0123456789", source)
    model = load_model(source, World(), ModelConfig(path="-"), seed=0, precision="fp32")
    (tmp_path / "run").mkdir()
    out = tmp_path / "run" / "model"
    export(model, source, out, World(), str(source))
    tensors = load_file(source / "model.safetensors")
    said = capsys.readouterr().out
    assert f"export: names and dtypes of {len(tensors)} tensors and the chat templates are those of {source}" in said

    norm = tensors.pop("model.norm.weight")
    tensors = {n: t.to(torch.bfloat16) if n.endswith("q_norm.weight") else t for n, t in tensors.items()}
    changed = shutil.copytree(out, tmp_path / "changed")
    save_file(tensors | {"model.other": norm}, changed / "model.safetensors")
    (changed / "chat_template.jinja").write_text("another")
    (changed / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "tool_use", "template": "more"}]})
    )
    said = beside(source, changed)
    assert "without: model.norm.weight; new: model.other;" in said
    assert "in another dtype: model.layers.0.self_attn.q_norm.weight, model.layers.1.self_attn.q_norm.weight" in said
    assert said.endswith("other chat templates: default, tool_use")
