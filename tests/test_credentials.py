"""Secrets are in no config and in nothing that is written: not in a run's directory, a card, a manifest,
Metaflow's data, an argv, or a log."""

import gzip
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import yaml

from ptf.config import ConfigError, Plugin, dump, loads, plugin, shown
from ptf.errors import UserError
from ptf.workspace import credentials
from tests.flows.toy import Toy
from tests.tiny import arithmetic

SECRET, OTHER, PLAIN = "planted-3f9c2a71d0", "planted-77aa01bc42", "planted-but-no-secret"
TOKEN = "hf_" + "aB3" * 12
TRAIN = {"PTF_TEST_TOKEN": "env:PLANTED", "PTF_TEST_MODE": PLAIN}


def found(place: Path, *texts: str) -> set[tuple[str, str]]:
    """(file, text) of every text in every file, packed ones unpacked."""
    hits = set()
    for file in place.rglob("*"):
        if file.is_file() and not file.is_symlink():
            held = [file.read_bytes()]
            for unpack in (gzip.decompress, zlib.decompress):
                try:
                    held.append(unpack(held[0]))
                except (OSError, EOFError, zlib.error):
                    continue
            hits |= {(str(file.relative_to(place)), text) for text in texts for data in held if text.encode() in data}
    return hits


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("flow.stages.train.env_vars.HF_TOKEN", SECRET),
        ("flow.stages.train.env_vars.AWS_SECRET_ACCESS_KEY", SECRET),
        ("flow.stages.train.env_vars.INNOCENT", TOKEN),
        ("rollout.reward.args.api_key", SECRET),
        ("publish.to", f"s3://me:{SECRET}@store/versions"),
        ("compute.address", f"http://me:{SECRET}@host:8265"),
    ],
)
def test_a_secret_in_a_config_is_refused_and_not_repeated(tmp_path, override, value):
    raw = arithmetic(tmp_path) | {"recipe": "grpo", "rollout": {"reward": {"use": "a:b"}, "engine": "native"}}
    raw["data"] |= {"sources": {"sums": {"path": "p.jsonl", "kind": "prompt"}}, "validation": {}, "seq_len": 512}
    raw["train"]["validate_every"] = 0
    loads(yaml.safe_dump(raw))  # the control
    with pytest.raises(ConfigError, match=rf"{override}  is a secret.*write env:NAME") as caught:
        loads(yaml.safe_dump(raw), [f"{override}={value}"])
    assert SECRET not in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_a_secret_is_found_beside_a_reference_of_the_same_path(tmp_path):
    args = {"headers.api_key": SECRET, "headers": {"api_key": "env:KEY"}}
    raw = arithmetic(tmp_path) | {"evaluate": {"reward": {"use": "a:b", "args": args}}}
    with pytest.raises(ConfigError, match=r"evaluate\.reward\.args\.headers\.api_key  is a secret"):
        loads(yaml.safe_dump(raw, sort_keys=False))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("RAY_AUTH_MODE", "token"),
        ("OMP_NUM_THREADS", "4"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/keys/g.json"),
        ("HF_TOKEN", "env:TEAM"),
        ("KEYBOARD", "us"),
    ],
)
def test_what_is_no_secret_is_taken_and_kept_out_of_what_is_published(tmp_path, key, value):
    job = loads(yaml.safe_dump(arithmetic(tmp_path) | {"flow": {"stages": {"train": {"env_vars": {key: value}}}}}))
    assert job.flow.stages["train"].env_vars == {key: value}
    kept = loads(dump(shown(job)))
    assert kept.flow.stages["train"].env_vars == {key: value if value.startswith("env:") else credentials.HIDDEN}
    assert kept.model_copy(update={"flow": job.flow}) == job


def test_a_plug_gets_what_a_reference_stands_for(monkeypatch):
    monkeypatch.setenv("PLANTED", SECRET)
    bound = plugin.bind(Plugin(use="builtins:dict", args={"api_key": "env:PLANTED", "text": "env:PLANTED"}))
    assert bound() == {"api_key": SECRET, "text": "env:PLANTED"}
    monkeypatch.delenv("PLANTED")
    with pytest.raises(UserError, match=r"api_key is env:PLANTED, but the environment variable PLANTED is not set"):
        plugin.bind(Plugin(use="builtins:dict", args={"api_key": "env:PLANTED"}))


