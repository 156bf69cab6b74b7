"""A job's tokenizer, with the chat template, template arguments and date of the job.

A template that renders today's date gives other ids tomorrow, so a run writes its first day to `date.json`, and every
stage and resume of the run reads it there.
"""

import contextlib
import datetime
import os
from pathlib import Path

from ptf import storage
from ptf.config.schema import Job
from ptf.data.added import tokenizer_of
from ptf.data.rendering import DATE_FUNCTION, Rendering
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model.model_files import locate
from ptf.workspace import scratch

DATE = "date.json"  # in the run's directory


def is_rendered_otherwise(job: Job, directory: str) -> bool:
    """Return whether the job changes how conversations are rendered, or a chat template among the tokenizer's files
    renders a date."""
    data, model, place = job.data, job.model, Path(directory)
    files = [*place.glob("*.jinja"), *place.glob("additional_chat_templates/*.jinja"), place / "tokenizer_config.json"]
    return bool(
        model.chat_template
        or model.template_args
        or data.response_rendering != "template"
        or data.omitted_context != "error"
        or data.consecutive_turns != "error"
        or any(DATE_FUNCTION in file.read_text() for file in files if file.is_file())
    )


def job_tokenizer(job: Job, run: Path | None, verify_up_to: float | None) -> Tokenizer:
    """Return the tokenizer of a resolved job's model, with the job's tokens, chat template and rendering (`rendered`).

    `verify_up_to`: as for `ptf.model.model_files.locate`, where the model's directory has the tokenizer.
    """
    path = job.model.tokenizer or str(locate(job.model.path, verify_up_to=verify_up_to))
    return rendered(job, tokenizer_of(path, job.model.tokens), run)


def rendered(job: Job, tokenizer: Tokenizer, run: Path | None) -> Tokenizer:
    """Give the tokenizer the job's chat template and rendering; it is changed in place and returned.

    `run`: the run's directory, in which the date is kept; without one, the date is today's or the job's. Raises
    UserError if the template cannot be read.
    """
    text = path = job.model.chat_template
    try:
        text = path and storage.read_text(path)
    except (storage.Missing, OSError, UnicodeDecodeError) as error:
        raise UserError(f"model.chat_template: {path} cannot be read: {error}") from None
    tokenizer.set_template(text, job.model.template_args)
    return with_run_rendering(job, tokenizer, run, served=job.data.response_rendering == "append")


def with_run_rendering(job: Job, tokenizer: Tokenizer, run: Path | None, served: bool = False) -> Tokenizer:
    """Give the tokenizer of any model of the run the run's date and context rules; its own template stays."""
    date = None
    if DATE_FUNCTION in str(tokenizer.hf.chat_template):
        date = job.data.date or (datetime.date.today().isoformat() if run is None else pinned_date(run))
    tokenizer.rendering = Rendering(date, served, job.data.omitted_context == "allow", job.data.consecutive_turns)
    return tokenizer


def pinned_date(run: Path) -> str:
    """Return the day on which the run began; the first call writes today's date."""
    file = run / DATE
    if not file.is_file():
        run.mkdir(parents=True, exist_ok=True)
        with scratch.file(file) as part:
            part.write_text(storage.record_text({"lineage": run.name, "date": datetime.date.today().isoformat()}))
            with contextlib.suppress(FileExistsError):
                os.link(part, file)  # fails if another process was first
    record = storage.read_record(
        str(file),
        "set data.date to the day on which the run began, if it is known; else remove the file and start a new run",
        {"lineage": run.name},
    )
    return str(record["date"])
