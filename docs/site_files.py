"""Hook of mkdocs: which files of the repository the site is made of.

The one idea: every page keeps its place in the repository, so the links between README.md, docs/ and
benchmarks/results/ are the same on the site, on a code host and in an editor, and one check holds them all.
"""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (
    "*.md",
    "docs/**/*.md",
    "docs/**/*.svg",
    "benchmarks/results/*.md",
    "benchmarks/results/*.svg",
    "benchmarks/results/*.json",
    "benchmarks/results/*.jsonl",
    "benchmarks/*.yaml",
    "benchmarks/*.py",
    "configs/**/*.yaml",
    "examples/*.ipynb",
    "examples/*.py",
    "LICENSE",
)


def paths(root: Path = ROOT) -> list[str]:
    """Files of the site, named from the root of the repository."""
    return sorted({file.relative_to(root).as_posix() for pattern in PAGES for file in root.glob(pattern)})


def on_files(files: Any, config: Any) -> Any:
    """Put the repository's files in the place of those below `docs_dir`; files of the theme stay."""
    from mkdocs.structure.files import File

    for file in list(files):
        if file.abs_src_path and Path(file.abs_src_path).is_relative_to(ROOT / "docs"):
            files.remove(file)
    for path in paths():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files
