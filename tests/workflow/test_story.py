"""What people do with flows, on this machine's files and on an object store: train, train on, publish, retrain, go
back; and crashes in every stage."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import s3fs
import yaml

from ptf import storage
from ptf.storage import file_verification, published_versions
from tests.flows.toy import ROOT, Toy
from tests.tiny import arithmetic, read_jsonl
from tests.workflow.gateway import Gateway, missing

pytestmark = pytest.mark.s3
FLOWS = ROOT / "flows"
CRASHING = Path(__file__).with_name("crashing_flow.py")
SMALL = {"partitions": 4, "seq_len": 64, "shuffle_buffer": 16}
ROLLOUT = {
    **{"engine": "native", "prompts_per_step": 4, "group_size": 4, "max_new_tokens": 4},
    "reward": {"use": "ptf.tasks.arithmetic:exact"},
}


class Place:
    """Where a story's data and versions are, and its flows as processes in a directory of their own."""

    def __init__(self, at: Path, root: str, options: tuple[str, ...], env: dict[str, str]):
        at.mkdir()
        self.at, self.root, self.options = at, root, options
        self.toy = Toy(at)
        self.toy.env |= env | {"PYTHONPATH": str(ROOT)}

    def flow(self, file: Path, *words: str, crash: str = "", fails: bool = False) -> subprocess.CompletedProcess[str]:
        self.toy.env["CRASH"] = crash or "nowhere"
        done = self.toy(*self.options, *words, flow=file, within_s=1200)
        assert (done.returncode != 0) is fails, done.stdout + done.stderr
        return done

    def write(self, name: str, rows: list[dict[str, Any]]) -> None:
        storage.write_text(f"{self.root}/data/{name}", "".join(json.dumps(row) + "\n" for row in rows))

    def config(self, name: str, raw: dict[str, Any]) -> str:
        (self.at / name).write_text(yaml.safe_dump(raw))
        return name


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    if absent := missing():
        pytest.skip(f"needs Ceph's {', '.join(absent)} (Debian: radosgw ceph-mon ceph-osd ceph-common)")
    with Gateway(tmp_path_factory.mktemp("ceph") / "c").running() as gateway, pytest.MonkeyPatch.context() as patch:
        for name, value in gateway.env.items():
            patch.setenv(name, value)
        patch.delenv("AWS_CA_BUNDLE", raising=False)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("stories")
        yield gateway
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module", params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes new places, by name."""
    above = tmp_path_factory.mktemp(request.param)
    if request.param == "local":
        return lambda name: Place(above / name, str(above / name / "store"), (), {})
    gateway = request.getfixturevalue("gateway")
    own = {"METAFLOW_DATASTORE_SYSROOT_S3": "s3://stories/metaflow", "METAFLOW_S3_ENDPOINT_URL": gateway.endpoint}
    return lambda name: Place(above / name, f"s3://stories/{name}", ("--datastore", "s3"), gateway.env | own)


