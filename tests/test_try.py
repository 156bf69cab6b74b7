"""`ptf try`: what is played, what is found in it, and that it finds nothing where nothing is wrong."""

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

import ptf
from ptf.cli import main
from ptf.config.sections.model import ModelConfig
from ptf.data.character_tokenizer import character_tokenizer
from ptf.data.trajectory import Generation, NoResult, Prompt, Reward, Trajectory
from ptf.episode_preview import policies, terminal
from ptf.episode_preview.player import EpisodeTimes
from ptf.episode_preview.preview_job import differences, start_seconds, turns_of
from ptf.episode_preview.report import Preview, PreviewEpisode
from ptf.errors import UserError
from ptf.rl.engines.protocol import Request, Sampling, StreamingEngine, generate_all
from ptf.rl.engines.scripted import ScriptedEngine
from ptf.train.model_source import StartingModel
from ptf.workspace import progress
from tests.conftest import ROOT
from tests.tiny import arithmetic, job_file

Found = tuple[int, dict[str, Any]]


def tried(capfd: pytest.CaptureFixture[str], *arguments: str) -> Found:
    """Run the command with `--json`; return its exit status and the object."""
    status = main(["try", *arguments, "--json"])
    out = capfd.readouterr().out
    assert out.count("\n") == 1, "one object and nothing else"
    return status, json.loads(out)


def config(directory: Path, **rollout: Any) -> str:
    """Write a job on sums with this section `rollout`; return its path."""
    raw = arithmetic(directory) | {"recipe": "grpo"}
    raw["data"] = {"sources": {"sums": {"path": str(directory / "prompts.jsonl"), "kind": "prompt"}}, "seq_len": 64}
    raw["train"] = {"steps": 100, "lr": 1e-4, "precision": "fp32"}
    raw["rollout"] = {"engine": "native", "prompts_per_step": 4, "group_size": 4, "max_new_tokens": 12} | rollout
    return job_file(raw, directory)


def of_repository(name: str, directory: Path) -> str:
    """Write a config of the repository, and that of the job which makes its model, with outputs in `directory`."""
    raw = yaml.safe_load((ROOT / "configs" / name).read_text())
    first = raw["model"]["path"].removeprefix("job:")
    other = yaml.safe_load((ROOT / first).read_text()) | {"output": str(directory / "first")}
    (directory / "first.yaml").write_text(yaml.safe_dump(other))
    raw |= {"output": str(directory / "runs"), "model": {"path": f"job:{directory / 'first.yaml'}"}}
    return job_file(raw, directory)


def test_an_environment_is_played_by_echo_without_a_published_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, found = tried(capfd, of_repository("tiny/agent.yaml", tmp_path), "--episodes", "3")
    assert status == 0
    assert list(found)[:5] == ["episodes", "seconds", "rewards", "no_result", "repeatable"]
    assert (found["episodes"], found["rewards"], found["no_result"]) == (3, [0.5] * 3, [])
    assert found["repeatable"] is True
    assert found["differences"] == []
    assert found["policy"].startswith("echo, because")
    assert "first.yaml has published no model yet" in found["policy"]
    assert found["warnings"] == [
        "a response that repeats the last user message gets a reward above 0, which the policy may exploit: 3 of 3 "
        "episodes, up to 0.5"
    ]
    for episode in found["by_episode"]:
        (document,) = episode["documents"]
        assert [piece["sampled"] for piece in document] == [False, True, False, True]
        asked = episode["row"]["messages"][-1]["content"]
        assert [piece["text"] for piece in document if piece["sampled"]] == [f"{asked}<|im_end|>"] * 2
        assert len(episode["turns"]) == 2
    assert found["counts"]["responses"] == 6
    assert 0 < found["turn_seconds"]["median"] <= found["turn_seconds"]["max"]


