"""A job's tokenizer, rendering as the job says: its chat template, its arguments, and the date of the run.

The one idea: a template that renders today's date makes other ids tomorrow, so a run that begins writes the date down, and every stage and resume of it
reads that.
"""

import contextlib
import datetime
import os
from pathlib import Path

from ptf import scratch, storage
from ptf.config.schema import Job
from ptf.data.rendering import Rendering, renders_date
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError

DATE = "date.json"  # in the run's directory


def changes_rendering(job: Job) -> bool:
    """Whether the job says otherwise than the tokenizer how conversations are rendered."""
    data, model = job.data, job.model
    return bool(model.chat_template or model.template_args or data.render != "template" or data.unseen_context != "error")


def asks_date(directory: str) -> bool:
    """Whether the chat template among the files of a tokenizer renders a date."""
    files = [file for file in Path(directory).iterdir() if file.suffix == ".jinja" or file.name == "tokenizer_config.json"]
    return any(renders_date(file.read_text()) for file in files)


def rendered(job: Job, tokenizer: Tokenizer, run: Path | None) -> Tokenizer:
    """The tokenizer, changed in place. `run`: the run's directory, which has the date or gets it; without one, it is today's or the job's."""
    template = job.model.chat_template
    tokenizer.give_template(None if template is None else template_text(template), job.model.template_args)
    return in_run(job, tokenizer, run, served=job.data.render == "served")


def in_run(job: Job, tokenizer: Tokenizer, run: Path | None, served: bool = False) -> Tokenizer:
    """The tokenizer of any model of the run, with the template that it has: what the run says of dates and of context holds for it, too."""
    date = None
    if renders_date(tokenizer.hf.chat_template):
        date = job.data.date or (datetime.date.today().isoformat() if run is None else pinned_date(run))
    tokenizer.rendering = Rendering(date, served, job.data.unseen_context == "allow")
    return tokenizer


def template_text(path: str) -> str:
    try:
        return storage.read_text(path)
    except (storage.Missing, OSError, UnicodeDecodeError) as error:
        raise UserError(f"model.chat_template: {path} cannot be read: {error}") from None


def pinned_date(run: Path) -> str:
    """The day on which the run began: today's, where nothing in it has asked before."""
    file = run / DATE
    if not file.is_file():
        run.mkdir(parents=True, exist_ok=True)
        with scratch.file(file) as part:
            part.write_text(storage.record_text({"lineage": run.name, "date": datetime.date.today().isoformat()}))
            with contextlib.suppress(FileExistsError):
                os.link(part, file)  # whoever is first
    said = storage.record(str(file), "data.date says which day it was, if that is known; else remove it, and start a new run", {"lineage": run.name})
    return str(said["date"])