def again(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The words of the last line, which is the command that resumes, from `resume` on."""
    words = shlex.split(done.stderr.splitlines()[-1])
    return words[words.index("resume") :]


@pytest.fixture(scope="module")
def sums(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """A job, and its chats, those that are held out, and prompts."""
    directory = tmp_path_factory.mktemp("sums")
    raw = arithmetic(directory, rows=400)

    return raw, *(read_jsonl(directory / f"{name}.jsonl") for name in ("train", "held_out", "prompts"))


def test_train_train_on_publish_retrain_and_go_back(place, sums):
    raw, chats, held_out, prompts = sums
    p = place("story")
    p.write("train/0.jsonl", chats[:200])
    p.write("held_out.jsonl", held_out)
    p.write("prompts.jsonl", prompts)
    data = raw["data"] | {
        "sources": {"sums": {"path": f"{p.root}/data/train"}},
        "validation": {"held_out": {"path": f"{p.root}/data/held_out.jsonl"}},
    }
    train = raw["train"] | {"steps": 30, "schedule": "constant", "validate_every": 0}
    publish = {"metric": "loss/held_out", "to": f"{p.root}/answers"}
    sft = p.config("sft.yaml", raw | {"output": "runs/sft", "data": data, "train": train, "publish": publish})
    rl = {key: raw[key] for key in ("seed", "compute", "checkpoint", "track")} | {
        "recipe": "grpo",
        "output": "runs/grpo",
        "model": {"path": f"job:{sft}"},
        "publish": {"to": f"{p.root}/rl"},
        "data": {"sources": {"p": {"path": f"{p.root}/data/prompts.jsonl", "kind": "prompt"}}, "seq_len": 64},
        "rollout": ROLLOUT,
        "train": {"steps": 3, "lr": 1e-4, "global_batch_sequences": 4, "micro_batch_sequences": 2, "precision": "fp32"},
    }

    p.flow(FLOWS / "sft_flow.py", "run", "--config", sft)
    root = f"{p.root}/answers"
    first = published_versions.pointer(root)
    assert first is not None
    assert first.version.startswith("sft-")
    file_verification.verify(f"{root}/{first.version}")

    p.flow(FLOWS / "grpo_flow.py", "run", "--config", p.config("grpo.yaml", rl))
    made = published_versions.manifest(f"{p.root}/rl")
    assert made is not None
    assert yaml.safe_load(made["job"])["model"]["path"] == f"{root}/{first.version}"
    file_verification.verify(f"{p.root}/rl/{made['version']}")

    said = p.flow(FLOWS / "retrain_flow.py", "run", "--config", sft)
    assert f"nothing new since {first.version}" in said.stdout
    assert published_versions.pointer(root) == first

    p.write("train/1.jsonl", chats[200:])
    said = p.flow(FLOWS / "retrain_flow.py", "run", "--config", sft)
    assert f"sums changed since {first.version}" in said.stdout
    second = published_versions.pointer(root)
    assert second is not None
    assert second.before == (first.version,)
    before, now = (
        file_verification.verify(f"{root}/{version}")["metrics"]["loss/held_out"]
        for version in (first.version, second.version)
    )
    assert now < before
    assert "nothing new" in p.flow(FLOWS / "retrain_flow.py", "run", "--config", sft).stdout

    p.write(
        "train/2.jsonl",
        [{"messages": [row["messages"][0], {"role": "assistant", "content": "+-=+-="}]} for row in chats],
    )
    worse = ("--set", "train.lr=0.003", "--set", f"data.sources.sums.path={p.root}/data/train/2.jsonl")
    said = p.flow(FLOWS / "retrain_flow.py", "run", "--config", sft, *worse)
    assert "not published: worse than what training started from: loss/held_out" in said.stdout
    assert published_versions.pointer(root) == second

    ptf = [sys.executable, "-m", "ptf.cli", "publish", root, "--rollback"]
    done = subprocess.run(ptf, cwd=p.at, env=p.toy.env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert published_versions.pointer(root) == published_versions.Pointer(first.version)
    assert storage.manifest_of(f"{root}/{second.version}")["version"] == second.version, (
        "what was gone back from is kept"
    )


CRASHES = {
    "sft": [
        "prepare ptf.storage:commit 1",  # its files are there, and its manifest is not
        "tokenize ptf.storage:commit 1",
        "train ptf.storage:finish 2",  # in the second checkpoint
        "train ptf.model.model_writer:save_hf 1",
        "evaluate ptf.storage:write_text 1",
        "publish ptf.storage.copies:names_below 1 3",  # three files are there
        "publish ptf.storage.published_versions:point 1",  # all files are there
    ],
    "grpo": ["train ptf.storage:finish 2", "publish ptf.storage.copies:names_below 1 3"],
}


@pytest.fixture(scope="module")
def whole(place) -> Any:
    """What runs that nothing happens to publish, by recipe."""
    return {recipe: crash_story(place, recipe, "") for recipe in CRASHES}


def crash_story(place: Any, recipe: str, crash: str) -> dict[str, bytes]:
    """Runs the recipe's flow in a place of its own, with a crash and a resume if one is given;
    the bytes that it has published."""
    p = place("-".join([recipe, *re.findall(r"\w+", crash)]))
    common = {
        "seed": 1,
        "data": {"prepare": {"use": "ptf.tasks.arithmetic:prepare", "args": {"high": 30, "held_out": 20}}, **SMALL},
        "track": {"tensorboard": False},
        "train": {"steps": 6, "lr": 1e-3, "global_batch_sequences": 4, "micro_batch_sequences": 2, "precision": "fp32"},
        "checkpoint": {"every": 2},
        "compute": {"launcher": "local", "device": "cpu", "threads": 1},
        "publish": {"to": f"{p.root}/published"},
        "evaluate": {
            "sources": {"test": {"path": "prepare:test.jsonl", "kind": "prompt"}},
            "reward": {"use": "ptf.tasks.arithmetic:exact"},
            "max_new_tokens": 4,
            "samples_per_prompt": 2,
            "limit": 8,
        },
    }
    if recipe == "sft":
        sources = {"sums": {"path": "prepare:train.jsonl"}}
        raw = common | {"recipe": "sft"}
    else:
        sources = {"sums": {"path": "prepare:train_prompts.jsonl", "kind": "prompt"}}
        raw = common | {"recipe": "grpo", "rollout": ROLLOUT}
        raw["data"] = {"prepare": common["data"]["prepare"], "seq_len": 64}
    raw |= {"model": {"path": "prepare:model", "init": "random"}, "data": raw["data"] | {"sources": sources}}
    config = p.config("job.yaml", raw)
    done = p.flow(CRASHING, "run", "--config", config, crash=crash, fails=bool(crash))
    if crash:
        assert (p.at / "crashed").exists(), "that function was not called"
        p.flow(CRASHING, *again(done), crash=crash)
    root = f"{p.root}/published"
    seen = published_versions.pointer(root)
    assert seen is not None
    assert seen.before == ()
    held = {}
    for name in file_verification.verify(f"{root}/{seen.version}")["files"]:
        with storage.open_read(f"{root}/{seen.version}/{name}") as file:
            held[name] = file.read().replace(p.root.encode(), b"ROOT").replace(seen.version.encode(), b"VERSION")
    held["README.md"] = re.sub(rb"\| [0-9a-f]{16} \|", b"| STAMPS |", held["README.md"])  # of the prepared files' times
    return held


@pytest.mark.parametrize(
    ("recipe", "crash"), [(recipe, crash) for recipe, crashes in CRASHES.items() for crash in crashes]
)
def test_a_crash_and_a_resume_publish_the_same_bytes(place, whole, recipe, crash):
    found = crash_story(place, recipe, crash)
    assert found.keys() == whole[recipe].keys()
    assert {name for name in found if found[name] != whole[recipe][name]} == set()
    assert {"model.safetensors", "README.md", "tokenizer.json"} <= found.keys()


def test_of_two_that_publish_at_once_both_are_whole_and_the_pointer_names_one(place):
    p = place("race")
    root = f"{p.root}/published"
    names = [f"v{n}" for n in range(8)]

    def publish(version: str) -> None:
        for _ in range(100):
            storage.upload(p.at / version, f"{root}/{version}")
            if published_versions.point(root, version, published_versions.pointer(root)):
                return
        raise AssertionError(f"{version} was never first in 100 tries")

    for name in names:
        (p.at / name).mkdir()
        (p.at / name / "weights").write_bytes(os.urandom(10_000))
        storage.commit(p.at / name, {"version": name})
    with ThreadPoolExecutor(len(names)) as pool:
        publishing = [pool.submit(publish, name) for name in names]
        while not all(one.done() for one in publishing):
            if seen := published_versions.pointer(root):  # never torn, and of a version that is there whole
                file_verification.verify(f"{root}/{seen.version}")
        for one in publishing:
            one.result()
    last = published_versions.pointer(root)
    assert last is not None
    assert sorted([*last.before, last.version]) == names, "each took the place of one, and none was lost"


@pytest.mark.parametrize(
    ("env", "messages"),
    [
        (
            {"AWS_SECRET_ACCESS_KEY": "wrong"},
            ["no access to s3://stories/", "are the credentials of this store set in the environment?"],
        ),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, ["no access to s3://stories/"]),
        (
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "GIVE_UP_S": "30"},
            ["trying again in 1 s", "s3://stories/", "the store has failed for 30 s"],
        ),
    ],
    ids=["secret", "key", "down"],
)
def test_a_store_that_cannot_be_reached_is_one_message_before_anything_is_trained(
    gateway, tmp_path, sums, env, messages
):
    p = Place(tmp_path / "p", "s3://stories/unreached", (), gateway.env | env)
    job = p.config("job.yaml", sums[0] | {"output": "runs", "publish": {"to": f"{p.root}/published"}})
    done = p.flow(CRASHING, "run", "--config", job, fails=True)
    said = done.stdout + done.stderr
    assert all(message in said for message in messages), said
    assert "Traceback" not in said
    assert not (p.at / "runs").exists()


@pytest.mark.parametrize(
    ("pointer", "message"),
    [("{", "is not a pointer"), ('{"version": "gone"}', "names gone, which is not there"), (None, "no config.json")],
    ids=["torn", "gone", "missing"],
)
def test_a_pointer_that_leads_nowhere_is_one_message(place, sums, pointer, message):
    p = place(f"pointer{pointer and len(pointer)}")
    root = f"{p.root}/published"
    storage.write_text(f"{root}/v1/model.bin", "x")
    if pointer:
        storage.write_text(f"{root}/latest.json", pointer)
    job = p.config("job.yaml", sums[0] | {"output": "runs", "model": {"path": root}})
    done = p.flow(FLOWS / "sft_flow.py", "run", "--config", job, fails=True)
    assert message in done.stdout + done.stderr, done.stdout + done.stderr
    assert root in done.stdout + done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