def test_the_own_model_answers_where_it_has_weights(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = config(tmp_path, reward={"use": "ptf.rl.rewards:exact"})
    page = tmp_path / "page.html"
    status, own = tried(capfd, job, "--episodes", "4", "--html", str(page))
    assert status == 0
    assert (own["policy"].split()[:4], own["repeatable"]) == (["the", "job's", "own", "model"], True)
    assert len(own["rewards"]) == 4
    assert own["warnings"] == []
    assert len(re.findall(r"episode \d: sums, prompt \d", page.read_text())) == 4
    path = str(tmp_path / "model")
    section = ModelConfig(path=path, init="random")
    run = tmp_path / "run"
    start = StartingModel(section, tmp_path / "model", 1, tokenizer_path=path, run=run).with_weights()
    (run / "model").symlink_to(start.directory)
    (run / "job.yaml").touch()  # what makes it the directory of a run
    status, other = tried(capfd, job, "--episodes", "4", "--policy", str(run))
    assert (status, other["policy"]) == (0, f"the model {run}/model")
    texts = [[episode["documents"] for episode in found["by_episode"]] for found in (own, other)]
    assert texts[0] == texts[1]
    assert not list((tmp_path / "runs").rglob("*.safetensors")), "the weights that were drawn are removed"


@pytest.mark.parametrize(("seeded", "calls"), [(True, 0), (False, 3)])
def test_an_environment_repeats_if_its_randomness_is_from_the_seed(
    tmp_path: Path, seeded: bool, calls: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.001)
    environment = {"use": "tests.tried:Dice", "args": {"seeded": seeded}}
    trial = ptf.try_episodes(ptf.load(config(tmp_path, environment=environment)), 3, policy="echo")
    assert trial.repeatable is seeded
    assert len(trial.differences) == calls
    assert all("what the policy reads at call 2" in line for line in trial.differences)
    assert trial.rewards == [0.25] * 3
    assert len(trial.warnings) == 2, "it pays any answer, so also the empty one"
    assert re.search(r"progress: try, .* \d of 3 episodes, \d+ s", capsys.readouterr().out)


def test_a_harness_repeats_if_what_it_asks_is_a_function_of_its_seed(tmp_path: Path) -> None:
    for seeded in (True, False):
        harness = {"agent": {"use": "tests.tried:agent", "args": {"seeded": seeded}}}
        trial = ptf.try_episodes(ptf.load(config(tmp_path, harness=harness)), 2, policy="echo")
        assert trial.repeatable is seeded
        assert trial.counts["generations"] == 2


def test_the_calculators_agent_is_played_with_answers_by_turn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openai")
    job, answers, page = of_repository("agents/calculator.yaml", tmp_path), tmp_path / "answers.jsonl", tmp_path / "p"
    first = ptf.try_episodes(ptf.load(job), 2, policy="empty")
    assert (first.rewards, first.repeatable) == ([0.0, 0.0], True)
    capfd.readouterr()
    lines = []
    for episode in first.episodes:
        a, b = episode.prompt.row["messages"][-1]["content"].split("+")
        call = {"name": "add", "arguments": {"a": int(a), "b": int(b)}}
        lines.append(json.dumps([f"<tool_call>{json.dumps(call)}</tool_call>", "<script> &"]))
    answers.write_text("\n".join(lines))
    arguments = ("--episodes", "2", "--policy", str(answers), "--html", str(page))
    status, found = tried(capfd, job, *arguments)
    assert (status, found["rewards"], found["repeatable"]) == (0, [0.5, 0.5], True)
    assert (found["counts"]["generations"], found["counts"]["undelivered"]) == (4, 0)
    text = page.read_text()
    (green,) = re.findall(r"\.(r\d+) {[^}]*background-color: #008000}", text)
    assert f'<span class="{green}">&lt;script&gt; &amp;&lt;|im_end|&gt;</span>' in text
    assert "<script" not in text
    assert not re.search(r"(src|href)=|url\(|@import|http", text), "it loads nothing"


def test_a_reward_that_pays_an_empty_answer_is_warned_of(tmp_path: Path) -> None:
    trial = ptf.try_episodes(ptf.load(config(tmp_path, reward={"use": "tests.tried:pays_silence"})), 4, policy="echo")
    empty, repeated = trial.warnings
    assert empty == "an empty response gets a reward above 0, which the policy may exploit: 4 of 4 episodes, up to 1"
    assert repeated.startswith("a response that repeats the last user message gets a reward above 0, which")


def test_a_reward_reads_what_was_prepared(tmp_path: Path) -> None:
    reward = {"use": "tests.tried:paid_by", "args": {"path": "prepare:pay.json"}}
    job = ptf.load(config(tmp_path, reward=reward), ["data.prepare={use: 'tests.tried:prepares_pay'}"])
    trial = ptf.try_episodes(job, 2, policy="echo")
    assert trial.rewards == [0.5, 0.5]


def test_an_episode_that_does_not_end_has_no_result(tmp_path: Path) -> None:
    job = config(tmp_path, play={"use": "tests.tried:hangs_on_odd_prompts"}, episode_timeout_s=0.3)
    trial = ptf.try_episodes(ptf.load(job), 3, policy="echo")
    assert [episode.reward for episode in trial.episodes] == [1.0, None, 1.0]
    (line,) = trial.no_result
    assert line == "sums, prompt 1: the episode did not end within 0.3 s (rollout.episode_timeout_s)"
    assert (trial.has_result, trial.repeatable) == (True, True)


def test_rows_that_cannot_be_scored_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = config(tmp_path, reward={"use": "tests.tried:first_digit"}, reward_retries=0)
    status, found = tried(capfd, job, "--episodes", "12", "--policy", "empty")
    bad = [one for one in found["by_episode"] if one["row"]["answer"].startswith("3")]
    assert 0 < len(bad) < 12
    assert status == 0
    assert [one["no_result"] is not None for one in found["by_episode"]] == [one in bad for one in found["by_episode"]]
    for one, line in zip(bad, found["no_result"], strict=True):
        assert line.startswith(f"sums, prompt {one['prompt_index']}: ")
        assert f"no key for {one['row']['answer']}" in line
    assert len(found["rewards"]) == 12 - len(bad)
    assert found["repeatable"] is True
    job = config(tmp_path, reward={"use": "tests.tried:reads_nothing"}, reward_retries=0)
    assert main(["try", job, "--episodes", "2", "--policy", "empty"]) == 1
    out = capfd.readouterr().out
    assert "2 of 2 episodes have no result" in out
    assert "no key at all" in out
    assert "repeatable: not known" in out


def test_a_reward_of_groups_sees_whole_groups(tmp_path: Path) -> None:
    trial = ptf.try_episodes(ptf.load(config(tmp_path, reward={"use": "tests.tried:group_sizes"})), 6, policy="echo")
    assert trial.rewards == [4, 4, 4, 4, 2, 2]
    assert [episode.prompt.index for episode in trial.episodes] == [0, 0, 0, 0, 1, 1]


def test_what_cannot_be_played_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = config(tmp_path, reward={"use": "ptf.rl.rewards:exact"})
    (tmp_path / "bad.jsonl").write_text('["1"]\n{"answer": "1"}\n')
    (tmp_path / "letters.txt").write_text("letters\n")
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(arithmetic(tmp_path)))
    refused = {
        (job, "--policy", "nowhere"): "there is no file and no model nowhere",
        (job, "--policy", str(tmp_path / "bad.jsonl")): "bad.jsonl:2 is neither a string nor a list",
        (job, "--policy", str(tmp_path / "letters.txt")): "cannot encode all of 'letters'",
        (job, "--set", "rollout.reward_model={path: m}"): "does not load reward models",
        (str(tmp_path / "sft.yaml"),): "has no section rollout",
        (job, "--set", "model.path=./gone"): "there is no directory ./gone",
    }
    for arguments, message in refused.items():
        assert main(["try", *arguments, "--episodes", "1"]) == 2, arguments
        assert message in " ".join(capfd.readouterr().err.split())


