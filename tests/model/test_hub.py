"""Where models come from: the Hugging Face cache, with and without a network, and any file system that fsspec knows."""

import json
import shutil
from pathlib import Path

import fsspec
import pytest
import torch
from huggingface_hub import constants

from ptf.errors import UserError
from ptf.model import bridge, hub, model_files, model_writer
from ptf.storage.hub import first_line, refusal
from tests.child import run_python
from tests.data.hub_stub import running
from tests.tiny import checkpoint

COMMIT, OTHER = "a" * 40, "b" * 40


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("hub") / "model")


@pytest.fixture
def home(model, tmp_path) -> Path:
    """A cache as the hub's client lays it out: two commits of one model, the main branch at the second and a tag at the
    first."""
    root = tmp_path / "hf" / "hub" / "models--me--tiny"
    for commit, eps in ((COMMIT, 1e-5), (OTHER, 1e-6)):
        snapshot = root / "snapshots" / commit
        shutil.copytree(model, snapshot)
        (snapshot / "config.json").write_text(json.dumps({**model_files.read_config(model), "rms_norm_eps": eps}))
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(OTHER)
    (root / "refs" / "v1").write_text(COMMIT)
    return tmp_path / "hf"


CODE = """
import contextlib, io, json, sys
from ptf.errors import UserError
from ptf.model import hub
found = []
for path in json.loads(sys.argv[1]):
    out, directory = io.StringIO(), ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            directory = str(hub.fetch(path))
        except UserError as error:
            print(error)
    found.append([directory, out.getvalue().strip()])
print(json.dumps(found))
"""


