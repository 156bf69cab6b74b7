"""What `ptf scaffold` found, for people and for programs."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ptf.model.scaffold.nearest import Difference


@dataclass(slots=True)
class Unmapped:
    """A tensor of the checkpoint without a mapping."""

    name: str
    shape: tuple[int, ...]
    module: str  # transformers' class that holds it


@dataclass(slots=True)
class Findings:
    """The file, and what was found on the way."""

    model_type: str
    file: str
    registered: bool = False
    nearest: str = ""
    mapped: dict[str, str] = field(default_factory=dict)  # tensor of the checkpoint → ptf's
    unmapped: list[Unmapped] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)  # what ptf does not have
    settings: dict[str, str] = field(default_factory=dict)  # mapped: field → expression
    unread: dict[str, str] = field(default_factory=dict)  # setting → the value that is accepted, and what others do
    derived: list[str] = field(default_factory=list)
    chosen: dict[str, str] = field(default_factory=dict)  # by comparison
    differences: list[Difference] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON holds."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Yield the report, line by line."""
        yield f"{self.file}: written" + (", and a line in MODULES" if self.registered else "")
        yield f"nearest family: {self.nearest}"
        yield from _part("mapped:", (f"{theirs} → {ours}" for theirs, ours in self.mapped.items()))
        yield from _part("settings that are read:", (f"{name} = {value}" for name, value in self.settings.items()))
        yield from _part(
            "chosen because logits and gradients then agree (or the first of these, if none do):",
            (f"{name} = {value or 'no'}" for name, value in self.chosen.items()),
        )
        yield from _part(
            "settings that are not read; other values than these are refused:",
            (f"{name}: {text}" for name, text in self.unread.items()),
        )
        yield from _part("settings that follow from others, and are ignored:", self.derived)
        yield from _part(
            "tensors without a mapping:", (f"{one.name} {list(one.shape)} ({one.module})" for one in self.unmapped)
        )
        yield from _part("what ptf does not have, or the file does not say:", self.reasons)
        yield from _part(
            f"source in transformers that differs from {self.nearest}'s (-):",
            (line for one in self.differences for line in _difference(self.model_type, one)),
        )


def next_steps(model_type: str, file: str) -> Iterator[str]:
    """Yield what is left to do (docs/add_a_model.md explains each): the file or the page, and the command for it."""
    yield f"{file}: complete the docstring, map what published models set; ptf check-model {model_type} --configs 50"
    yield "ptf/model/families/__init__.py: a line in MODULES, which the scaffold writes"
    yield (
        "tests/model/mistakes.py: the likely mistakes; "
        f'pytest tests/model/test_verify.py -m "long or not long" -k {model_type}'
    )
    yield "tests/model/leakage.py: a Mixer in MIXERS; pytest tests/model/test_attention.py"
    yield (
        "tests/model/published_configs.py: settings and size of published models; "
        "pytest tests/model/test_published_configs.py"
    )
    yield (
        "benchmarks/results/vllm_families.jsonl, with vLLM: published settings in PUBLISHED of "
        f"benchmarks/vllm_families.py; python benchmarks/vllm_families.py --types {model_type}"
    )
    yield f"benchmarks/results/verify.md: a row; python benchmarks/verify.py --only {model_type}"
    yield "README.md, CHANGELOG.md: the family's name"


def _part(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield a title and its lines; nothing without lines."""
    for at, line in enumerate(lines):
        if at == 0:
            yield title
        yield f"  {line}"


def _difference(model_type: str, one: Difference) -> Iterator[str]:
    yield one.name + (f", in modular_{model_type}.py from {one.inherits}" if one.inherits else "")
    yield from (f"  {line}" for line in one.lines)
    if one.count > len(one.lines):
        yield f"  … {one.count - len(one.lines)} more"
