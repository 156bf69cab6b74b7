"""The errors of a config."""

from collections.abc import Iterable

from ptf.config.tree import Problem
from ptf.errors import UserError


class ConfigError(UserError):
    """A config is invalid."""


class Problems(ConfigError):
    """All problems of a config. The message has one line for each, in the order of the files."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sorted(problems, key=lambda p: (p.place, p.key))
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple:  # unpickling an exception calls its class with these arguments
        return Problems, (self.problems,)
