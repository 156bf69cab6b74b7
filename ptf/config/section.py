"""Sections of a config: their base classes and the types that their keys have.
Algorithms' own keys depend on this file alone."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from ptf.config.schema import Job


def changeable(default: Any, **limits: Any) -> Any:
    """Declare a key that may differ between a checkpoint and the run that resumes it."""
    return Field(default, json_schema_extra={"resume": "changeable"}, **limits)


# what is said of a job that breaks a rule, a line that begins with the key to change → whether the job does
Rules = Mapping[str, object]
MOST = 10**15  # more of anything does not fit into the numbers that count it


Positive = Annotated[int, Field(gt=0, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


def _steps(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("steps_type", "expected a number of steps or a share of the run (0.1)")
    if isinstance(value, float) and not 0 < value < 1:
        raise PydanticCustomError("steps_share", "a share of the run lies between 0 and 1, steps are whole numbers")
    if value < 0:
        raise PydanticCustomError("greater_than_equal", "negative", {"ge": 0})
    if value > MOST:
        raise PydanticCustomError("less_than_equal", "too large", {"le": MOST})
    return value


# a number of steps, or a share of the run's steps
Steps = Annotated[
    int | float,
    PlainValidator(_steps),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}]}
    ),
]
Patterns = Annotated[list[str], Field(min_length=1)]  # of unified names
Temperature = Annotated[float, Field(ge=0.01, le=2)]  # what vLLM takes as it is


TRAIN_ON, DATE, WORD = r"^(assistant|last|all|field:.+)$", r"^\d{4}-\d\d-\d\d$", r"^\w+$"
INIT = r"^(mean|description|.+\.safetensors)$"
FORMS = {  # pattern of a key's text → what it accepts, in words
    TRAIN_ON: "assistant, last, all or field:NAME",
    DATE: "a date like 2026-01-31",
    INIT: "mean, description or a safetensors file",
    WORD: "letters, digits and underscores",
}


class Section(BaseModel):
    """Base of every section of a config: immutable, without unknown keys. Docstrings below fields document them."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values, which are not validated. Raises TypeError for a name that is no key."""
        if unknown := (update or {}).keys() - type(self).model_fields.keys():
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        return super().model_copy(update=update, deep=deep)


class Plugin(Section):
    """Anything of your own: `use: pkg.mod:name`, called with `args`."""

    use: str = Field(pattern=r"^[\w.]+:\w+$")
    """Where it is: importable module, colon, name."""
    args: dict[str, Any] = {}
    """Keyword arguments. A secret (`api_key`, `password`, …) is written as `env:NAME`,
    the environment variable that holds it."""


class AlgoConfig(Section):
    """Base of the keys of one algorithm, the section `algo`. What other parts must know of an algorithm before torch is
    imported stands here."""

    online: ClassVar[bool] = False
    """Whether it trains on what it generates, and so needs the section `rollout`."""
    held_out_metric: ClassVar[str] = "loss"
    """Name of its held-out loss, as in `loss/NAME`; the gate (ptf/evaluate/gate.py) compares it."""
    may_share_prefixes: ClassVar[bool] = False
    """Whether `data.share_prefixes` is implemented for it."""

    def model_paths(self) -> dict[str, str]:
        """Key (dotted, below `algo`) → value of each key that names a model to load."""
        return {}

    def config_rules(self, job: "Job") -> Rules:
        """Return the rules that involve this algorithm."""
        return {}

    def in_force(self, job: "Job") -> "AlgoConfig":
        """Return these keys, with `auto` replaced by what it is for the job."""
        return self
