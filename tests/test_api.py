"""The public API: each stage from a config to a published model, by the names that `import ptf` offers."""

import json
import re
import shutil
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ptf
from ptf import api, cli, storage
from ptf.compute.lease import RunInUse, hold_lease
from ptf.data.batch import Batch
from ptf.data.document import Document
from ptf.episode_preview.report import Preview
from ptf.errors import UserError
from ptf.evaluate.evaluation import evaluate_model
from ptf.inspection.report import Report
from ptf.model.model_directory import AdapterDirectory
from ptf.run import write_job_file
from ptf.serving.conversation import Chat
from ptf.storage import published_versions
from ptf.train.export import World, probe
from ptf.training_run import EVALUATED, Run
from tests.child import run_python
from tests.tiny import arithmetic, job_file

ROOT = Path(__file__).parents[1]


def config(directory: Path, **changes: Any) -> str:
    """Write the YAML of a job of three steps, and return its path."""
    raw = arithmetic(directory)
    raw["train"] |= {"steps": 3, "validate_every": 0, "lr": 1e-2}
    for key, value in changes.items():
        raw[key] = {**raw.get(key, {}), **value}
    return job_file(raw, directory)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> "ptf.Run":
    """A run that trained an adapter, and was evaluated."""
    directory = tmp_path_factory.mktemp("adapted")
    file = config(directory, model={"lora": {"rank": 4}}, publish={"gate": "off"})
    run = ptf.train(ptf.load(file), "adapted")
    ptf.evaluate(run)
    return run


def test_every_stage_from_a_config_to_an_answer(tmp_path: Path) -> None:
    job = ptf.load(config(tmp_path), overrides=["seed=7", "publish.gate=off"])
    assert job.seed == 7
    assert "steps: 3" in ptf.check(job)
    assert ptf.inspect(job, rows=10).survey.sources[0].counts["rows"] == 10
    run = ptf.train(job, "first")
    assert (run.name, run.checkpoints, run.metrics["train/step"]) == ("first", (3,), 3)
    assert run == ptf.Run.at(run.directory)
    metrics = ptf.evaluate(run)
    assert {"loss/held_out", "starting_model/loss/held_out"} <= metrics.keys()
    assert ptf.Run.at(run.directory).metrics == {**run.metrics, **metrics}
    version = ptf.publish(run)
    assert version == f"{job.versions}/first"
    manifest = storage.manifest_of(version)
    assert manifest["metrics"] == {**run.metrics, **metrics}, "of the evaluation that came after `train` returned"
    assert list(manifest["data"]) == ["sums"]
    answers = [ptf.chat(model, max_new_tokens=6, temperature=0.0).answer("1+2=") for model in (run, job, version)]
    assert answers[0] == answers[1] == answers[2]


