"""The documentation site: its pages exist, its API reference names modules, its command page is current."""

import importlib.util
import re
import runpy

import yaml

from tests.conftest import ROOT


def pages(nav: list | dict | str) -> list[str]:
    """Every page of a navigation."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav if isinstance(nav, list) else nav.values()) for page in pages(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = pages(config["nav"])
    assert sorted(named) == sorted(set(named))
    assert [page for page in named if not (ROOT / page).is_file()] == []
    written = {file.relative_to(ROOT).as_posix() for file in (ROOT / "docs").rglob("*.md")}
    assert written - set(named) == set()
    on_site = runpy.run_path(str(ROOT / "docs" / "site_files.py"))["paths"]()
    assert set(named) <= set(on_site)


def test_the_reference_names_modules() -> None:
    modules = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert "ptf.recipes.protocol" in modules
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_the_command_page_is_current() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "cli_reference.py"))["markdown"]()
    assert (ROOT / "docs" / "cli.md").read_text() == made, "run `make reference`"
