"""Which runs a flow looks for when it is to continue under a name: one of them must have begun."""

import pytest

from flows.base import PostTrainFlow
from flows.sft_flow import SFTFlow
from flows.sft_then_rl_flow import SFTThenRLFlow
from flows.sweep_flow import SweepFlow
from ptf.config import loads
from ptf.errors import UserError
from ptf.run import raise_if_unknown_run

SFT = "recipe: sft\noutput: first\nmodel: {path: m}\ndata: {sources: {a: {path: a}}}\ntrain: {steps: 10, lr: 1e-4}\n"
SWEEP = "flow: {sweep: [{train.lr: 1.0}, {train.lr: 2.0}]}\n"


@pytest.mark.parametrize(
    ("flow_class", "text", "names"),
    [
        (SFTFlow, SFT, ["first/a"]),
        (SFTThenRLFlow, SFT.replace("first", "second"), ["second/a", "first/a-first"]),
        (SweepFlow, SFT + SWEEP, ["first/a-0", "first/a-1"]),
    ],
)
def test_a_flow_continues_what_it_began_under_the_name(flow_class, text, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PostTrainFlow, "_job", lambda _: loads(text))
    flow = object.__new__(flow_class)  # Metaflow's constructor reads the command line
    flow.first = SFT
    directories = flow._run_directories("a")
    assert [str(directory) for directory in directories] == names
    (tmp_path / "first" / "ab").mkdir(parents=True)
    (tmp_path / "first" / "ab" / "job.yaml").touch()
    for directory in directories:
        with pytest.raises(UserError, match="has no run of this name"):
            raise_if_unknown_run("a", directories)
        (directory / "job.yaml").parent.mkdir(parents=True)
        (directory / "job.yaml").touch()
        raise_if_unknown_run("a", directories)
        (directory / "job.yaml").unlink()
