"""Adapters that are stored in PEFT format, read into ptf's decoder, for `ptf chat` and for the check before publishing.

An adapter is read exactly or refused. Features of PEFT that the decoder does not compute (DoRA, biases, ranks by
module) give an error that names them, never a slightly different model.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ptf.errors import UserError
from ptf.model import bridge
from ptf.model.decoder import Decoder
from ptf.model.layers import LayerFactory
from ptf.model.lora import Lora
from ptf.model.peft_format import PeftFormat

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
SHOWN = 3  # most names in a message


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
        if problems := _unread(config):
            raise UserError(
                f"{directory}: ptf does not read adapters with {', '.join(problems)}; merge it into its base model "
                "with PEFT (merge_and_unload) and use that"
            )
        if not (directory / TENSORS).is_file():
            raise UserError(f"{directory} has no {TENSORS}, which holds the adapter's tensors")
        with safe_open(directory / TENSORS, "pt") as file:
            names = frozenset(file.keys())
        return cls(directory, base, rank, alpha / (rank**0.5 if config.get("use_rslora") else rank), names)

    def factory(self, base: Path, own: LayerFactory | None = None) -> LayerFactory:
        """Return the layer factory of the base model in `base`, with LoRA of this adapter's shape.

        `own` holds the user's components. Raises UserError if the adapter's tensors are not those that the base model
        needs.
        """
        components = own.replace if own else {}
        everything = self._format(base, LayerFactory(components, lora=Lora(rank=1, targets=("*",))))
        targets = everything.projections(self.names)
        if unknown := self.names - everything.names():
            raise self._does_not_fit(base, unknown)
        widened = self._format(base, LayerFactory(components, lora=Lora(rank=1, targets=targets)))
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

    def fill(self, model: Decoder) -> None:
        """Copy the adapter into a model that was built with `factory`.

        Raises UserError if a tensor of the file cannot be represented exactly in the model.
        """
        form = PeftFormat(model)
        with safe_open(self.directory / TENSORS, "pt") as file:
            form.copy(file.get_tensor)
            for name, tensor in form.tensors():
                stored = file.get_tensor(name).to(tensor)
                if stored.shape != tensor.shape or (stored - tensor).abs().max() > 0.01 * stored.abs().max():
                    raise UserError(
                        f"{self.directory}: {name} cannot be read exactly into ptf's layout; merge the adapter into "
                        "its base model with PEFT (merge_and_unload) and use that"
                    )

    def _format(self, base: Path, factory: LayerFactory) -> PeftFormat:
        with torch.device("meta"):
            return PeftFormat(bridge.build(base, head="lm", factory=factory))

    def _does_not_fit(self, base: Path, names: Iterable[str]) -> UserError:
        listed = sorted(names)
        more = f" and {len(listed) - SHOWN} more" if listed[SHOWN:] else ""
        return UserError(f"{self.directory} does not fit the model in {base}: {', '.join(listed[:SHOWN])}{more}")


def _unread(config: dict[str, Any]) -> list[str]:
    problems = [key for key in UNREAD if config.get(key)]
    if config.get("peft_type", "LORA") != "LORA":
        problems.append(f"peft_type {config['peft_type']}")
    if config.get("bias", "none") != "none":
        problems.append(f"bias {config['bias']}")
    if config.get("task_type", "CAUSAL_LM") not in ("CAUSAL_LM", None):
        problems.append(f"task_type {config['task_type']}")
    return problems
