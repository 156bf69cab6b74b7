"""The cards of an SFT and a GRPO run as a browser shows them, with no network."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.flows.toy import ROOT, Toy
from tests.tiny import arithmetic, online

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OFFLINE = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    "--virtual-time-budget=20000",
)
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: chromium)")]


@pytest.fixture(scope="module", params=["sft", "grpo"])
def pages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Of each card the page as Chromium has drawn it, and what its console said."""
    directory = tmp_path_factory.mktemp(request.param)
    raw = arithmetic(directory)
    prompts = {"path": str(directory / "prompts.jsonl"), "kind": "prompt"}
    raw["train"] |= {"steps": 4, "validate_every": 2 if request.param == "sft" else 0}
    raw |= {
        "evaluate": {
            "sources": {"test": prompts},
            "reward": {"use": "ptf.tasks.arithmetic:exact"},
            "limit": 4,
            "samples_per_prompt": 2,
            "max_new_tokens": 4,
        }
    }
    if request.param == "grpo":
        raw = online(raw, directory, "ptf.tasks.arithmetic:exact", prompts_per_step=2, max_new_tokens=4)
        raw["track"]["samples_every"] = 1
    (directory / "job.yaml").write_text(yaml.safe_dump(raw))
    (directory / "flow").mkdir()
    toy, flow = Toy(directory / "flow"), ROOT / "flows" / f"{request.param}_flow.py"
    done = toy("run", "--config", str(directory / "job.yaml"), flow=flow)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = re.findall(r"run-id (\d+)", done.stdout)
    drawn = {}
    for name in ("train", "evaluate", "publish"):
        file = directory / f"{name}.html"
        got = toy("card", "get", "--id", name, f"{run}/{name}", str(file), flow=flow)
        assert file.exists(), got.stderr
        drawn[name] = browsed(file, directory / "profile")
    return drawn


def browsed(file: Path, profile: Path) -> tuple[str, str]:
    line = [str(CHROMIUM), *OFFLINE, f"--user-data-dir={profile}", "--dump-dom", file.as_uri()]
    shown = subprocess.run(line, capture_output=True, text=True, timeout=180)
    assert shown.returncode == 0, shown.stderr[-2000:]
    console = "\n".join(row for row in shown.stderr.splitlines() if ":CONSOLE" in row)
    return shown.stdout, console


@pytest.mark.parametrize("name", ["train", "evaluate", "publish"])
def test_no_page_has_an_error_on_its_console(pages, name):
    _, console = pages[name]
    assert not re.search(r"error|uncaught|refused|failed", console, re.IGNORECASE), console


def test_the_charts_of_training_have_lines_in_them(pages):
    page, _ = pages["train"]
    lines = re.findall(r'<path aria-label="[^"]*"[^>]* d="M[^"]*L[^"]*"|<path[^>]*d="M[-\d.,]+L[^"]*"', page)
    assert len(lines) >= 4, "loss or reward, gradients, rate, seconds"
    assert "step 4 of 4" in page


def test_answers_and_gates_are_on_their_pages(pages):
    evaluated, published = pages["evaluate"][0], pages["publish"][0]
    assert "greedy_pass_rate/test" in evaluated
    assert "at the start" in evaluated
    assert "Publish checks passed" in published
    assert "vllm serve" in published
