"""Flows as users meet them: as processes. The toy flow is the real DAG around toy work."""

import base64
import os
import re
import shlex
import shutil
import signal
import sys
from unittest.mock import ANY

import pytest
import yaml

from ptf.config import loads
from ptf.storage import published_versions
from tests.child import run_python
from tests.flows.toy import ROOT, Toy, descendants, is_gone
from tests.tiny import arithmetic, online
from tests.waiting import until

pytestmark = pytest.mark.e2e

TWO = ROOT / "flows" / "sft_then_rl_flow.py"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run --config absent.yaml", "absent.yaml"),
        ("run --set train.stepz=3", "unknown key in train  (did you mean steps?)"),
        ("run --set train.steps=many", "train.steps"),
        ("run --config grpo.yaml", "this flow runs recipe: sft"),
        ("run --config", "--config needs a value"),
        ("resume --config grpo.yaml", "resume uses the config of the run that it resumes"),
        ("resume --set train.lr=1", "resume uses the config of the run that it resumes"),
    ],
)
def test_a_bad_line_ends_in_one_message_before_there_is_a_run(tmp_path, line, message):
    toy = Toy(tmp_path)
    (tmp_path / "grpo.yaml").write_text(
        "recipe: grpo\nmodel: {path: m}\ndata: {sources: {p: {path: p.jsonl, kind: prompt}}}\nrollout: {reward: {use: "
        "'a:b'}}\ntrain: {steps: 1, lr: 1.0}\n"
    )
    done = toy(*line.split())
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert {path.name for path in tmp_path.iterdir()} == {"home", "grpo.yaml"}


@pytest.mark.parametrize("flow", ["sft_flow.py", "grpo_flow.py", "retrain_flow.py"])
def test_the_flows_show_their_steps_from_anywhere(tmp_path, flow):
    done = Toy(tmp_path)("show", flow=ROOT / "flows" / flow)
    assert done.returncode == 0, done.stderr
    names = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("Step ")]
    assert names == ["start", "prepare", "tokenize", "train", "evaluate", "publish", "end"]


def test_two_trainings_in_one_flow_are_all_its_steps(tmp_path):
    done = Toy(tmp_path)("show", flow=TWO)
    assert done.returncode == 0, done.stderr
    stages = ["prepare", "tokenize", "train", "evaluate", "publish"]
    names = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("Step ")]
    assert names == ["start", *(f"{stage}_first" for stage in stages), *stages, "end"]


@pytest.mark.parametrize(
    ("path", "message"), [("some/model", "is not the model of another job"), ("job:nowhere.yaml", "nowhere.yaml")]
)
def test_a_second_training_without_a_first_is_refused(tmp_path, path, message):
    (tmp_path / "rl.yaml").write_text(
        f"recipe: grpo\nmodel: {{path: '{path}'}}\ndata: {{sources: {{p: {{path: p.jsonl, kind: prompt}}}}}}\n"
        "rollout: {reward: {use: 'a:b'}}\n"
        "train: {steps: 1, lr: 1.0}\n"
    )
    done = Toy(tmp_path)("run", "--config", "rl.yaml", flow=TWO)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.cluster
