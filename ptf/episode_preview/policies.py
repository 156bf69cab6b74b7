"""The policy of a preview: the model that the job begins with, another model, or a script, which answers nothing, the
last user message, or the lines of a file."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ptf import storage
from ptf.config import Job, load
from ptf.data.added import add, tokenizer_of
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model import hub, model_files
from ptf.run import resolved, unpublished
from ptf.storage.hub import at_revision
from ptf.train.job_tokenizer import rendered

Script = Callable[[int, int, str], str]  # (number of the episode, number of the call, text of the context) → response
MARKS = ("zqxj", "jxqz", "qjzx")  # the contents of the probes: letters that no template writes
ANSWERS = {"echo": "it repeats the last user message", "empty": "it answers nothing"}


@dataclass(frozen=True)
class PreviewPolicy:
    """The policy of a preview, and the job with the paths that it needs."""

    job: Job  # its section `model` loads the policy, or, with a script, names the tokenizer
    line: str  # what the policy is, in words
    script: Callable[[Tokenizer], Script] | None = None  # None: the model


def policy_of(job: Job, named: str | None) -> PreviewPolicy:
    """Return the policy that is named: `echo`, `empty`, a file of responses, or a model; None is the job's own model,
    or `echo` if its weights are not on this machine. Raises UserError if there is no such policy.

    A model is a directory, the directory of a run, a directory of versions, the YAML of a job that has published one, a
    URI or a Hugging Face id. `data.prepare` runs if its output does not exist.
    """
    if named in SCRIPTS:
        return PreviewPolicy(resolved(job, complete=False), f"{named}: {ANSWERS[named]}", SCRIPTS[named])
    if named is not None and os.path.isfile(named) and not named.endswith((".yaml", ".yml")):
        script = of_file(named)
        return PreviewPolicy(resolved(job, complete=False), f"the responses of {named}", lambda _: script)
    if named is not None:
        other = _with_model(job, named)
        return PreviewPolicy(other, f"the model {other.model.path}")
    job = resolved(job, complete=False)
    if reason := _why_not_own(job):
        return PreviewPolicy(job, f"echo, because {reason}: {ANSWERS['echo']}", echo)
    drawn = " with random weights" if job.model.init == "random" else ""
    return PreviewPolicy(job, f"the job's own model {job.model.path}{drawn}")


def _with_model(job: Job, named: str) -> Job:
    if named.endswith((".yaml", ".yml")):
        named = load(named).versions
    elif os.path.isfile(Path(named) / "job.yaml"):
        named = str(Path(named) / "model")
    elif not os.path.exists(named) and "://" not in named and not (_is_hub_id(named) and "/" in named):
        raise UserError(f"--policy: there is no file and no model {named}; without either: {', '.join(SCRIPTS)}")
    whole = {"backend": "ptf", "init": "pretrained", **dict.fromkeys(("tokenizer", "tokens", "lora", "trainable"))}
    model = job.model.model_copy(update={"path": named, **whole})
    return resolved(job.model_copy(update={"model": model}), complete=False)


def _why_not_own(job: Job) -> str | None:
    """Return why the job's own model cannot answer here; None if it can."""
    path = job.model.path
    if config := unpublished(job, {}).get("model.path"):
        return f"{config} has published no model yet"
    if "://" in path:
        return None  # it is copied, as for a run
    if os.path.isdir(path):
        directory = model_files.local_directory(path, verify_up_to=None)
        there = job.model.init == "random" or any(directory.glob("*.safetensors"))
        return None if there else f"{path} has no weights"
    if not _is_hub_id(path):
        return f"there is no directory {path}"
    missing = f"{path} is not in the cache of this machine (--policy {path} downloads it)"
    return missing if hub.cached(path) is None else None


def _is_hub_id(path: str) -> bool:
    is_place = os.path.isdir(path) or "://" in path or path.startswith((".", "/", "~"))
    return at_revision(path)[0].count("/") <= 1 and not is_place


def tokenizer_without_model(job: Job) -> Tokenizer:
    """Return the tokenizer of a job whose model need not exist.

    If another job makes the model and has not published it, its tokenizer is that of the model which that job begins
    with.
    """
    config = unpublished(job, {}).get("model.path")
    if job.model.tokenizer is None and config is not None:
        tokenizer = tokenizer_without_model(resolved(load(config), complete=False))
        if job.model.tokens is not None:
            add(tokenizer, job.model.tokens)
    else:
        path = job.model.tokenizer or job.model.path
        if not _is_hub_id(path):
            path = str(model_files.local_directory(path, verify_up_to=None))
        tokenizer = tokenizer_of(path, job.model.tokens)
    return rendered(job, tokenizer, None)


def empty(_tokenizer: Tokenizer) -> Script:
    """Return the script that answers nothing."""
    return lambda _episode, _call, _context: ""


def echo(tokenizer: Tokenizer) -> Script:
    """Return the script that repeats the last user message; of a context without one, the whole context."""
    opening, closing = user_markers(tokenizer)

    def repeat(_episode: int, _call: int, context: str) -> str:
        if not opening or opening not in context:
            return context
        return context.rpartition(opening)[2].partition(closing)[0] if closing else context.rpartition(opening)[2]

    return repeat


def user_markers(tokenizer: Tokenizer) -> tuple[str, str]:
    """Return what the chat template writes before and after a user message; empty without a chat template."""
    if not tokenizer.hf.chat_template:
        return "", ""
    first, second, third = MARKS
    turns = {first: "user", second: "assistant", third: "user"}
    text = tokenizer.render_text([{"role": role, "content": mark} for mark, role in turns.items()], True)
    if any(text.count(mark) != 1 for mark in MARKS):
        return "", ""  # the template does not write the messages as they are
    before, rest = text.split(first)
    after_first, rest = rest.split(second)
    before_third, after_third = rest.split(third)
    common = os.path.commonprefix  # of texts, not of paths
    return common([before[::-1], before_third[::-1]])[::-1], common([after_first, after_third])


def of_file(path: str) -> Script:
    """Return the script of a file: a line is the responses of one episode, and the lines are repeated.

    A line is one response, which is given in every turn. In a file `.jsonl` a line is JSON: such a response as a
    string, or a list of strings, the responses by turn, repeated. Raises UserError for a file that is not so.
    """
    try:
        lines = storage.read_text(path).splitlines()
    except (storage.Missing, OSError, UnicodeDecodeError) as error:
        raise UserError(f"--policy: {path} cannot be read: {error}") from None
    if not lines:
        raise UserError(f"--policy: {path} has no line, and so no response")
    is_json = path.endswith(".jsonl")
    answers = [_answers(line, f"{path}:{n}") if is_json else [line] for n, line in enumerate(lines, 1)]

    def recite(episode: int, call: int, _context: str) -> str:
        turns = answers[episode % len(answers)]
        return turns[call % len(turns)]

    return recite


def _answers(line: str, where: str) -> list[str]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(f"--policy: {where} is not JSON: {error}") from None
    answers = [value] if isinstance(value, str) else value
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise UserError(f"--policy: {where} is neither a string nor a list of strings, the responses by turn")
    return answers


SCRIPTS = {"echo": echo, "empty": empty}
