"""`ptf check` opens what a config names, and refuses with the words with which training would."""

import gc
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from ptf import cli
from ptf.config import loads
from ptf.errors import UserError
from ptf.model import hub
from ptf.run import run
from tests.tiny import arithmetic, checkpoint, configured, job_file, write_jsonl


def exact(row: dict, text: str) -> float:
    return float(text == row["answer"])


def broken(row: dict, text: str) -> float:
    raise ValueError("this reward is broken")


def untouched(row: dict, text: str) -> float:
    raise ValueError("it was called")


setattr(untouched, "called_by_check", False)  # noqa: B010


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    return arithmetic(tmp_path, rows=40)


def with_weights(raw: dict[str, Any]) -> Path:
    """Give the job's model weights."""
    directory = Path(raw["model"]["path"])
    config = json.loads((directory / "config.json").read_text())
    checkpoint(directory, vocab_size=config["vocab_size"])
    (directory / "config.json").write_text(json.dumps(config))
    raw["model"]["init"] = "pretrained"
    return directory


def online(raw: dict[str, Any], tmp_path: Path, use: str, **rollout: Any) -> dict[str, Any]:
    raw["recipe"] = "grpo"
    raw["data"] |= {"sources": {"sums": {"path": str(tmp_path / "prompts.jsonl"), "kind": "prompt"}}, "validation": {}}
    reward = {"reward": {"use": f"tests.test_touch:{use}"}} if use else {}
    raw["rollout"] = {"engine": "native", "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4, **reward}
    raw["rollout"] |= rollout
    raw["train"] |= {"validate_every": 0, "micro_batch_sequences": 1}
    return raw


def refusal(raw: dict[str, Any]) -> str:
    """Return the words with which training refuses a job."""
    with pytest.raises(UserError) as refused:
        run(loads(yaml.safe_dump(raw)), "a")
    words = str(refused.value)
    del refused  # its frames hold the process group, in a cycle
    gc.collect()
    return words


@pytest.fixture
def check(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Check a job, which must end with `status`; return what was said."""

    def checked(raw: dict[str, Any], *more: str, status: int = 0) -> str:
        ended = cli.main(["check", job_file(raw, tmp_path), *more])
        said = capfd.readouterr().err
        assert ended == status, said
        return said

    return checked


def quantised(directory: Path, method: str) -> None:
    configured(directory, quantization_config={"quant_method": method, "bits": 4})


def as_bin(directory: Path, _: str) -> None:
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def adapter(directory: Path, _: str) -> None:
    (directory / "config.json").rename(directory / "adapter_config.json")


def gguf(directory: Path, _: str) -> None:
    (directory / "config.json").unlink()
    (directory / "model.safetensors").rename(directory / "model.gguf")


def misshapen(directory: Path, _: str) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(3)
    tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


OF_MODELS = {
    "gptq": (quantised, "gptq"),
    "fp8": (quantised, "fp8"),
    "bin": (as_bin, ""),
    "adapter": (adapter, ""),
    "gguf": (gguf, ""),
    "misshapen": (misshapen, ""),
}


@pytest.mark.parametrize(
    ("fault", "backend"),
    [
        *((fault, "ptf") for fault in OF_MODELS),
        *(pytest.param(fault, "hf", marks=pytest.mark.long) for fault in OF_MODELS),
    ],
)
def test_a_model_that_training_refuses_is_refused_with_the_same_words(
    raw: dict[str, Any], check: Callable[..., str], fault: str, backend: str
) -> None:
    (spoil, argument), directory = OF_MODELS[fault], with_weights(raw)
    raw["model"]["backend"] = backend
    check(raw)  # the control
    spoil(directory, argument)
    assert check(raw, status=2).strip() == refusal(raw)


def test_a_tokenizer_that_the_model_has_no_rows_for_is_refused(raw: dict[str, Any], check: Any) -> None:
    configured(Path(raw["model"]["path"]), vocab_size=5)
    assert "has rows for 5 tokens" in check(raw, status=2)


@pytest.mark.parametrize("share", [0.0, 0.01])
@pytest.mark.parametrize("part", ["sources", "validation"])
def test_a_source_whose_every_row_is_refused_fails(
    raw: dict[str, Any], tmp_path: Path, check: Any, part: str, share: float
) -> None:
    rows = [{"question": f"{i}+1=", "answer": f"{i + 1}"} for i in range(20)]
    raw["data"][part] = {"gsm": {"path": str(write_jsonl(tmp_path / "gsm.jsonl", rows))}}
    raw["data"]["max_bad_rows_share"] = share
    said = check(raw, status=2)
    assert "gsm" in said
    assert "question" in said
    if part == "sources" and not share:
        # training reads the rows in another order
        assert re.sub(r":\d+ ", " ", refusal(raw)) == re.sub(r":\d+ ", " ", said.strip())


def test_one_bad_row_that_is_skipped_passes(raw: dict[str, Any], tmp_path: Path, check: Any) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"question": "1", "answer": "2"}\n' + file.read_text())
    raw["data"]["max_bad_rows_share"] = 0.01
    check(raw)


def test_bad_first_rows_of_a_longer_source_are_told(raw: dict[str, Any], tmp_path: Path, check: Any) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"question": "1", "answer": "2"}\n' * 35 + file.read_text())
    raw["data"] |= {"max_bad_rows_share": 0.5}
    assert "data.sources.sums: the first 32 rows are all bad" in check(raw)


def test_names_of_sources_may_have_dots(raw: dict[str, Any], tmp_path: Path, check: Any) -> None:
    raw["data"]["validation"] = {"held.out": raw["data"]["validation"]["held_out"]}
    raw["evaluate"] = {
        "sources": {"sums.test": {"path": str(tmp_path / "prompts.jsonl"), "kind": "prompt"}},
        "reward": {"use": "tests.test_touch:exact"},
    }
    assert "exact gives an empty response 0" in check(raw)
    online(raw, tmp_path, "exact", max_new_tokens=raw["data"]["seq_len"] - 2)
    raw["data"]["sources"] = {"sums.train": raw["data"]["sources"]["sums"]}
    assert "sums.train" in check(raw, status=2)


def test_what_nothing_reads_of_held_out_data_is_told(raw: dict[str, Any], tmp_path: Path, check: Any) -> None:
    rows = [json.loads(line) | {"note": 1} for line in (tmp_path / "held_out.jsonl").read_text().splitlines()]
    write_jsonl(tmp_path / "held_out.jsonl", rows)
    assert "data.validation.held_out: nothing reads note" in check(raw)


def test_code_that_a_key_does_not_know_is_told(
    raw: dict[str, Any], tmp_path: Path, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import importlib\nimportlib.import_module('json')\nfrom ptf.recipes.sft.recipe import SFT as Mine\n"
    (tmp_path / "of_mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    raw["recipe"] = {"use": "of_mine:Mine"}
    assert "of_mine.py:2 imports a module by a name that is computed" in check(raw)


def test_a_model_in_the_cache_of_the_hub_is_looked_at(
    raw: dict[str, Any], tmp_path: Path, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = with_weights(raw)
    monkeypatch.setattr(hub, "cached", lambda path: directory if path == "me/tiny" else None)
    raw["model"]["path"] = "me/tiny"
    assert "not looked at" not in check(raw)
    quantised(directory, "gptq")
    check(raw, status=2)


def test_prompts_are_rendered_for_evaluation_and_rollouts(raw: dict[str, Any], tmp_path: Path, check: Any) -> None:
    online(raw, tmp_path, "exact")
    check(raw)
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"question": "1+1=", "answer": "2"}])
    refused = {"sources": {"test": {"path": str(bad), "kind": "prompt"}}}
    for change in ({"evaluate": refused}, {"data": raw["data"] | refused}):
        assert "a prompt row needs" in check(raw | change, status=2)


def test_a_reward_is_called_unless_it_says_no(raw: dict[str, Any], tmp_path: Path, check: Any) -> None:
    said = check(online(raw, tmp_path, "exact"))
    assert "exact gives an empty response 0, one that repeats the prompt 0" in said
    said = check(online(raw, tmp_path, "broken"))  # it may score other responses
    assert "broken gives an empty response no result" in said
    assert "this reward is broken" in said
    assert "untouched is not called by check" in check(online(raw, tmp_path, "untouched"))
    request = {"use": "ptf.rl.rewards:http", "args": {"url": "http://127.0.0.1:9/"}}
    parts = {"use": "ptf.rl.rewards:weighted", "args": {"parts": [request]}}
    for reward in (request, parts):
        assert "it sends requests" in check(online(raw, tmp_path, "", reward=reward))


def test_what_is_not_here_is_named(raw: dict[str, Any], check: Any) -> None:
    raw["model"] |= {"path": "some one/model", "init": "pretrained"}
    assert "not looked at: model.path (some one/model)" in check(raw, "--skip-paths")
    raw["model"]["path"] = "someone/model"
    raw["data"]["validation"]["held_out"]["path"] = "s3://bucket/held_out.jsonl"
    expected = "not looked at: data.validation.held_out (s3://bucket/held_out.jsonl), model.path (someone/model);"
    assert expected in check(raw)


def test_samples_that_are_longer_than_the_model_are_told(
    raw: dict[str, Any], tmp_path: Path, check: Any, capfd: Any
) -> None:
    assert "max_position_embeddings" not in check(raw)
    configured(Path(raw["model"]["path"]), max_position_embeddings=8)
    assert "beyond the 8 positions" in check(raw)
    raw["train"]["steps"] = 2
    raw["train"]["validate_every"] = 0
    run(loads(yaml.safe_dump(raw)), "a")
    assert capfd.readouterr().out.count("beyond the 8 positions") == 1


def test_a_warm_up_that_is_longer_than_the_epochs_is_refused(raw: dict[str, Any], tmp_path: Path, check: Any) -> None:
    raw["train"] |= {"steps": None, "epochs": 1, "warmup_steps": 100}
    rule = "together are longer than the run"
    assert rule in check(raw, status=2)
    assert rule in refusal(raw)
    raw["train"]["warmup_steps"] = 0.1
    check(raw)


def test_a_weight_that_the_standard_deviation_divides_out_is_told(
    raw: dict[str, Any], tmp_path: Path, check: Any
) -> None:
    by_source = {"sums": {"use": "tests.test_touch:untouched", "weight": 0.01}}
    online(raw, tmp_path, "", reward=by_source)
    assert "rollout.reward.sums.weight: 0.01 has no effect" in check(raw)
    raw["algo"] = {"scale_by_std": False}
    assert "has no effect" not in check(raw)


def test_a_run_without_a_step_takes_another_config(raw: dict[str, Any], tmp_path: Path) -> None:
    good = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text('{"question": "1", "answer": "2"}\n')
    assert "question" in refusal(raw)
    write_jsonl(tmp_path / "other.jsonl", [json.loads(line) for line in good.splitlines()])
    raw["data"]["sources"] = {"sums": {"path": str(tmp_path / "other.jsonl")}}
    raw["seed"] = 5
    raw["train"] |= {"steps": 1, "validate_every": 0}
    run(loads(yaml.safe_dump(raw)), "a")
    raw["seed"] = 6
    assert "seed: 5 → 6" in refusal(raw)  # the control


def test_plan_takes_the_workers_of_the_config(
    raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw["compute"] = {"workers": 2}
    file = job_file(raw, tmp_path)
    assert cli.main(["plan", file]) == 0
    assert "2 GPUs" in capsys.readouterr().out
    assert cli.main(["plan", file, "--workers", "1"]) == 0
    assert "1 GPUs" in capsys.readouterr().out