def test_the_policy_is_echo_for_the_reason_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    file = config(tmp_path, reward={"use": "ptf.rl.rewards:exact"})
    reasons = {
        "has no weights": {"init": "pretrained"},
        "there is no directory": {"path": str(tmp_path / "gone")},
        "is not in the cache of this machine": {"path": "nobody/nothing-of-this-name"},
    }
    for reason, changes in reasons.items():
        keys = [f"model.{key}={value}" for key, value in changes.items()]
        found = policies.policy_of(ptf.load(file, overrides=keys), None)
        assert found.script is not None
        assert found.line.startswith("echo, because")
        assert reason in found.line
    assert policies.policy_of(ptf.load(file), None).script is None  # the control


def request(context: list[int], most: int = 50, seed: int = 0) -> Request:
    return Request(np.array(context, np.int32), Sampling(most, 1.0, ()), seed)


def test_a_scripted_engine_ends_each_answer(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("0123456789", tmp_path)
    (stop,) = tokenizer.stop_ids[:1]
    engine = ScriptedEngine(tokenizer, lambda seed, context: ["", "12", "1<|im_end|>2"][seed])
    assert isinstance(engine, StreamingEngine)
    requests = [request([5], seed=0), request([5], seed=1), request([5], seed=2), request([5], 2, seed=1)]
    found = generate_all(engine, requests, timeout_s=10)
    one, two = tokenizer.encode("1"), tokenizer.encode("2")
    assert [g.sampled_ids.tolist() for g in found] == [[stop], [*one, *two, stop], [*one, stop], [*one, *two]]
    assert [g.finished for g in found] == [True, True, True, False]


def test_the_last_user_message_is_found_in_what_real_templates_write(shared: Path, tmp_path: Path) -> None:
    tokenizer = character_tokenizer("0123456789", tmp_path)
    said = [("user", "Hello"), ("assistant", "Yes."), ("user", "Is it 3?\nOr 4?")]
    files = sorted((shared / "templates").glob("*.jinja"))
    for file in files:
        tokenizer.set_template(file.read_text(), {})
        echo = policies.echo(tokenizer)
        for turns in (said, said[:1]):
            text = tokenizer.render_text([{"role": role, "content": content} for role, content in turns], True)
            assert echo(0, 0, text) == turns[-1][1], file.name
    assert len(files) > 5
    tokenizer.set_template("{% for m in messages %}{{ m.content | upper }}{% endfor %}", {})
    assert policies.echo(tokenizer)(0, 0, "A CONTEXT") == "A CONTEXT"


def test_lines_of_a_file_are_the_answers_of_episodes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text('7\n["8"]\n')
    (tmp_path / "a.jsonl").write_text('"7"\n["8", "9"]\n')
    calls = [(episode, call) for episode in range(3) for call in range(3)]
    plain, by_turn = (policies.of_file(str(tmp_path / name)) for name in ("a.txt", "a.jsonl"))
    assert [plain(*place, "") for place in calls] == [*["7"] * 3, *['["8"]'] * 3, *["7"] * 3]
    assert [by_turn(*place, "") for place in calls] == [*["7"] * 3, "8", "9", "8", *["7"] * 3]
    (tmp_path / "none.txt").write_text("")
    with pytest.raises(UserError, match="no line"):
        policies.of_file(str(tmp_path / "none.txt"))


def test_times_of_turns_add_up_to_the_episode() -> None:
    times = EpisodeTimes(10.0, 17.0, asked={0: 11.0, 1: 14.0}, answered={0: 12.5, 1: 14.5})
    assert start_seconds(times) == 1.0
    assert [(turn.policy_seconds, turn.other_seconds) for turn in turns_of(times)] == [(1.5, 1.5), (0.5, 2.5)]
    assert start_seconds(times) + sum(turn.seconds for turn in turns_of(times)) == 7.0
    silent = EpisodeTimes(10.0, 17.0)
    assert (start_seconds(silent), turns_of(silent)) == (7.0, ())


def trajectory(*answers: int, context: int = 1, outcome: Reward | NoResult | None = None) -> Trajectory:
    def generation(i: int, answer: int) -> Generation:
        sampled, nothing = np.array([answer], np.int32), np.zeros(1, np.float32)
        return Generation(np.array([context, i], np.int32), sampled, nothing, sampled, True)

    prompt = Prompt(np.array([context], np.int32), {}, "a", 0)
    return Trajectory(prompt, tuple(generation(i, answer) for i, answer in enumerate(answers)), "", outcome)


def test_plays_of_unequal_numbers_of_episodes_are_not_compared() -> None:
    with pytest.raises(ValueError, match="shorter"):
        differences([trajectory(1), trajectory(2)], [trajectory(1)])


def test_the_first_difference_of_two_plays_is_named() -> None:
    failed = NoResult("late")
    compared = {
        "reads at call 1": (trajectory(1), trajectory(1, context=2)),
        "answers to the same text and seed, at call 2": (trajectory(1, 2), trajectory(1, 3)),
        "number of calls, 1 and 2": (trajectory(1), trajectory(1, 2)),
        "reward, 1.0 and 0.5": (trajectory(1, outcome=Reward(1.0)), trajectory(1, outcome=Reward(0.5))),
        "reward, 1.0 and no result": (trajectory(1, outcome=Reward(1.0)), trajectory(1, outcome=failed)),
    }
    for message, (one, other) in compared.items():
        (line,) = differences([one], [other])
        assert message in line
        assert differences([one], [one]) == []
    assert differences([trajectory(1, outcome=failed)], [trajectory(2, outcome=failed)]) == []


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_the_policy_said_is_marked_in_colour_or_by_brackets(is_terminal: bool) -> None:
    said = (("2+3=", 0.0), ("5", 1.0))
    prompt = Prompt(np.array([1], np.int32), {}, "sums", 0)
    episode = PreviewEpisode(prompt, None, "the \x1b[2J reward failed", True, 1.0, 0.5, (), (said,), {})
    preview = Preview("itself", (episode,), 1.0, 0.0, (), (), {}, ())
    out = io.StringIO()
    terminal.show(
        preview,
        Console(file=out, force_terminal=is_terminal, width=100, color_system="standard" if is_terminal else None),
    )
    text = out.getvalue()
    assert ("what the policy answered is green" in text) == is_terminal
    assert ("what the policy answered is in ⟦ ⟧" in text) == ("2+3=⟦5⟧" in text) == (not is_terminal)
    assert "repeatable: not known: no episode has a result" in text
