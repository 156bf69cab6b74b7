"""`ptf inspect`: the object that it prints, the page that it writes, and what it says of a config that cannot be."""

import gzip
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from ptf import api
from ptf.cli import main
from ptf.compute.tracking import read_metrics
from ptf.config import load
from ptf.data.chat import chat_samples
from ptf.data.tokenizer import Tokenizer
from ptf.inspection import opened
from ptf.inspection.terminal import show
from ptf.run import run
from tests.child import run_python
from tests.tiny import arithmetic, job_file, read_jsonl, write_jsonl

PLUGIN = """
import os

def prepare(directory):
    print("prepare prints")
    os.system("echo a child prints")
"""


@pytest.fixture
def job(tmp_path):
    """Write the tiny job, changed, to a file."""

    def job(**changes: object) -> str:
        raw = arithmetic(tmp_path, rows=20)
        for key, value in changes.items():
            raw[key] = {**raw[key], **value} if isinstance(value, dict) else value
        return job_file(raw, tmp_path)

    return job


def inspected(capfd, *arguments: str, status: int = 0) -> dict:
    capfd.readouterr()
    assert main(["inspect", *arguments, "--json"]) == status
    return json.loads(capfd.readouterr().out)


def test_samples_are_what_is_trained(job, tmp_path, capfd):
    found = inspected(capfd, job(), "--samples", "3")
    rows = read_jsonl(tmp_path / "train.jsonl")
    tokenizer = Tokenizer.load(str(tmp_path / "model"))
    assert [sample["place"] for sample in found["samples"]] == [
        f"{tmp_path / 'train.jsonl'}:{line}" for line in (1, 2, 3)
    ]
    for row, shown in zip(rows, found["samples"], strict=False):
        (expected,) = chat_samples(row["messages"], tokenizer)
        assert (shown["ids"], shown["weights"]) == (expected.tokens.tolist(), expected.loss_weights.tolist())
        assert shown["text"] == tokenizer.decode(expected.tokens)
        assert (shown["source"], shown["pair"]) == ("sums", None)
    assert found["sources"]["sums"]["rows"] == found["sources"]["sums"]["samples"] == 20
    assert found["expansion"] == 1.0
    assert (found["steps"], found["steps_exact"]) == (12, True)  # as configured: train.steps
    assert found["sources"]["sums"]["passes"] > 1


def test_the_answers_of_a_preference_share_a_pair(job, tmp_path, capfd):
    asked = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    path = str(write_jsonl(tmp_path / "p.jsonl", [asked, {**asked, "prompt": "2+0="}]))
    config = job(recipe="dpo", data={"sources": {"pairs": {"path": path}}, "validation": {}})
    found = inspected(capfd, config, "--samples", "2")
    assert [sample["pair"] for sample in found["samples"]] == [0, 0, 1, 1]
    assert [sample["text"][-11:-10] for sample in found["samples"]] == ["2", "3", "2", "3"]


def test_what_is_left_out_is_counted_by_its_reason(job, tmp_path, capfd):
    def chat(asked, said):
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}

    rows = [
        chat("1+1=", "2"),
        chat("1+1=", "2" * 90),
        {"messages": []},
        chat("2+2=", "4"),
        chat("x", "1"),
        chat("yy", "1"),
    ]
    rows[0]["note"] = "nothing reads it"
    path = str(write_jsonl(tmp_path / "bad.jsonl", rows))
    config = job(
        data={"sources": {"sums": {"path": path, "kind": "chat"}}, "too_long": "drop", "max_bad_rows_share": 0.01}
    )
    source = inspected(capfd, config)["sources"]["sums"]
    assert (source["rows"], source["samples"]) == (6, 2)
    assert sum(source["left_out"].values()) == 4
    assert [n for reason, n in source["left_out"].items() if "data.seq_len (64)" in reason] == [1]
    assert source["unused_rows_share"] == pytest.approx(4 / 6, abs=1e-6)
    assert source["columns_not_read"] == ["note"]
    page = tmp_path / "page.html"
    assert main(["inspect", config, "--html", str(page)]) == 0
    (row,) = (line for line in page.read_text().splitlines() if "sums" in line and " chat " in line)
    assert "66.7%" in row, "of the rows that were read gave no sample"
    assert "columns of sums that nothing reads: note" in page.read_text()


def test_bad_rows_that_would_stop_training_are_a_status(job, tmp_path, capfd):
    path = str(write_jsonl(tmp_path / "bad.jsonl", [{"messages": []}]))
    inspected(capfd, job(data={"sources": {"sums": {"path": path, "kind": "chat"}}}), status=1)


@pytest.mark.long
def test_nothing_else_is_printed(job, tmp_path):
    (tmp_path / "printing.py").write_text(PLUGIN)
    config = job(data={"prepare": {"use": "printing:prepare"}})
    done = run_python("-m", "ptf.cli", "inspect", config, "--json", check=True, cwd=tmp_path)
    assert set(json.loads(done.stdout)) >= {"sources", "expansion", "samples"}
    assert "prepare prints" in done.stderr
    assert "a child prints" in done.stderr


