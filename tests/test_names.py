"""Names that become parts of paths stay in their directory: of runs, sources, versions, tensors' files,
files of a manifest, checkpoints."""

import json
import shutil
from pathlib import Path

import fsspec
import pytest
import yaml
from safetensors.torch import load_file

from ptf import cli, storage
from ptf.artifact import Artifact
from ptf.compute.checkpoint import Checkpoints
from ptf.config import ConfigError, loads
from ptf.config.sections.checkpoint import CheckpointConfig
from ptf.errors import UserError
from ptf.model import model_files
from ptf.model.tensor_files import TensorFiles
from ptf.run import run
from ptf.storage import file_verification
from steps.stages import prepare
from tests.tiny import arithmetic, checkpoint

OUTSIDE = ["", ".", "..", "../x", "a/b", "/tmp/x", "a\0b", "-x", "published", "x" * 201]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_run_cannot_be_named_so(tmp_path, name, capsys):
    raw = arithmetic(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(raw))
    before = sorted(tmp_path.rglob("*"))
    for start in (
        lambda: run(loads(yaml.safe_dump(raw)), name),
        lambda: prepare(loads(yaml.safe_dump(raw)), Artifact(name)),
    ):
        with pytest.raises(UserError, match="cannot be the name of a training run"):
            start()
    assert cli.main(["train", str(tmp_path / "job.yaml"), f"--run-name={name}"]) == 2
    assert "cannot be the name of a training run" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["../x", "a/b", ".x", "_x", "", "x" * 101])
@pytest.mark.parametrize("key", ["sources", "validation"])
def test_a_source_cannot_be_named_so(tmp_path, key, name):
    raw = arithmetic(tmp_path)
    loads(yaml.safe_dump(raw))  # the control
    raw["data"][key] = {name: raw["data"]["sources"]["sums"]}
    with pytest.raises(ConfigError, match=rf"data\.{key}.*is not a valid source name"):
        loads(yaml.safe_dump(raw))


def test_an_index_of_tensors_names_only_files_beside_it(tmp_path):
    model = checkpoint(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(model / "part.safetensors")
    shutil.copy(model / "part.safetensors", tmp_path / "foreign.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "part.safetensors")}))
    model_files.locate(str(model))  # the control
    TensorFiles(model)
    for name in ("../foreign.safetensors", str(tmp_path / "foreign.safetensors"), "", "..", 3):
        index.write_text(
            json.dumps({"weight_map": {**dict.fromkeys(tensors, "part.safetensors"), "lm_head.weight": name}})
        )
        for read in (lambda: model_files.locate(str(model)), lambda: TensorFiles(model)):
            with pytest.raises(UserError, match="names a file that does not lie beside it"):
                read()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret"])
def test_a_manifest_names_only_files_below_it(tmp_path, name):
    (tmp_path / "secret").write_text("x")
    (tmp_path / "b" / "a").mkdir(parents=True)
    entry = {"size": 1, "sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"}
    storage.finish(str(tmp_path / "a"), {}, {})
    file_verification.verify(str(tmp_path / "a"))  # the control
    storage.finish(str(tmp_path / "b"), {}, {name: entry})
    with pytest.raises(storage.Corrupt, match="is not a manifest"):
        file_verification.verify(str(tmp_path / "b"))


def test_what_is_copied_from_a_store_stays_in_the_copy(tmp_path):
    files = fsspec.filesystem("memory")
    files.pipe("/names/model/config.json", b"{}")
    assert Path(storage.localize("memory://names/model", tmp_path / "cache"), "config.json").exists()  # the control
    files.store["/names/model/../../escaped"] = files.store["/names/model/config.json"]
    try:
        with pytest.raises(storage.Corrupt, match="leads out of it"):
            storage.localize("memory://names/model", tmp_path / "cache")
    finally:
        del files.store["/names/model/../../escaped"]
    assert not list(tmp_path.rglob("escaped"))


def test_a_stray_directory_beside_checkpoints_is_left_alone_and_said(tmp_path, capsys):
    saves = Checkpoints(str(tmp_path), CheckpointConfig(every=1, keep=1), steps=5)
    for step in (1, 2):
        storage.finish(saves.path(step), {"step": step}, {})
    for name in ("step_x", "step_00000002.bak", "step_3", "step_00000009 (copy)"):
        shutil.copytree(saves.path(2), tmp_path / name)
    found = saves.latest()
    assert found is not None
    assert found[0] == 2
    said = capsys.readouterr().out
    assert said.count("is not a checkpoint of this run") == 4
    saves.commit(3, {}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_00000002.bak",
        "step_00000003",
        "step_00000009 (copy)",
        "step_3",
        "step_x",
    ]
