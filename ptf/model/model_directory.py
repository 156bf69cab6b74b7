"""The directories of a model that is to be used (`ptf chat`, `ptf serve`): those of its weights, its adapter and its
tokenizer; and adapters that are stored in PEFT format, read into ptf's decoder.

An adapter is read exactly or refused. Features of PEFT that the decoder does not compute (DoRA, biases, ranks by
module) give an error that names them, never a slightly different model.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ptf.config.backends import BackendName
from ptf.errors import UserError
from ptf.model.backends import backend_of
from ptf.model.components import abbreviated
from ptf.model.head import CLASSIFIER
from ptf.model.layers import LayerFactory
from ptf.model.lora import Lora
from ptf.model.model import Model
from ptf.model.model_files import local_directory, locate, read_config

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
UNREAD = (  # keys of adapter_config.json that must be absent, empty or false
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "lora_bias",
)
READ = {"peft_type": ("LORA",), "bias": ("none",), "task_type": ("CAUSAL_LM", None)}  # the values that are read


def is_adapter(directory: Path) -> bool:
    """Return whether a directory has an adapter and no whole model."""
    return (directory / CONFIG).is_file() and not (directory / "config.json").is_file()


@dataclass(frozen=True)
class AdapterDirectory:
    """An adapter on disk: its base model, its rank, its scale and the names of its tensors."""

    directory: Path
    base: str  # path or Hugging Face id of the model that it belongs to
    rank: int  # rank of the tensors in the file
    scale: float  # factor of B A x
    names: frozenset[str]

    @classmethod
    def read(cls, directory: Path) -> "AdapterDirectory":
        """Read an adapter's config and the names of its tensors.

        Raises UserError if the directory is not an adapter, or if the adapter has features that ptf does not compute.
        """
        try:
            config = json.loads((directory / CONFIG).read_text())
            base, rank, alpha = str(config["base_model_name_or_path"]), int(config["r"]), float(config["lora_alpha"])
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"{directory} is not an adapter in PEFT format: its {CONFIG} cannot be read") from None
        problems = [key for key in UNREAD if config.get(key)]
        problems += [f"{key} {config[key]}" for key, read in READ.items() if config.get(key, read[0]) not in read]
        if problems:
            raise UserError(
                f"{directory}: ptf does not read adapters with {', '.join(problems)}; merge it into its base model "
                "with PEFT (merge_and_unload) and use that"
            )
        if not (directory / TENSORS).is_file():
            raise UserError(f"{directory} has no {TENSORS}, which holds the adapter's tensors")
        with safe_open(directory / TENSORS, "pt") as file:
            names = frozenset(file.keys())
        return cls(directory, base, rank, alpha / (rank**0.5 if config.get("use_rslora") else rank), names)

    def factory(self, base: Path, own: LayerFactory | None = None, backend: BackendName = "ptf") -> LayerFactory:
        """Return the layer factory of the base model in `base`, with LoRA of this adapter's shape.

        `own` holds the user's components. Raises UserError if the adapter's tensors are not those that the base model
        needs.
        """
        components, build = own.replace if own else {}, backend_of(backend).build
        factory = LayerFactory(components, lora=Lora(rank=1, targets=("*",)))
        everything = build(base, head="lm", factory=factory).peft()
        targets = everything.projections(self.names)
        if unknown := self.names - everything.names():
            raise self._does_not_fit(base, unknown)
        factory = LayerFactory(components, lora=Lora(rank=1, targets=targets))
        widened = build(base, head="lm", factory=factory).peft()
        rank, rest = divmod(self.rank, widened.rank)
        if missing := widened.names() - self.names:
            raise self._does_not_fit(base, missing)
        if rest:
            raise UserError(
                f"{self.directory} has rank {self.rank}, but in this base model {widened.rank} projections share a "
                f"tensor, and ptf reads such an adapter only if its rank is a multiple of {widened.rank}; merge it "
                "into its base model with PEFT (merge_and_unload) and use that"
            )
        return LayerFactory(components, lora=Lora(rank=rank, alpha=self.scale * rank, targets=targets))

    def fill(self, model: Model) -> None:
        """Copy the adapter into a model that was built with `factory`.

        Raises UserError if a tensor of the file cannot be represented exactly in the model.
        """
        form = model.peft()
        with safe_open(self.directory / TENSORS, "pt") as file:
            form.copy(file.get_tensor)
            for name, tensor in form.tensors():
                stored = file.get_tensor(name).to(tensor)
                if stored.shape != tensor.shape or (stored - tensor).abs().max() > 0.01 * stored.abs().max():
                    raise UserError(
                        f"{self.directory}: {name} cannot be read exactly into ptf's layout; merge the adapter into "
                        "its base model with PEFT (merge_and_unload) and use that"
                    )

    def _does_not_fit(self, base: Path, names: Iterable[str]) -> UserError:
        return UserError(f"{self.directory} does not fit the model in {base}: {abbreviated(sorted(names))}")


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
        place = local_directory(where)
        adapter = AdapterDirectory.read(place) if is_adapter(place) else None
        base = locate(where) if adapter is None else base_of(adapter)
        return cls(base, place if (place / "tokenizer_config.json").is_file() else base, adapter)

    @property
    def scores(self) -> bool:
        """Return whether it is a classifier, such as a reward model, which generates nothing."""
        return any(CLASSIFIER in name for name in read_config(self.base).get("architectures") or ())

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
        return locate(adapter.base)
    except UserError as error:
        reason = str(error).removeprefix("model.path: ")
        raise UserError(f"{adapter.directory} needs its base model {adapter.base}: {reason}") from None
