"""How a model is served."""

from dataclasses import dataclass
from typing import Literal

LONGEST = 8192  # tokens of a context with its response, unless another limit is given; the caches grow with it


@dataclass(frozen=True)
class ServingOptions:
    """How a model is served."""

    engine: Literal["native", "vllm"] = "native"
    max_length: int | None = None  # tokens of a context with its response; None: the model's limit, at most LONGEST
    max_new_tokens: int = 1024  # of a response whose request gives no limit
    max_running: int = 128  # responses that are sampled at a time
    catalogue: str | None = None  # of items to rank; None: that of the run's `evaluate.ranking`
    beam: int = 100  # beginnings of items that are kept on each level