def test_the_second_training_begins_with_what_the_first_published(tmp_path):
    """Also where it is resumed after a failure, and something else is published there meanwhile."""
    raw = arithmetic(tmp_path)
    raw["train"] |= {"steps": 2, "validate_every": 0}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(raw | {"output": str(tmp_path / "first")}))
    rl = online(raw, tmp_path, "late_reward:score", prompts_per_step=2, max_new_tokens=4)
    rl |= {"output": str(tmp_path / "second"), "model": {"path": f"job:{tmp_path}/sft.yaml"}}
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(rl))
    (tmp_path / "flow").mkdir()
    toy = Toy(tmp_path / "flow")
    toy.env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = toy("run", "--config", str(tmp_path / "rl.yaml"), flow=TWO)
    assert done.returncode != 0, "the reward's module is not there"
    root = str(tmp_path / "first/published")
    first = published_versions.pointer(root)
    assert first is not None, done.stdout + done.stderr
    assert first.version.startswith("sft-then-rl-")
    shutil.copytree(f"{root}/{first.version}", f"{root}/another")
    assert published_versions.point(root, "another", first)
    (tmp_path / "late_reward.py").write_text("def score(row, text):\n    return float(len(text) < 3)\n")
    _, _, *words = shlex.split(done.stderr.splitlines()[-1])
    done = toy(*words, flow=TWO)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "second").glob("sft-then-rl-*/job.yaml")
    assert loads(run.read_text()).model.path == f"{root}/{first.version}"
    assert published_versions.pointer(str(tmp_path / "second/published")) == published_versions.Pointer(run.parent.name)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A run that is refused, its resume that is stopped, the resume of that resume, which finishes,
    and a spin of it."""
    toy = Toy(tmp_path_factory.mktemp("story"))
    refused = toy("run", "--set", "train.lr=0.5", act="refuse")
    stopped, task = toy.until_training(*again(refused.stderr))
    stopped.send_signal(signal.SIGTERM)
    out, err = stopped.communicate(timeout=120)
    task_gone, unwound = is_gone(task), (toy.directory / "unwound").exists()
    finished = toy(*again(err))
    spun = toy("spin", "train")
    return {
        "toy": toy,
        "refused": refused,
        "stopped": (stopped.returncode, out + err, task_gone, unwound),
        "finished": finished,
        "spun": spun,
    }


def again(stderr: str) -> list[str]:
    """The words of the last line, which is the command that resumes."""
    python, flow, *words = shlex.split(stderr.splitlines()[-1])
    assert (python, flow.endswith("toy_flow.py"), words[:2]) == ("python", True, ["resume", "--origin-run-id"])
    return words


def test_a_user_error_in_a_step_is_one_message_and_is_not_retried(story):
    done = story["refused"]
    assert done.returncode == 1
    assert done.stdout.count("no file matches data/*.jsonl") == 1
    assert "Traceback" not in done.stdout + done.stderr
    # once in each of refused, stopped, finished and spun, although flow.stages.train.retries is 2
    assert len(story["toy"].trained()) == 4


def test_sigterm_unwinds_the_task_and_ends_the_run(story):
    code, output, task_gone, unwound = story["stopped"]
    assert code != 0
    assert "Traceback" not in output
    assert task_gone
    assert unwound


def test_a_resume_of_a_resume_is_the_same_training_run(story):
    assert story["finished"].returncode == 0, story["finished"].stderr
    first, *others = story["toy"].trained()[:3]
    assert first["run_name"].startswith("toy-")
    assert [line["run_name"] for line in others] == [first["run_name"]] * 2
    assert {line["lr"] for line in others} == {0.5}  # the config is the first run's, overrides and all
    assert first["run_name"] in story["finished"].stdout.splitlines()[-5]


def test_a_spin_keeps_out_of_the_runs_checkpoints(story):
    assert story["spun"].returncode == 0, story["spun"].stderr
    first, *_, last = story["toy"].trained()
    assert last["run_name"] == first["run_name"] + "-spin"


@pytest.fixture(scope="module")
def unpublished(tmp_path_factory):
    """A run that goes on with a name, is preempted in training, is retried, and does not pass the gate."""
    toy = Toy(tmp_path_factory.mktemp("unpublished"))
    unknown = toy("run", "--continue", "another")
    assert unknown.returncode
    assert "--continue another: runs has no run of this name" in unknown.stdout + unknown.stderr
    (begun := toy.directory / "runs" / "a-run").mkdir(parents=True)
    (begun / "job.yaml").write_text("# of an earlier attempt")
    words = ["--continue", "a-run", "--set", "train.lr=0.25", "--with", "retry:times=1,minutes_between_retries=0"]
    return toy, toy("run", *words, act="preempt unpublished")


def test_a_run_may_go_on_with_a_name_and_what_was_preempted_is_retried(unpublished):
    toy, done = unpublished
    assert "stopped after step 2 of 5, as requested" in done.stdout + done.stderr
    assert toy.trained() == [{"run_name": "a-run", "lr": 0.25, "pid": ANY}] * 2
    assert len({line["pid"] for line in toy.trained()}) == 2
    assert re.search(r"/train/4 .*Task finished successfully", done.stdout)


def test_the_schedule_and_the_cards_are_there(story):
    toy, run = story["toy"], again(story["refused"].stderr)[-1]
    stored = toy("dump", "--private", "--max-value-size", "100000", f"{run}/start/1").stdout
    assert "'cron': '0 3" in stored
    html = toy("card", "get", "--id", "train", f"{run}/train/4").stdout  # of a train step that failed
    assert any(b"step 3 of 3" in base64.b64decode(data) for data in re.findall(r'"([A-Za-z0-9+/]{200,}=*)"', html))


def test_the_card_of_a_publication_that_fails_says_why(unpublished):
    toy, done = unpublished
    assert done.returncode == 1
    html = toy("card", "get", "--id", "publish", f"{again(done.stderr)[-1]}/publish/6").stdout
    assert any(
        b"not published: loss/dev is 2" in base64.b64decode(data)
        for data in re.findall(r'"([A-Za-z0-9+/]{200,}=*)"', html)
    )
    assert done.stdout.count("not published: loss/dev is 2") == 1  # where a retry would end in the same way


def test_nothing_is_written_under_home(story):
    assert list(story["toy"].home.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
@pytest.mark.parametrize(
    ("who", "number"),
    [
        ("run", signal.SIGINT),
        ("run", signal.SIGKILL),
        ("step", signal.SIGTERM),
        pytest.param("run", signal.SIGTERM, marks=pytest.mark.cluster),
        pytest.param("step", signal.SIGINT, marks=pytest.mark.cluster),
        pytest.param("step", signal.SIGKILL, marks=pytest.mark.cluster),
    ],
)
def test_nothing_outlives_a_flow_that_is_killed(tmp_path, who, number):
    toy = Toy(tmp_path)
    run, task = toy.until_training("run", "--set", "flow.stages.train.retries=0")
    there = [run.pid, *descendants(run.pid)]
    assert task in there
    os.kill(task if who == "step" else run.pid, number)
    out, err = run.communicate(timeout=60)
    until(lambda: all(map(is_gone, there)), seconds=10)
    assert run.returncode != 0
    assert "Traceback" not in out + err
    assert (tmp_path / "unwound").exists() is (number != signal.SIGKILL)
    if not (who == "run" and number == signal.SIGKILL):  # it cannot say anything then
        assert again(err)[:2] == ["resume", "--origin-run-id"]


def test_runs_are_found_by_their_tags_and_read_in_a_notebook(story):
    code = (
        "from metaflow import Flow, namespace; namespace(None); run = Flow('ToyFlow').latest_successful_run\n"
        "print(run.data.artifact.model, run.data.config['train']['lr'], "
        "run.id in [r.id for r in Flow('ToyFlow').runs('recipe:sft', 'data:chat')],"
        " list(Flow('ToyFlow').runs('recipe:dpo')))"
    )
    toy = story["toy"]
    done = run_python("-c", code, cwd=toy.directory, env=toy.env, timeout=120)
    assert done.stdout.split() == ["a-model", "0.5", "True", "[]"], done.stderr