def test_the_commands_do_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = config(tmp_path)
    run = tmp_path / "runs" / "a"
    assert cli.main(["train", file, "--run-name", "a"]) == 0
    assert cli.main(["publish", str(run), "--set", "train.lr=1"]) == 2
    assert "train.lr: 0.01 → 1" in capsys.readouterr().err
    assert cli.main(["evaluate", str(run)]) == 0
    assert re.search(r"evaluation +start +trained\n", capsys.readouterr().out)
    assert cli.main(["publish", str(run), "--set", "publish.gate=off", "--set", "publish.license=mit"]) == 0
    pointer = published_versions.pointer(str(tmp_path / "runs" / "published"))
    assert pointer is not None
    assert pointer.version == "a"
    assert cli.main(["publish", file, "--list"]) == 0
    assert capsys.readouterr().out.endswith("→ a\n")
    assert cli.main(["evaluate", str(run / "model"), "--config", file]) == 0
    table = capsys.readouterr().out
    loss = json.loads((run / EVALUATED).read_text())["metrics"]["loss/held_out"]
    assert f"{loss:.4f}" in table, "the same model by the same rows"
    assert "start" not in table
    assert not list((tmp_path / "runs").glob(".partial*"))


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_a_job_that_has_published_nothing_is_refused_with_what_publishes(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, config(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "nothing is published in" in told
    assert "run the job's flow, or publish a run of it (ptf publish RUN)" in told


def test_the_evaluation_of_a_model_is_checked_before_the_model_is_read(tmp_path: Path) -> None:
    job = ptf.load(config(tmp_path), overrides=["publish.metric=loss/other"])
    with pytest.raises(UserError, match=r"publish\.metric: .*loss/other"):
        evaluate_model(job, str(tmp_path / "no-model"))


@pytest.mark.parametrize("command", ["evaluate", "publish"])
def test_what_is_no_run_is_refused(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, str(tmp_path)]) == 2
    assert "is not the directory of a training run: it has no job.yaml" in capsys.readouterr().err
    with pytest.raises(UserError, match="is not the directory of a training run"):
        ptf.Run.at(tmp_path)


def test_a_run_that_has_not_ended_and_one_that_is_held_are_refused(tmp_path: Path) -> None:
    job = ptf.load(config(tmp_path))
    write_job_file(job, tmp_path / "runs" / "a")
    for stage in (ptf.evaluate, ptf.publish):
        with pytest.raises(UserError, match="has no trained model yet: ptf train"):
            stage(tmp_path / "runs" / "a")
    run = ptf.train(job, "a")
    with hold_lease(job, run.directory):
        for stage in (ptf.evaluate, ptf.publish):
            with pytest.raises(RunInUse):
                stage(run)


def test_an_evaluation_that_was_changed_is_not_published(tmp_path: Path) -> None:
    run = ptf.train(ptf.load(config(tmp_path)), "a")
    ptf.evaluate(run)
    file = run.directory / EVALUATED
    file.write_text(file.read_text().replace('"loss/held_out": ', '"loss/held_out": 1'))
    with pytest.raises(storage.Corrupt, match=r"evaluated.json is not as it was written"):
        ptf.publish(run)


@pytest.mark.parametrize("what", ["adapter", "both"])
def test_the_adapter_is_published_in_peft_format(adapted: "ptf.Run", tmp_path: Path, what: str) -> None:
    version = Path(ptf.publish(adapted, overrides=[f"publish.what={what}", f"publish.to={tmp_path}/{what}"]))
    adapter = version if what == "adapter" else version / "adapter"
    assert (version / "model.safetensors").exists() == (what == "both")
    stored = json.loads((adapter / "adapter_config.json").read_text())
    assert (stored["peft_type"], stored["r"]) == ("LORA", 4)
    told = [
        ptf.chat(place, max_new_tokens=8, temperature=0.0).answer("3+4=") for place in (adapted.model, version, adapter)
    ]
    assert told[0] == told[1] == told[2], "merged and beside the base model, the answers are the same"
    assert _logprobs(adapter) == pytest.approx(_logprobs(adapted.model), abs=1e-4)
    assert _logprobs(adapter) != pytest.approx(_logprobs(Path(stored["base_model_name_or_path"])), abs=1e-2)


def _logprobs(model: Path) -> list[float]:
    return probe(ptf.chat(model).engine.model.to(torch.float32), World())["logprobs"]


def test_peft_reads_the_adapter_as_ptf_does(adapted: "ptf.Run") -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    directory = AdapterDirectory.read(adapted.directory / "adapter")
    base = AutoModelForCausalLM.from_pretrained(directory.base, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, str(adapted.directory / "adapter"))
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    wanted = theirs(input_ids=ids).logits[0].log_softmax(-1)
    chat = ptf.chat(adapted.directory / "adapter")
    call = chat.engine.model
    batch = Batch.of([[(Document(ids[0].numpy().astype(np.int32), np.ones(6, np.float32), "a"),)]], 6)
    with torch.no_grad():
        logits = call(batch.tokens, batch.positions, batch.segments, lambda x, head: x @ head.weight.T)[0]
    found = logits[:, : wanted.shape[1]].float().log_softmax(-1)
    assert torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "does not read adapters with use_dora"),
        ({"peft_type": "LOHA"}, "does not read adapters with peft_type LOHA"),
        ({"bias": "all"}, "does not read adapters with bias all"),
        ({"rank_pattern": {"q_proj": 2}}, "does not read adapters with rank_pattern"),
        ({"base_model_name_or_path": "/nowhere/base"}, "needs its base model /nowhere/base: there is no directory"),
        ({"r": "many"}, "is not an adapter in PEFT format"),
    ],
)
def test_an_adapter_that_ptf_does_not_compute_is_refused_by_name(
    adapted: "ptf.Run", tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    copy = tmp_path / "adapter"
    storage.upload(adapted.directory / "adapter", str(copy))
    ptf.chat(copy)  # the control
    stored = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(stored | change))
    with pytest.raises(UserError, match=message):
        ptf.chat(copy)


