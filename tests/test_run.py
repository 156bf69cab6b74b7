"""`job.yaml` of a run: sealed by the run that wrote it, and compared with the job that continues the run."""

from pathlib import Path

import pytest

from ptf.config import Job, dump, load, loads
from ptf.errors import UserError
from ptf.run import read_job_file, write_job_file
from ptf.storage import Corrupt

SFT = "recipe: sft\nmodel: {path: m}\ndata: {sources: {a: {path: a.jsonl}}}\ntrain: {steps: 10, lr: 1e-4}\n"


def with_batches_of(sequences: int) -> Job:
    return loads(SFT, [f"train.global_batch_sequences={sequences}"])


def test_what_a_run_wrote_is_the_job(tmp_path: Path) -> None:
    job = with_batches_of(4)
    write_job_file(job, tmp_path)
    assert read_job_file(tmp_path) == dump(job)
    assert load(tmp_path / "job.yaml") == job
    assert load(tmp_path / "job.yaml", overrides=["train.steps=20"]).train.steps == 20


def test_a_job_file_that_was_changed_in_any_byte_is_refused(tmp_path: Path) -> None:
    write_job_file(with_batches_of(4), tmp_path)
    file = tmp_path / "job.yaml"
    text = file.read_text()
    above, _, seal = text.rstrip("\n").rpartition("\n")
    changed = [
        f"{text}\n",
        f"{text} ",
        text.rstrip("\n"),
        f"{above} \n{seal}\n",
        f"{above}\n\n{seal}\n",
        above,
        "",
        seal,
    ]
    for other in (
        *changed,
        text.replace("\n", "\r\n"),
        f"{text}{seal}\n",
        f"{seal}\n",
        text.replace("seed: 0", "seed: 1"),
    ):
        assert other != text
        file.write_bytes(other.encode())
        with pytest.raises(Corrupt, match="was changed after this run wrote it"):
            read_job_file(tmp_path)
    file.write_bytes(text.encode())
    assert read_job_file(tmp_path) == f"{above}\n"


def test_the_job_file_of_another_run_is_refused(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_job_file(with_batches_of(4), tmp_path / name)
    (tmp_path / "one" / "job.yaml").replace(tmp_path / "other" / "job.yaml")
    with pytest.raises(Corrupt, match="was changed after this run wrote it"):
        read_job_file(tmp_path / "other")


def test_fixed_keys_are_those_of_the_run_that_began(tmp_path: Path) -> None:
    job = with_batches_of(4)
    write_job_file(job, tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    longer = job.model_copy(update={"track": job.track.model_copy(update={"print_every": 7})})
    write_job_file(longer, tmp_path)
    assert read_job_file(tmp_path) == dump(longer)
    with pytest.raises(UserError, match=r"train\.global_batch_sequences: 4 → 16"):
        write_job_file(with_batches_of(16), tmp_path)


def test_a_start_that_made_nothing_does_not_fix_the_keys(tmp_path: Path) -> None:
    run, job, other = tmp_path / "run", with_batches_of(4), with_batches_of(16)
    write_job_file(job, run)
    (run / "lease.json").touch()
    write_job_file(other, run)
    assert read_job_file(run) == dump(other)
    (run / "start").mkdir()  # random weights of the job that was refused
    write_job_file(job, run)
    assert not (run / "start").exists()
    write_job_file(other, run)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"train\.global_batch_sequences: 16 → 4"):
        write_job_file(job, run)
