"""Figures in the documentation: each stands beside a link to a page of results, which names script, hardware and
date."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted(page.name for page in RESULTS.glob("*.md") if page.name != "README.md")
# pages of what is computed or listed on any machine
NOT_MEASURED = {
    "formats.md": "what is made of small data sets",
    "in_flight.md": "a simulated schedule",
    "plans.md": "bytes that are computed",
    "rehearsal.md": "counts on a pretend GPU",
    "roofline.md": "bounds that are computed",
}
UNDATED = {"formats.md", "roofline.md"}
# pages beside another library, which name its version and setting
BESIDE = {
    "async_peer.md",
    "dpo_step.md",
    "grpo_step.md",
    "kd_step.md",
    "packing.md",
    "rm_step.md",
    "train_step.md",
}
SCRIPT = re.compile(r"`(?:python (?:benchmarks/|-m tests\.)|make )[^`]*`|^ {4}python benchmarks/.*", re.MULTILINE)
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
HARDWARE = re.compile(r"^(?:Hardware[^:\n]*: |NVIDIA )", re.MULTILINE)
VERSION = re.compile(r"requirements-peers\.txt|\b(?:TRL|transformers|datasets) \d+\.\d+")
# how much faster or smaller something is, or how much of it there is in a second
FIGURE = re.compile(
    r"\b\d[\d,.]*\s?(?:times (?:as|below|faster|less|more|slower)|× (?:as|faster|slower)|% MFU"
    r"|(?:[\w-]+ )?(?:tokens|documents|rows|steps|samples|requests) (?:a|per) (?:CPU-)?second)"
)
LINK = re.compile(r"benchmarks/results/([\w-]+\.md)")


def commands(text: str) -> list[str]:
    """The commands that a page names, of Python or of make."""
    return [found.strip("` ") for found in SCRIPT.findall(text)]


def exists(command: str, targets: str) -> bool:
    """Whether the script or the targets of a command are in the repository."""
    program, *words = command.split()
    if program == "make":
        return all(re.search(rf"^{re.escape(word)}:", targets, re.MULTILINE) for word in words if "=" not in word)
    if words[0] == "-m":
        return (ROOT / words[1].replace(".", "/")).with_suffix(".py").exists()
    return (ROOT / words[0]).exists()


def faults_of_page(name: str, text: str, targets: str) -> list[str]:
    """What a page of results lacks."""
    named = commands(text)
    faults = [] if named else ["names no command"]
    faults += [f"{command}: not in the repository" for command in named if not exists(command, targets)]
    if name not in NOT_MEASURED and not HARDWARE.search(text):
        faults.append("names no hardware")
    if name not in UNDATED and not DATE.search(text):
        faults.append("names no date")
    if name in BESIDE and not VERSION.search(text):
        faults.append("names no version of what it is compared with")
    return faults


def blocks(text: str) -> list[str]:
    """The paragraphs, items and rows of tables of a document, without its examples."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.split(r"\n\s*\n|\n(?=\|)|\n(?=\s*[*-] )", prose)


def without_page(text: str) -> list[str]:
    """The figures of a document that stand in no paragraph with a link to a page that is there."""
    return [
        found[0]
        for block in blocks(text)
        for found in FIGURE.finditer(block)
        if not any((RESULTS / name).exists() for name in LINK.findall(block))
    ]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_results_names_command_hardware_and_date(name):
    faults = faults_of_page(name, (RESULTS / name).read_text(), (ROOT / "Makefile").read_text())
    assert faults == []


def test_what_a_page_lacks_is_found():
    targets = "bench-dpo: setup\n"
    assert faults_of_page("dpo_step.md", "# DPO", targets) == [
        "names no command",
        "names no hardware",
        "names no date",
        "names no version of what it is compared with",
    ]
    page = "Command: `make bench-dpo`\nHardware: a CPU\nDate: 2026-11-27\nTRL 1.16\n"
    assert faults_of_page("dpo_step.md", page, targets) == []
    other = page.replace("bench-dpo", "bench-none bench-dpo") + "`python benchmarks/none.py --rounds 3`"
    assert faults_of_page("dpo_step.md", other, targets) == [
        "make bench-none bench-dpo: not in the repository",
        "python benchmarks/none.py --rounds 3: not in the repository",
    ]


def test_every_page_is_listed():
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (RESULTS / "README.md").read_text()))
    assert listed == set(PAGES)


@pytest.mark.parametrize(
    "document", ["README.md", "CHANGELOG.md", *(f"docs/{page.name}" for page in sorted(ROOT.glob("docs/*.md")))]
)
def test_a_figure_stands_beside_its_page(document):
    assert without_page((ROOT / document).read_text()) == []


def test_a_figure_without_a_page_is_found():
    text = "It is 2.5 times as fast.\n\n| a | 38 % MFU |\n| b | 1,000 tokens per CPU-second |\n"
    assert without_page(text) == ["2.5 times as", "38 % MFU", "1,000 tokens per CPU-second"]
    linked = "It is 2.5 times as fast ([page](benchmarks/results/train_step.md)).\n\n```\n3 times as fast\n```\n"
    assert without_page(linked) == []
    assert without_page(linked.replace("train_step", "none")) == ["2.5 times as"]