def test_an_adapter_of_another_model_is_refused(adapted: "ptf.Run", tmp_path: Path) -> None:
    copy = tmp_path / "adapter"
    storage.upload(adapted.directory / "adapter", str(copy))
    tensors = load_file(copy / "adapter_model.safetensors")
    name = next(iter(tensors))
    tensors[name.replace("layers.0", "layers.9")] = tensors.pop(name)
    save_file(tensors, copy / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"does not fit the model in .*layers\.9\."):
        ptf.chat(copy)


def test_a_damaged_adapter_is_not_published(adapted: "ptf.Run", tmp_path: Path) -> None:
    copy = shutil.copytree(adapted.directory, tmp_path / "runs" / adapted.name)
    file = copy / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(file).items()}, file)
    with pytest.raises(UserError, match=r"adapter differs from the trained model"):
        ptf.publish(copy, overrides=["publish.what=both"])
    assert published_versions.pointer(str(tmp_path / "runs" / "published")) is None
    ptf.publish(copy)  # the control: the merged model is whole


def test_a_model_with_a_changed_file_is_not_published(adapted: "ptf.Run", tmp_path: Path) -> None:
    copy = shutil.copytree(adapted.directory, tmp_path / "runs" / adapted.name)
    file = copy / "model" / "config.json"
    whole = file.read_text()
    file.write_text(whole + "\n")  # which changes nothing that the model computes
    with pytest.raises(storage.Corrupt, match=r"config\.json"):
        ptf.publish(copy)
    assert published_versions.pointer(str(tmp_path / "runs" / "published")) is None
    file.write_text(whole)
    ptf.publish(copy)


def test_an_adapter_is_no_model_to_train_from(adapted: "ptf.Run", tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is an adapter and not a whole model"):
        ptf.train(ptf.load(config(tmp_path, model={"path": str(adapted.directory / "adapter"), "init": "pretrained"})))
    with pytest.raises(UserError, match=r"publish\.what  adapter needs model\.lora"):
        ptf.load(config(tmp_path), overrides=["publish.what=adapter"])
    added = ["publish.what=adapter", "model.lora={rank: 2}", "model.tokens={added: [<a>]}"]
    with pytest.raises(UserError, match=r"publish\.what  adapter publishes an adapter.* use merged"):
        ptf.load(config(tmp_path), overrides=added)


def test_importing_ptf_imports_nothing_heavy() -> None:
    code = (
        "import sys, ptf; assert ptf.__version__ and dir(ptf); print([m for m in sys.modules if "
        "m.partition('.')[0] in ('torch', 'pydantic', 'transformers', 'yaml', 'numpy', 'rich', 'ray')]); "
        "ptf.load; ptf.check; ptf.train; print([m for m in sys.modules if m.partition('.')[0] in ('torch', 'ray')])"
    )
    done = run_python("-c", code, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("[]\n[]\n", "")


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        ptf.trian  # type: ignore[attr-defined]  # noqa: B018


def test_train_is_the_function_and_the_package() -> None:
    import ptf.train.trainer

    assert ptf.train.trainer.Trainer  # type: ignore[attr-defined]
    assert callable(ptf.train)


@pytest.mark.parametrize("name", [name for name in ptf.__all__ if name != "__version__"])
def test_every_public_name_is_documented_and_typed(name: str) -> None:
    found = getattr(ptf, name)
    text = found.__call__.__doc__ if name == "train" else found.__doc__
    assert (text or "").strip().split("\n\n")[0].endswith("."), name
    if isinstance(found, type):
        return
    function = getattr(api, name)
    hints = typing.get_type_hints(function, localns={"Run": Run, "Chat": Chat, "Report": Report, "Preview": Preview})
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount]
    assert hints.keys() == {*parameters, "return"}
