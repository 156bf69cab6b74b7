"""Optional packages that adapters of libraries need."""

import importlib.util

from ptf.errors import UserError


def raise_if_missing(package: str, extra: str) -> None:
    """Raise UserError with the command that installs the package, if it is missing. The package is not imported."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"the package {package} is not installed: pip install 'ptf[{extra}]'")
