"""A job's own chat template, its arguments and its date, from the config to what is exported."""

import datetime
from pathlib import Path

import pytest
import yaml

from ptf.config import Job, loads
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.model import model_writer
from ptf.train import job_tokenizer as module
from ptf.train.job_tokenizer import rendered
from ptf.train.model_source import StartingModel
from tests.tiny import arithmetic

CHAT = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
DATED = (
    "{{ strftime_now('%d-%m-%Y') }}{% for m in messages %}<|im_start|><|{{ m.role }}|>{{ m.content }}<|im_end|>{% "
    "endfor %}"
)


class Clock(datetime.date):
    now = "2026-02-03"

    @classmethod
    def today(cls) -> "Clock":
        return cls.fromisoformat(cls.now)


def tokenizer_of(job: Job, run: Path) -> Tokenizer:
    return StartingModel.of_job(job, run).load_tokenizer()


def job_of(tmp_path: Path, **keys: dict) -> Job:
    raw = arithmetic(tmp_path, rows=4)
    (tmp_path / "dated.jinja").write_text(DATED)
    for section, values in keys.items():
        raw[section] |= values
    return loads(yaml.safe_dump(raw))


def test_the_date_is_that_of_the_day_on_which_the_run_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.datetime, "date", Clock)
    job = job_of(tmp_path, model={"chat_template": str(tmp_path / "dated.jinja")})
    # as a flow tokenizes, before there is a run
    ahead = rendered(job, Tokenizer.load(job.model.path), tmp_path / "run")
    monkeypatch.setattr(Clock, "now", "2026-02-04")
    one, again = tokenizer_of(job, tmp_path / "run"), tokenizer_of(job, tmp_path / "run")
    assert one.render_text(CHAT, False) == again.render_text(CHAT, False) == ahead.render_text(CHAT, False)
    assert one.render_text(CHAT, False).startswith("03-02-2026<|im_start|>")
    assert one.identity == again.identity == ahead.identity
    other = tokenizer_of(job, tmp_path / "other")
    assert other.render_text(CHAT, False).startswith("04-02-2026<|im_start|>")
    with pytest.raises(UserError, match="rendered the date 2026-02-03, not 2026-02-04"):
        other.raise_if_different(one.identity, "the checkpoint")
    set_ = job_of(tmp_path, model={"chat_template": str(tmp_path / "dated.jinja")}, data={"date": "2024-12-31"})
    assert tokenizer_of(set_, tmp_path / "third").render_text(CHAT, False).startswith("31-12-2024<|im_start|>")


def test_a_job_that_changes_nothing_keeps_its_tokenizer_and_fingerprint(tmp_path: Path) -> None:
    job = job_of(tmp_path, data={"date": "2024-12-31"})  # its template renders none
    assert StartingModel.of_job(job, tmp_path / "run").tokenizer_path == job.model.path
    assert rendered(job, Tokenizer.load(job.model.path), None).identity == Tokenizer.load(job.model.path).identity


def test_what_is_exported_keeps_template_and_arguments_and_not_the_date(tmp_path: Path) -> None:
    template = tmp_path / "args.jinja"
    template.write_text(DATED + "{% if add_generation_prompt %}{{ '+' if enable_thinking else '-' }}{% endif %}")
    keys = {
        "chat_template": str(template),
        "template_args": {"enable_thinking": True},
        "init": "random",
        "tokens": {"added": ["<a>"]},
    }
    job = job_of(tmp_path, model=keys, data={"date": "2024-12-31", "response_rendering": "append"})
    start = StartingModel.of_job(job, tmp_path / "run")
    path, directory = start.tokenizer_path, start.directory
    tokenizer = Tokenizer.load(path)
    assert tokenizer.render_text(CHAT[:1], True).endswith("<|im_end|>+")
    assert tokenizer.rendering.served
    assert tokenizer.vocab_size == Tokenizer.load(job.model.path).vocab_size + 1
    model_writer.save_hf(iter(()), directory, tmp_path / "model", writes=True, tokenizer=path)
    served = Tokenizer.load(str(tmp_path / "model"))
    assert served.render_text(CHAT[:1], True).endswith("<|im_end|>+")
    assert served.render_text(CHAT[:1], True)[:10] == datetime.date.today().strftime("%d-%m-%Y")
    served.rendering = tokenizer.rendering
    assert served.identity == tokenizer.identity


def test_a_template_that_is_not_there_is_named(tmp_path: Path) -> None:
    job = job_of(tmp_path, model={"chat_template": str(tmp_path / "none.jinja")})
    with pytest.raises(UserError, match=r"model\.chat_template: .*none\.jinja cannot be read"):
        rendered(job, Tokenizer.load(job.model.path), None)
