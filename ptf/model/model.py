"""What a model that trains offers, ptf's own decoder and those of transformers alike: a forward pass, its tensors in
a checkpoint, and what a run must know of it. Nothing outside ptf.model and ptf.config asks which of them it is."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ptf.model.config import DecoderConfig
from ptf.model.kernels.choice import Kernels
from ptf.model.layers import LayerFactory
from ptf.model.tensor_files import TensorFiles, has_weights

if TYPE_CHECKING:
    from ptf.model.peft_format import PeftFormat

Carried = tuple[str, Tensor, torch.dtype]  # name in a checkpoint, tensor, dtype in which it is stored


class Model(nn.Module, ABC):
    """A causal language model whose forward pass returns what `head_fn(hidden, head)` computes.

    It is called with `tokens`, `positions` and `segments` [B, T] and a `head_fn`; `attend` and `varlen` may follow
    (`Decoder.forward`). The head is used inside `forward`, so logits never exist whole.
    """

    config: DecoderConfig
    factory: LayerFactory  # which made its components and adapters
    aliases: Mapping[str, str] = {}  # prefixes of names that checkpoints use → the one that ptf writes
    layers: nn.ModuleList
    head: nn.Module
    kernels: Kernels  # what it computes with
    # where several ranks see the same data: these ranks, which divide the vocabulary, and this one's first row of it
    # in a tensor group
    group: ProcessGroup | None = None
    vocab_start: int = 0
    supports_shared_prefixes: bool  # whether documents of a batch may share a prefix
    supports_compilation: bool  # whether attention, and parts of it, may be compiled
    first_layers_stand_alone: bool  # whether its first layers are the model of a config.json with so many

    @property
    @abstractmethod
    def text_tokens(self) -> Tensor:
        """The tokens that stand for text, [n]."""

    @abstractmethod
    def attention_name(self, device: torch.device) -> str:
        """Return which attention the model uses on a device, for a run's first lines."""

    @abstractmethod
    def load_balancing_loss(self) -> Tensor | None:
        """Return the load-balancing loss of the last forward pass (a mean, with gradient), or None without one."""

    @abstractmethod
    def hf_names(self) -> set[str]:
        """Return the names under which `hf_tensors` gives the tensors."""

    @abstractmethod
    def hf_tensors(self, source: Path | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in a checkpoint, whole tensor), adapters merged; quantised weights are those of the checkpoint
        `source`, or without it what they are dequantised to.

        Every rank must iterate, because each gathers its part.
        """

    @abstractmethod
    def load_hf_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill the model from whole tensors under the names of `hf_tensors`. Raise KeyError for one that is missing."""

    @abstractmethod
    def exact_names(self) -> set[str]:
        """Return the names, of those of `hf_tensors`, of tensors that the model computes with in fp32, whatever dtype
        the others have."""

    @abstractmethod
    def stored_in_fp32(self, directory: Path) -> set[str]:
        """Return the parameters that a checkpoint stores in fp32, all of them or in part."""

    @abstractmethod
    def carried_names(self, files: TensorFiles) -> set[str]:
        """Return which tensors of a checkpoint are not trained but kept."""

    def carried(self, source: Path) -> Iterator[Carried]:
        """Yield what an export has beside `hf_tensors`: what is not trained but kept of the checkpoint `source`."""
        if has_weights(source):
            with TensorFiles(source, self.aliases) as files:
                for name in sorted(self.carried_names(files)):
                    tensor = files[name]
                    yield name, tensor, tensor.dtype

    @abstractmethod
    def raise_if_unfit(self, directory: Path) -> None:
        """Raise the UserError with which `give_weights` would refuse a checkpoint, by the headers of its files alone:
        it lists every missing, unexpected or misshapen tensor. The model may be on the meta device."""

    @abstractmethod
    def give_weights(
        self, directory: Path, device: torch.device, *, random: bool = False, seed: int = 0
    ) -> tuple[str, ...]:
        """Give a (sharded) model memory and weights: those of a checkpoint, of which each process reads what it owns,
        or `random` ones, drawn from `seed`.

        Return the names of the tensors that the checkpoint lacks, because a scalar head or a component is new: these
        are drawn from `seed`, too. Raise UserError that lists every missing, unexpected or misshapen tensor.
        """

    @abstractmethod
    def vocabulary_tables(self, names: Collection[str]) -> dict[str, str]:
        """Return which of a checkpoint's tensors, of these names, have a row for each token, and what each is:
        `embed`, `head`, `bias` or `embed_per_layer`. Raise UserError for a model that takes no new tokens."""

    @abstractmethod
    def peft(self) -> "PeftFormat":
        """Return the adapters in PEFT's format."""

    @abstractmethod
    def unstored_names(self) -> set[str]:
        """Return the parameters that no checkpoint of a language model has, such as a scalar head."""

    def raise_if_outside(self, key: str, patterns: Sequence[str]) -> None:
        """Raise UserError naming the patterns of a config's `key` that match only what is kept as it is."""

    @abstractmethod
    def notes(self) -> list[str]:
        """Return what a run's first lines say of the model."""
