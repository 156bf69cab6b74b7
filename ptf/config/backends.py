"""What computes a model, by the name that `model.backend` gives it: where the code is, and what else knows the model.

To add one, add a module with `build` and `decoder_config` (ptf/model/backends.py) and an entry to `BACKENDS`. The
key's description (sections/model.py) says what it is for; `make reference` writes its values. It imports no torch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True)
class BackendFacts:
    """Where the code of a backend is, and what knows its models."""

    code: str  # the module that builds its models
    engine: str  # its native engine, as module:name
    kernels: bool  # whether its models are built with the kernels of `train.compile` and `train.fused`
    planned: bool  # whether `ptf plan` counts its memory, its operations and its time


BACKENDS = {
    "ptf": BackendFacts("ptf.model.bridge", "ptf.rl.engines.native:NativeEngine", kernels=True, planned=True),
    "hf": BackendFacts("ptf.model.hf_backend", "ptf.rl.engines.hf_native:HFNativeEngine", kernels=False, planned=False),
}

if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal[tuple(BACKENDS)]
