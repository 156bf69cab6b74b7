"""A key that nothing reads is a promise that nothing keeps: every leaf of the schema is an attribute access
somewhere."""

import ast
from pathlib import Path

from ptf.config.explain import keys, section_at
from ptf.config.schema import jobs
from ptf.config.section import Plugin

ROOT = Path(__file__).parents[2]
DECLARED_HERE = {
    *(ROOT / "ptf/config/sections").glob("*.py"),
    ROOT / "ptf/config/schema.py",
    ROOT / "ptf/config/reference.py",
}


def attributes(*folders: Path) -> set[str]:
    files = [file for folder in folders for file in folder.rglob("*.py") if file not in DECLARED_HERE]
    return {
        node.attr for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)
    }


def strings(file: Path) -> set[str]:
    """What a file that handles plain mappings looks up by name; its docstrings are sentences, not names."""
    return {
        node.value
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_every_key_is_read():
    read = attributes(ROOT / "ptf", ROOT / "steps", ROOT / "flows") | strings(ROOT / "flows" / "settings.py")
    leaves = {
        key for job in jobs().values() for key, field in keys(job) if section_at(field.annotation, []) in (None, Plugin)
    }
    assert len(leaves) > 60
    unread = sorted(key for key in leaves if key.rpartition(".")[2] not in read)
    assert not unread, f"declared in ptf/config/sections and read nowhere: {', '.join(unread)}"


def test_a_key_that_is_only_written_about_is_not_read(tmp_path):
    (tmp_path / "a.py").write_text(
        '"""job.train.lr"""\nrows = dict(steps=1)  # train.global_batch_sequences\nprint(rows.items)\n'
    )
    assert attributes(tmp_path) == {"items"}
