"""The models of a backend (`model.backend`), by its name. `BACKENDS` (ptf/config/backends.py) says which there are."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ptf.config.backends import BACKENDS, BackendName
from ptf.model.config import DecoderConfig
from ptf.model.families import MODULES
from ptf.model.model import Model
from ptf.model.model_files import read_config


class Backend(Protocol):
    """A module that builds models.

    `build(directory, *, head=None, factory=None)` returns one of the right shape on the meta device (without memory).
    `head` is the kind of head; None takes that of the checkpoint. `factory` replaces components and adds adapters. It
    raises UserError for a model that cannot be trained, and for a replacement or an adapter that matches nothing.
    `decoder_config` returns the sizes of the model in a directory; weights are not read.
    """

    build: Callable[..., Model]
    decoder_config: Callable[[Path], DecoderConfig]


def backend_of(name: BackendName) -> Backend:
    """Return the backend of this name."""
    module: Any = importlib.import_module(BACKENDS[name].code)
    return module


def capable(directory: Path, preferred: BackendName) -> BackendName:
    """Return the backend that `preferred` names, or `hf` where ptf has not the family of the model in a directory."""
    return preferred if read_config(directory).get("model_type") in MODULES else "hf"
