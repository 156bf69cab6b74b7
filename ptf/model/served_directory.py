"""The directories of a model that is to be used: those of its weights, its adapter and its tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptf.errors import UserError
from ptf.model import bridge
from ptf.model.adapter_directory import AdapterDirectory, is_adapter
from ptf.model.layers import LayerFactory
from ptf.model.scalar import CLASSIFIER


@dataclass(frozen=True)
class ServedDirectory:
    """A whole model, or an adapter with its base model."""

    base: Path  # config.json and the weights
    tokenizer: Path
    adapter: AdapterDirectory | None

    @classmethod
    def find(cls, where: str) -> "ServedDirectory":
        """Find a model by a directory, a directory of versions, a URI or a Hugging Face id, of a whole model or of an
        adapter in PEFT format. Raises UserError if there is none."""
        place = bridge.local_directory(where)
        adapter = AdapterDirectory.read(place) if is_adapter(place) else None
        base = bridge.locate(where) if adapter is None else base_of(adapter)
        return cls(base, place if (place / "tokenizer_config.json").is_file() else base, adapter)

    @property
    def scores(self) -> bool:
        """Return whether it is a classifier, such as a reward model, which generates nothing."""
        return any(CLASSIFIER in name for name in bridge.read_config(self.base).get("architectures") or ())

    def factory(self, own: LayerFactory | None = None) -> LayerFactory | None:
        """Return the layer factory that builds the model; `own` holds the user's components."""
        return self.adapter.factory(self.base, own) if self.adapter else own

    def fill(self, engine: Any) -> None:
        """Copy the adapter, if there is one, into an engine's model, which was built with `factory`."""
        if self.adapter:
            self.adapter.fill(engine.model)


def base_of(adapter: AdapterDirectory) -> Path:
    """Return the directory of an adapter's base model. Raises UserError, which names the adapter, if it is missing."""
    try:
        return bridge.locate(adapter.base)
    except UserError as error:
        reason = str(error).removeprefix("model.path: ")
        raise UserError(f"{adapter.directory} needs its base model {adapter.base}: {reason}") from None
