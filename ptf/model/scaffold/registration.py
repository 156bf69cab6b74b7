"""Where a family's file belongs, and its line in `MODULES`."""

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path

from ptf.errors import UserError
from ptf.model import families

HERE = Path(families.__file__).parent
PROVISIONAL = "scaffold_"


def place_of(model_type: str) -> Path:
    """Return where the file is written without `--output`: among the families in a checkout, else here."""
    name = re.sub(r"\W", "_", model_type) + ".py"
    return HERE / name if (HERE.parents[2] / "pyproject.toml").is_file() else Path(name)


def raise_if_taken(model_type: str, file: Path, force: bool) -> None:
    """Raise UserError if a file would be replaced that is not to be, or if the family lies in another file."""
    other = families.MODULES.get(model_type)
    if is_family(file) and other is not None and other != file.stem:
        raise UserError(f"{model_type} is a family of {HERE / other}.py; --output writes another file")
    if file.exists() and not force:
        raise UserError(f"{file} exists; --force replaces it, --output writes another file")


def is_family(file: Path) -> bool:
    """Whether a file lies among the families of this ptf."""
    return file.resolve().parent == HERE.resolve()


def register(model_type: str, file: Path, registry: Path = HERE / "__init__.py") -> bool:
    """Add a family to MODULES, at its end, and return whether it was not there."""
    families.MODULES[model_type] = file.stem
    importlib.invalidate_caches()
    text = registry.read_text()
    head, start, rest = text.partition("MODULES = {")
    table, end, tail = rest.partition("\n}\n")
    if f'"{model_type}":' in table:
        return False
    registry.write_text(f'{head}{start}{table}\n    "{model_type}": "{file.stem}",{end}{tail}')
    return True


def is_provisional(file: str) -> bool:
    """Whether this is what a provisional family's text is called in a traceback."""
    return file.startswith(PROVISIONAL)


@contextmanager
def provisional(model_type: str, text: str) -> Iterator[None]:
    """Let a family's text be the family of its name, in this process and for a while."""
    name = PROVISIONAL + re.sub(r"\W", "_", model_type)
    spec = util.spec_from_loader(f"ptf.model.families.{name}", None)
    assert spec is not None
    module = util.module_from_spec(spec)
    before = dict(families.MODULES)
    exec(compile(text, name, "exec"), module.__dict__)
    sys.modules[spec.name] = module
    families.MODULES[model_type] = name
    try:
        yield
    finally:
        del sys.modules[spec.name]
        families.MODULES.clear()
        families.MODULES.update(before)
