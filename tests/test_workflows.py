"""Hosted workflows name what exists: targets of the Makefile, scripts of the checkout.
And what runs at night is what `make test-all` runs by hand."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def targets(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))


def commands(workflow: dict[str, Any]) -> list[str]:
    """Every command of its steps, once for each value of the job's matrix."""
    found = []
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for line in (line for step in job["steps"] for line in step.get("run", "").splitlines()):
            names = re.findall(r"\$\{\{ matrix\.(\w+) \}\}", line)
            values = matrix[names[0]] if names else [""]
            found += [re.sub(r"\$\{\{ matrix\.\w+ \}\}", value, line) for value in values]
    return found


def unknown(workflow: dict[str, Any], known: set[str]) -> list[str]:
    """Targets and scripts that it names and that are not there."""
    words = [command.split() for line in commands(workflow) for command in line.split("&&")]
    made = [word for line in words if line[0] == "make" for word in line[1:] if "=" not in word]
    scripts = [line[0] for line in words if "/" in line[0]]
    return [target for target in made if target not in known] + [
        script for script in scripts if not (ROOT / script).is_file()
    ]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_names_what_exists(file: Path) -> None:
    workflow = yaml.safe_load(file.read_text())
    known = targets((ROOT / "Makefile").read_text())
    assert commands(workflow)
    assert unknown(workflow, known) == []
    # negative control
    lost = yaml.safe_load(file.read_text().replace("make setup", "make nothing").replace(".ci/run", ".ci/walk"))
    assert unknown(lost, known) in (["nothing"], [".ci/walk"])


def test_test_all_is_the_night() -> None:
    night = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    said = re.search(r"^ALL := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert said is not None
    assert night["jobs"]["night"]["strategy"]["matrix"]["target"] == said[1].split()
    assert {"schedule", "workflow_dispatch"} == night[True].keys()  # YAML 1.1 reads `on` as true


def test_what_a_test_run_leaves_out_runs_at_night() -> None:
    """Each marker that plain `pytest` deselects has a target of the Makefile that selects it,
    and that target is in ALL."""
    makefile, settings = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    left_out = re.findall(r"not (\w+)", next(line for line in settings.splitlines() if line.startswith("addopts")))
    assert left_out
    for marker in left_out:
        named = re.search(
            rf"^([a-z0-9-]+):.*\n\t.*-m (?:{marker}|\"{marker} and not cluster\")$", makefile, re.MULTILINE
        )
        assert named is not None, marker
        assert named[1] in makefile.partition("ALL := ")[2].splitlines()[0].split()