def test_texts_are_printed_without_secrets(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    text = f"GET http://me:{OTHER}@host/ with {SECRET} and {TOKEN} failed for {PLAIN}"
    assert credentials.redacted(text) == f"GET http://me:***@host/ with *** and *** failed for {PLAIN}"


@pytest.mark.long
def test_a_job_leaves_none_of_its_secrets_anywhere(tmp_path):
    raw = arithmetic(tmp_path)
    raw["train"] |= {"steps": 2, "validate_every": 0}
    raw["track"]["tensorboard"] = True
    raw |= {"flow": {"stages": {"train": {"env_vars": TRAIN}}}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(raw))
    (tmp_path / "log").mkdir()
    env = {
        **os.environ,
        "PYTHONPATH": os.getcwd(),
        "PLANTED": SECRET,
        "HF_TOKEN": OTHER,
        "WANDB_API_KEY": TOKEN,
        "OMP_NUM_THREADS": "1",
    }
    with (tmp_path / "log" / "train").open("w") as log:
        for overrides in (
            ["--run-name", "a"],
            ["--run-name", "b", "--set", f"data.sources.sums.path=http://me:{OTHER}@localhost:9/x"],
        ):
            command = [sys.executable, "-m", "ptf.cli", "train", str(tmp_path / "job.yaml"), *overrides]
            status = subprocess.run(command, env=env, stdout=log, stderr=log, check=False).returncode
            assert status == (0 if "a" in overrides else 2)
    assert (tmp_path / "runs" / "a" / "model" / "model.safetensors").exists()
    assert found(tmp_path, SECRET, OTHER, TOKEN) == set()
    # the control: what is planted is found, and the run's own job.yaml has it not
    assert found(tmp_path, PLAIN) == {("job.yaml", PLAIN)}


LOOK = """
import os, sys
from pathlib import Path
sys.path.insert(0, {flows!r})
import toy_flow
trained = toy_flow.train

def train(job, artifact):
    Path("seen").write_text(os.environ["PTF_TEST_TOKEN"][::-1])
    lines = [Path(f"/proc/{{pid}}/cmdline").read_text() for pid in (os.getpid(), os.getppid())]
    Path("argv").write_text("\\n".join(lines))
    if os.environ.get("TOY") == "leak":
        raise toy_flow.UserError("no access with " + os.environ["PTF_TEST_TOKEN"])
    return trained(job, artifact)

toy_flow.train = train
class ToyFlow(toy_flow.ToyFlow):
    pass
if __name__ == "__main__":
    ToyFlow()
"""


@pytest.mark.e2e
def test_a_flow_leaves_none_of_its_secrets_anywhere(tmp_path):
    toy = Toy(tmp_path)
    toy.env |= {"PLANTED": SECRET, "PYTHONPATH": os.getcwd()}
    raw = yaml.safe_load((Path(__file__).parent / "flows" / "toy.yaml").read_text())
    raw["flow"]["stages"]["train"] = {"env_vars": {**TRAIN, "SECOND_TOKEN": "env:PLANTED"}}
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(raw))
    flow = tmp_path / "look.py"
    flow.write_text(LOOK.format(flows=str(Path(__file__).parent / "flows")))
    done = toy("run", flow=flow)
    assert done.returncode == 0, done.stderr
    failed = toy("run", flow=flow, act="leak")
    assert failed.returncode != 0
    assert "no access with ***" in failed.stdout + failed.stderr
    (tmp_path / "log").write_text(done.stdout + done.stderr + failed.stdout + failed.stderr)
    assert (tmp_path / "seen").read_text() == SECRET[::-1]  # the task had it
    assert "look.py" in (tmp_path / "argv").read_text()
    assert found(tmp_path, SECRET) == set()
    assert len(found(tmp_path, PLAIN)) > 1  # the control: Metaflow keeps the config, and packed files are looked into
