"""The main job by the commands that a user types: SFT with a kill and a resume, what is published, GRPO on vLLM, in
order; and that two workers train what one trains."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ptf.compute.tracking import is_clock, read_metrics
from ptf.config import load, resolve
from ptf.data.tokenizer import Tokenizer
from ptf.evaluate.measurement import measure_held_out_rows
from ptf.run import resolved, run
from ptf.train.tokenize import tokenize
from tests.child import run_python
from tests.waiting import until

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
SFT, GRPO = "configs/tiny/sft.yaml", "configs/tiny/grpo.yaml"


class Place:
    """A directory for all output of this file, and the commands run with it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {
            **os.environ,
            "HOME": str(home / "home"),
            "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(home),
            "METAFLOW_USER": "test",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT),
        }
        (home / "home").mkdir()

    def sets(self, name: str, *more: str) -> list[str]:
        return [
            f"output={self.home}/{name}",
            "track.tensorboard=false",
            "track.print_every=1",
            "compute.threads=1",
            "evaluate.limit=20",
            "data.prepare.args.train=4000",
            *more,
        ]

    def data_of(self, whole: str, name: str) -> None:
        """Give an output directory what `data.prepare` has made for another, which takes a process 3 CPU-seconds."""
        shutil.copytree(self.home / whole / "prepared", self.home / name / "prepared")

    def command(self, flow: str, *words: str) -> list[str]:
        return [sys.executable, str(ROOT / "flows" / f"{flow}_flow.py"), *words]

    def run_words(self, config: str, sets: list[str]) -> list[str]:
        words = ["run", "--config", str(ROOT / config), "--run-id-file", str(self.home / "run_id")]
        return [*words, *(w for s in sets for w in ("--set", s))]

    def do(self, command: list[str], timeout: float = 1200) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=timeout, check=False
        )

    def start(self, command: list[str], log: Path, **more: str) -> subprocess.Popen:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=self.env | more,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("main_job"))


def facts(directory: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if not is_clock(k)} for row in read_metrics(directory / "metrics.jsonl")]


def run_directory(output: Path) -> Path:
    """The one run under an output directory."""
    (found,) = [p.parent for p in output.glob("*/metrics.jsonl")]
    return found


def kill_at(log: Path, output: Path, named: str, step: int) -> None:
    """SIGKILL the process whose number the log has after these words, once `step` is logged."""
    pid = int(until(lambda: re.search(rf"{named}pid (\d+)", log.read_text() if log.exists() else ""), 900)[1])
    until(lambda: any(row["step"] >= step for p in output.glob("*/metrics.jsonl") for row in read_metrics(p)), 900)
    os.kill(pid, signal.SIGKILL)


STEPS = [
    "train.steps=24",
    "train.lr_decay_steps=4",
    "train.lr_decay_at_loss=null",
    "checkpoint.every=5",
    "train.validate_every=8",
]


@pytest.fixture(scope="module")
def tokenized(place):
    """The data of the job, tokenized as in the flow."""
    job = resolved(load(str(ROOT / SFT), overrides=place.sets("alone", *STEPS)))
    return tokenize(job, Tokenizer.load(job.model.path), 1)


@pytest.fixture(scope="module")
def alone(place, tokenized):
    """The job uninterrupted on one worker, in this process."""
    job = resolved(load(str(ROOT / SFT), overrides=place.sets("alone", "compute.launcher=local", *STEPS)))
    return run(resolve(job, tokenized=tokenized), "alone")


@pytest.fixture(scope="module")
def on_the_fly(place):
    """The same from the rows as they are, whose blocks, and so their order, are others."""
    job = load(
        str(ROOT / SFT), overrides=place.sets("on_the_fly", "compute.launcher=local", "data.pretokenize=false", *STEPS)
    )
    return run(resolved(job), "alone")


@pytest.fixture(scope="module")
def sft(place, alone):
    """What two commands printed: a flow whose train step is killed, and its resume."""
    output = place.home / "sft"
    place.data_of("alone", "sft")
    log = place.home / "sft.log"
    own = place.home / "tmp"  # Metaflow's card of a task that is killed leaves a file there
    own.mkdir()
    flow = place.start(place.command("sft", *place.run_words(SFT, place.sets("sft", *STEPS))), log, TMPDIR=str(own))
    kill_at(log, output, r"/train/\d+ \(", 13)  # one worker: the step's own process
    assert flow.wait(600) != 0
    text = log.read_text()
    again = re.findall(r"resume --origin-run-id (\S+)", text)
    assert again, text[-3000:]
    assert not (run_directory(output) / "model").exists()
    done = place.do(place.command("sft", "resume", "--origin-run-id", again[-1]))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_sft_that_is_killed_and_resumed_ends_with_the_same_bits(place, sft, alone):
    resumed = re.search(r"resumed from \S+ \(step (\d+) of 24\)", sft)
    assert resumed
    assert int(resumed[1]) in (5, 10, 15, 20)  # whichever was whole when it was killed
    directory = run_directory(place.home / "sft")
    a, b = (load_file(d / "model" / "model.safetensors") for d in (alone, directory))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert facts(alone) == facts(directory)