def test_a_config_that_cannot_be_is_its_errors(job, tmp_path, capfd):
    config = job(data={"seqlen": 3, "partitions": 0})
    found = inspected(capfd, config, status=2)
    assert set(found) == {"errors"}
    lines = {
        key: number
        for number, line in enumerate(Path(config).read_text().splitlines(), 1)
        for key in ("seqlen", "partitions")
        if f" {key}:" in line
    }
    assert {e["key"]: e["place"] for e in found["errors"]} == {
        f"data.{key}": f"{config}:{line}" for key, line in lines.items()
    }
    assert all(e["message"] for e in found["errors"])


def test_data_that_is_not_there_is_an_error(job, tmp_path, capfd):
    found = inspected(capfd, job(data={"sources": {"sums": {"path": str(tmp_path / "absent.jsonl")}}}), status=2)
    assert "absent.jsonl" in found["errors"][0]["message"]


def test_files_that_are_not_read_are_named(job, tmp_path, capfd):
    chats = read_jsonl(Path(job()).with_name("train.jsonl"))
    for name in ("train.jsonl", "test.jsonl", "dataset_infos.json"):
        write_jsonl(tmp_path / "set" / name, chats[:3])
    both = {"path": str(tmp_path / "set")}
    (error,) = inspected(capfd, job(data={"sources": {"sums": both}}), status=2)["errors"]
    assert "several splits: test (test.jsonl); train (train.jsonl)" in error["message"]
    one = {"path": f"{tmp_path / 'set'}::train"}
    source = inspected(capfd, job(data={"sources": {"sums": one}}))["sources"]["sums"]
    assert (source["rows"], source["not_read"]) == (3, ["dataset_infos.json", "test.jsonl"])


def test_the_page_is_whole_and_fetches_nothing(job, tmp_path, capfd):
    config = job()
    page = tmp_path / "page.html"
    assert main(["inspect", config, "--html", str(page)]) == 0
    text = page.read_text()
    assert not re.search(r"""(src|href)\s*=|@import|url\(""", text)
    first = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])["messages"]
    (green,) = re.findall(r"\.(r\d+) {[^}]*background-color: #008000}", text)
    assert (
        f"{first[0]['content']}&lt;|im_end|&gt;&lt;|im_start|&gt;&lt;|assistant|&gt;</span>"
        f'<span class="{green}">{first[1]["content"]}&lt;|im_end|&gt;</span>'
    ) in text
    # what a user wrote is text, not markup
    assert "<|" not in text


def test_check_says_passes_and_steps_where_that_is_cheap(job, tmp_path, capfd, monkeypatch):
    config = job()
    found = inspected(capfd, config)
    passes = found["sources"]["sums"]["passes"]

    def checked():
        return (main(["check", config]), capfd.readouterr().err)

    assert checked() == (0, f"check: passes over the data: sums {passes:.3g}; steps: {found['steps']}\n")
    monkeypatch.setattr(opened, "FEW_ROWS", 1)
    assert "(estimated)" in checked()[1]
    monkeypatch.setattr(opened, "MOST_BYTES", 10)
    assert "`ptf inspect` prints the number of passes" in checked()[1]


def test_passes_and_steps_are_those_of_the_run(job, tmp_path, capfd):
    """Sources of 7 and 60 rows, one epoch: each row comes once, and the run has as many steps as said."""
    job()
    rows = read_jsonl(tmp_path / "train.jsonl")
    sources = {
        "few": write_jsonl(tmp_path / "few.jsonl", rows[:7]),
        "many": write_jsonl(tmp_path / "many.jsonl", rows * 3),
    }
    config = job(
        train={"steps": None, "epochs": 1, "validate_every": 0},
        data={"sources": {n: {"path": str(p)} for n, p in sources.items()}, "validation": {}},
    )
    found = inspected(capfd, config)
    assert {name: source["passes"] for name, source in found["sources"].items()} == {"few": 1.0, "many": 1.0}
    assert {name: source["rows"] for name, source in found["sources"].items()} == {"few": 7, "many": 60}
    metrics = read_metrics(run(load(config), "run") / "metrics.jsonl")
    assert (found["steps"], found["steps_exact"]) == (len(metrics), True)


def test_a_compressed_source_may_have_a_row_count_and_a_limit(job, tmp_path, capfd):
    job()
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "train.jsonl").read_bytes()))
    source = {"path": str(packed), "row_count": 20, "limit": 5}
    config = job(data={"sources": {"packed": source, "plain": {"path": str(tmp_path / "train.jsonl")}}})
    found = inspected(capfd, config)["sources"]
    assert {name: found[name]["rows"] for name in found} == {"packed": 5, "plain": 20}


def test_trained_tokens_are_green_on_a_terminal_and_in_brackets_elsewhere(job):
    inspected = api.inspect(load(job()), samples=1)
    shown = {}
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=200, color_system="standard")
        show(inspected, console)
        shown[terminal] = console.file.getvalue()
    assert "trained tokens are green" in shown[True]
    assert "⟦" not in shown[True]
    assert "trained tokens are in ⟦ ⟧" in shown[False]
