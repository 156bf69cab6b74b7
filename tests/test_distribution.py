"""What `python -m build` puts into the wheel, by the build backend's own list of files."""

import re
from pathlib import Path

from tests.child import run_python
from tests.conftest import ROOT

# runs in a process of its own: setuptools changes the current process when it is imported
LIST = """
from setuptools import Distribution
dist = Distribution()
dist.parse_config_files()
dist.script_name = "setup.py"
build = dist.get_command_obj("build_py")
build.ensure_finalized()
print("\\n".join(file for _, _, file in build.find_all_modules()))
print("\\n".join(f"ptf/{file}" for _, _, _, names in build.data_files for file in names))
"""


def listed(root: Path) -> list[str]:
    done = run_python("-c", LIST, cwd=root, timeout=120)
    assert done.returncode == 0, done.stderr
    return [Path(line).as_posix() for line in done.stdout.splitlines() if line]


def test_the_wheel_holds_ptf_alone_and_whole() -> None:
    """Packages called `steps` or `flows` at the top would collide with those of other projects."""
    there = [file.relative_to(ROOT).as_posix() for file in (ROOT / "ptf").rglob("*.py")]
    assert sorted(listed(ROOT)) == sorted([*there, "ptf/py.typed"])  # the marker: its annotations are for type checkers


def test_ptf_needs_nothing_that_the_wheel_lacks() -> None:
    imports = re.compile(r"^\s*(?:from|import) (steps|flows|tests|benchmarks)\b", re.MULTILINE)
    assert [file for file in (ROOT / "ptf").rglob("*.py") if imports.search(file.read_text())] == []
    assert imports.search((ROOT / "flows" / "sft_flow.py").read_text())  # negative control


def test_every_package_has_an_init() -> None:
    """Without one, setuptools leaves a directory out."""
    assert [file.parent for file in (ROOT / "ptf").rglob("*.py") if not (file.parent / "__init__.py").is_file()] == []