def test_two_workers_are_distinct_ray_actors_and_train_and_measure_what_one_does(
    place, tokenized, alone, ray_cluster, capfd
):
    job = resolved(load(str(ROOT / SFT), overrides=place.sets("alone", "compute.workers=2", *STEPS)))
    job = resolve(job, tokenized=tokenized)
    both = run(job, "both")
    found = measure_held_out_rows(job, both)
    said = capfd.readouterr()
    actors = re.findall(r"train: rank (\d) \(actor (\w+), pid (\d+)", said.out + said.err)
    assert [rank for rank, _, _ in actors] == ["0", "1"]
    assert len({actor for _, actor, _ in actors}) == len({pid for _, _, pid in actors}) == 2
    one, two = facts(alone), facts(both)
    assert len(one) == len(two) == 24
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-6)
        assert a.get("loss/dev", 0) == pytest.approx(b.get("loss/dev", 0), rel=2e-6)
    assert one[-1]["loss"] < one[0]["loss"] - 0.5
    assert found["loss/dev"] == pytest.approx(one[-1]["loss/dev"], rel=2e-6)


def answers_of(directory: Path) -> list[dict]:
    return [json.loads(row) for row in (directory / "responses" / "test.jsonl").read_text().splitlines()]


GENERATE = """
import json, sys
prompts, directory, limit = json.loads(sys.argv[1]), sys.argv[2], 8
from vllm import LLM, SamplingParams
llm = LLM(directory, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=1 << 26, max_model_len=64,
          disable_log_stats=True)
out = llm.generate([{"prompt_token_ids": p} for p in prompts],
                   SamplingParams(temperature=0, max_tokens=limit), use_tqdm=False)
print("ANSWERS", json.dumps([o.outputs[0].text for o in out]))
"""


def test_what_is_published_gives_our_answers_in_transformers_and_in_vllm(place, sft, vllm_caches):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ptf.rl.engines.vllm_engine import engine_env

    root = place.home / "sft" / "published"
    directory = root / json.loads((root / "latest.json").read_text())["version"]
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["logprob_difference"] <= 1e-4
    assert "greedy_pass_rate/test" in manifest["metrics"]
    ours = answers_of(run_directory(place.home / "sft"))
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    prompts = [
        tokenizer.apply_chat_template(a["row"]["messages"], add_generation_prompt=True, return_dict=False) for a in ours
    ]
    theirs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))[
            0, len(prompt) :
        ]
        theirs.append(tokenizer.decode(out, skip_special_tokens=True))
    assert len(ours) == 20
    assert [a["response"] for a in ours] == theirs
    env = {**place.env, **engine_env(vllm_caches)}
    done = run_python("-c", GENERATE, json.dumps(prompts), str(directory), env=env, timeout=900)
    served = re.search(r"^ANSWERS (.*)$", done.stdout, re.M)
    assert served, done.stderr[-2000:]
    assert json.loads(served[1]) == theirs


def test_grpo_on_vllm_syncs_every_step_and_continues_after_a_kill(place, sft):
    output, log = place.home / "grpo", place.home / "grpo.log"
    place.data_of("sft", "grpo")
    sets = place.sets(
        "grpo",
        f"model.path={place.home}/sft/published",
        "train.steps=8",
        "train.lr_decay_steps=4",
        "checkpoint.every=3",
        "rollout.prompts_per_step=8",
        "train.validate_every=4",
        "algo.kl_coef=0.01",
        "compute.restarts=0",
    )
    flow = place.start(place.command("grpo", *place.run_words(GRPO, sets)), log)
    kill_at(log, output, r"policy: rank 0 \(actor \w+, ", 5)
    assert flow.wait(600) != 0
    text = log.read_text()
    assert "engine=vllm" in text
    assert re.search(r"policy rank 0 \(actor \w+, pid \d+", text)
    again = re.findall(r"resume --origin-run-id (\S+)", text)
    assert again, text[-3000:]
    done = place.do(place.command("grpo", "resume", "--origin-run-id", again[-1]))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"resumed from \S+ \(step [36] of 8\)", done.stdout + done.stderr)
    rows = read_metrics(run_directory(output) / "metrics.jsonl")
    assert [r["step"] for r in rows] == list(range(1, 9))
    assert all(r["sync_tensors"] == 35 for r in rows)
    assert max(r["logprob_diff_max"] for r in rows) <= 1e-5
    assert max(r["canary_logprob_diff_max"] for r in rows) <= 1e-5
    assert np.isfinite([r["loss"] for r in rows]).all()
    assert (output / "published" / "latest.json").exists()


def test_torchrun_runs_the_same_job_without_ray(place, on_the_fly):
    overrides = [
        w for s in place.sets("torchrun", "compute.workers=2", "data.pretokenize=false", *STEPS) for w in ("--set", s)
    ]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ptf.run"]
    place.env["TMPDIR"] = str(place.home)  # torchrun leaves a directory there
    done = place.do([sys.executable, *launcher, str(ROOT / SFT), *overrides, "--run-name", "a"])
    assert done.returncode == 0, done.stderr[-3000:]
    for a, b in zip(facts(on_the_fly), facts(place.home / "torchrun" / "a"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-6)