def located(home: Path, asked: list[str], **environment: str) -> list[list[str]]:
    """What `hub.fetch` gives for each path in a process of its own, for the client reads its environment
    once: directory, and what it printed or its message."""
    run = run_python(
        "-c",
        CODE,
        json.dumps(asked),
        timeout=300,
        cwd=Path(__file__).parents[2],
        env={"PATH": "/usr/bin:/bin", "HF_HOME": str(home), "OMP_NUM_THREADS": "1", **environment},
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return json.loads(run.stdout)


OFFLINE = {"HF_HUB_OFFLINE": "1"}
NO_NETWORK = {"HF_ENDPOINT": "http://127.0.0.1:9"}  # nobody listens there


@pytest.mark.long
@pytest.mark.parametrize("environment", [OFFLINE, NO_NETWORK], ids=["offline", "no network"])
def test_a_cached_model_needs_no_network_and_its_revision_is_honoured(home, environment):
    commits = {"me/tiny": OTHER, "me/tiny@v1": COMMIT, f"me/tiny@{COMMIT}": COMMIT}
    found = located(home, list(commits), **environment)
    for (path, commit), (directory, said) in zip(commits.items(), found, strict=True):
        assert directory.endswith(f"models--me--tiny/snapshots/{commit}")
        # which one it is, where it might not be the newest
        assert (commit in said) or (path.endswith(COMMIT) and environment is NO_NETWORK)


@pytest.mark.long
def test_what_is_not_in_the_cache_is_said_with_what_to_do(home):
    commands = {
        "me/other": "hf download me/other`",
        "me/tiny@v2": "hf download me/tiny --revision v2`",
    }
    for environment, why in ((OFFLINE, "HF_HUB_OFFLINE"), (NO_NETWORK, "cannot be reached")):
        found = located(home, list(commands), **environment)
        for command, (directory, said) in zip(commands.values(), found, strict=True):
            assert directory == ""
            assert why in said
            assert command in said
            assert len(said.splitlines()) == 1


def test_a_half_fetched_model_counts_as_absent(home):
    snapshot = home / "hub" / "models--me--tiny" / "snapshots" / OTHER
    (snapshot / "model.safetensors").rename(snapshot / "pytorch_model.bin")
    ((directory, said),) = located(home, ["me/tiny"], **OFFLINE)
    assert directory == ""
    assert "does not have all of me/tiny" in said


@pytest.fixture
def memory():
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


def test_a_uri_is_copied_once_whole_and_without_other_copies_of_the_weights(model, memory, tmp_path, monkeypatch):
    memory.put(f"{model}/", "/models/tiny/", recursive=True)
    memory.pipe("/models/tiny/pytorch_model.bin", b"the same again")
    memory.pipe("/models/tiny/original/consolidated.00.pth", b"and again")
    local = model_files.locate("memory://models/tiny", cache=str(tmp_path / "cache"))
    assert {f.name for f in local.iterdir()} == {f.name for f in model.iterdir()}
    inode = (local / "model.safetensors").stat().st_ino
    again = model_files.locate("memory://models/tiny", cache=str(tmp_path / "cache"))
    assert again == local
    assert (again / "model.safetensors").stat().st_ino == inode
    memory.pipe(
        "/models/tiny/config.json", json.dumps({**model_files.read_config(model), "rms_norm_eps": 1e-5}).encode()
    )
    newer = model_files.locate("memory://models/tiny", cache=str(tmp_path / "cache"))
    assert newer != local
    assert model_files.read_config(newer)["rms_norm_eps"] == 1e-5
    count = 0

    def cut_off(*_, **__):
        nonlocal count
        count += 1
        if count == 2:
            raise RuntimeError("cut off")
        return real(*_, **__)

    real = type(memory).get_file
    monkeypatch.setattr(type(memory), "get_file", lambda self, *a, **k: cut_off(self, *a, **k))
    memory.pipe("/models/tiny/config.json", b"{}")
    with pytest.raises(RuntimeError, match="cut off"):
        model_files.locate("memory://models/tiny", cache=str(tmp_path / "cache"))
    assert {place for place in (tmp_path / "cache").iterdir() if place.is_dir()} == {local, newer}


def test_a_file_uri_and_a_missing_one(model, tmp_path):
    assert model_files.locate(f"file://{model}") == model
    with pytest.raises(UserError, match="memory://nowhere"):
        model_files.locate("memory://nowhere", cache=str(tmp_path))


def test_a_sharded_checkpoint_from_a_uri_loads_and_exports(model, memory, tmp_path, monkeypatch):
    first = bridge.load(model)
    with monkeypatch.context() as patch:
        patch.setattr(model_writer, "SHARD_BYTES", 50_000)
        model_writer.save_hf(first.hf_tensors(), model, tmp_path / "sharded", writes=True)
    shards = sorted(f.name for f in (tmp_path / "sharded").glob("*.safetensors"))
    assert len(shards) > 2
    memory.put(f"{tmp_path}/sharded/", "/models/sharded/", recursive=True)
    local = model_files.locate("memory://models/sharded", cache=str(tmp_path / "cache"))
    second = bridge.load(local)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    model_writer.save_hf(second.hf_tensors(), local, tmp_path / "whole", writes=True)
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert not list((tmp_path / "whole").glob("*.index.json"))
    (local / shards[1]).unlink()
    with pytest.raises(UserError, match=f"files that do not exist: {shards[1]}"):
        bridge.load(local)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("me/gated", "model.path: the model me/gated is gated: accept its terms on the Hub, and set HF_TOKEN"),
        ("me/closed", r"model.path: the Hub does not show the model me/closed \(403\): set HF_TOKEN to a token"),
        ("me/none", "model.path: there is no file or directory me/none here, and no such model on the Hub"),
        ("me/open@v9", "model.path: the model me/open has no branch, tag or commit 'v9': correct what follows the @"),
        ("me/legal", "model.path: the Hub refuses: "),
    ],
)
def test_what_the_hub_refuses_is_said_with_what_to_do(path, message, tmp_path, monkeypatch):
    with running() as stub:
        monkeypatch.setattr(constants, "ENDPOINT", stub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", stub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        for id in ("me/gated", "me/closed", "me/legal", "me/open"):
            stub.push(id, {"config.json": b"{}"})
        stub.refused = {
            "me/gated/resolve": (401, "GatedRepo"),
            "me/closed/resolve": (403, ""),
            "models/me/legal/tree": (451, ""),
        }
        with pytest.raises(UserError, match=message):
            hub.fetch(path)


def test_an_error_is_told_by_its_first_line_or_by_its_class():
    assert first_line(RuntimeError("\n no network\nat line 3")) == "no network"
    assert first_line(RuntimeError("")) == "RuntimeError"


def test_a_hub_that_said_nothing_has_refused_nothing():
    assert refusal(ConnectionError("reset"), "model", "me/tiny", None) == ""
