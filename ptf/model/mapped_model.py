"""A model whose parameters are those of a checkpoint, as the mappings of its family say.

A family's list of names is read in both directions, and a tensor is read from safetensors only in the slice that this
process owns, so that loading a sharded model needs no whole copy anywhere.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from ptf.errors import UserError
from ptf.model.checkpoint_mapping import Bits, PaddedRows, Slices, TensorMapping, rename
from ptf.model.components import (
    OWN,
    abbreviated,
    constructor_values,
    file_of,
    own_files,
    own_tensors,
    standard_shapes,
)
from ptf.model.families import Family
from ptf.model.head import HF_NAME
from ptf.model.lora import adapter_names, init_adapters, keyed, merged_weights
from ptf.model.model import Model
from ptf.model.model_files import read_config, stored_dtypes
from ptf.model.peft_format import MappedPeftFormat
from ptf.model.quantised_weights import fill_quantised, quantised_weights, weight_shapes
from ptf.model.sharded_tensor import fill, whole
from ptf.model.tensor_files import Headers, TensorFiles
from ptf.workspace import progress

TABLES = ("embed.weight", "head.weight")  # with a row for each token, the last of which may be padding


class MappedModel(Model):
    """The tensors of a `Decoder` in a checkpoint."""

    family: Family  # that of the checkpoint that it was built for (bridge.build): what its tensors are called there

    @property
    @override
    def aliases(self) -> Mapping[str, str]:  # type: ignore[override]
        return self.family.aliases

    def mappings(self) -> list[TensorMapping]:
        """Return the mappings of this model.

        They leave the padding of the vocabulary out of checkpoints, give a scalar head its own name, and have none
        for own components and adapters.
        """
        without_mappings = {*own_tensors(self), *adapter_names(self)}
        mappings = self.family.mappings_for({n: s for n, s in weight_shapes(self).items() if n not in without_mappings})
        changed: dict[str, TensorMapping] = {
            mapping.ours[0]: PaddedRows(mapping.ours, mapping.other, self.config.vocab)
            for mapping in mappings
            if mapping.ours[0] in TABLES
        }
        if self.config.head == "scalar":
            changed["head.weight"] = rename("head.weight", HF_NAME)
        return [changed.get(mapping.ours[0], mapping) for mapping in mappings]

    def names_of(self, mapping: TensorMapping) -> list[str]:
        """Return the names in a checkpoint of the tensors of a mapping."""
        return [self.family.prefix + name for name in mapping.theirs()]

    @override
    def hf_names(self) -> set[str]:
        return {
            *(name for mapping in self.mappings() for name in self.names_of(mapping)),
            *(OWN + name for name in own_tensors(self)),
        }

    @override
    def exact_names(self) -> set[str]:
        return {name for mapping in self.mappings() if isinstance(mapping, Bits) for name in self.names_of(mapping)}

    @override
    def stored_in_fp32(self, directory: Path) -> set[str]:
        wide = {name for name, dtype in stored_dtypes(directory).items() if dtype == torch.float32}
        return {
            ours for mapping in self.mappings() if not wide.isdisjoint(self.names_of(mapping)) for ours in mapping.ours
        }

    def hf_tensors(self, source: Path | None = None) -> Iterator[tuple[str, Tensor]]:
        """See Model. Tensors that have no Hugging Face name come last, under ours (`own:…`)."""
        if isinstance(self, FSDPModule):
            self.reshard()  # after a forward pass without a backward the root still has copies in the compute dtype
        if source is None or not quantised_weights(self):
            yield from self.under_hf_names(merged_weights(self))
            return
        with TensorFiles(source, self.aliases) as files:
            shapes = weight_shapes(self)
            mappings = {ours: (mapping, i) for mapping in self.mappings() for i, ours in enumerate(mapping.ours)}

            def original(name: str) -> Tensor:
                mapping, i = mappings[name]
                whole = tuple(slice(0, n) for n in shapes[name])
                return mapping.read(i, whole, self._reader(files))

            yield from self.under_hf_names(merged_weights(self, original))

    def under_hf_names(self, values: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) of values by our names: weights, or anything of their shapes.

        A sharded tensor is gathered.
        """
        for mapping in self.mappings():
            yield from zip(
                self.names_of(mapping), mapping.write([whole(values(ours)) for ours in mapping.ours]), strict=True
            )
        for name in own_tensors(self):
            yield OWN + name, whole(values(name))

    def _reader(self, files: TensorFiles) -> Callable[[str, Slices], Tensor]:
        """Return a function that reads a slice of a tensor by its name in a mapping."""
        return lambda name, part: files.read(self.family.prefix + name, part)

    @override
    def carried_names(self, files: TensorFiles) -> set[str]:
        config = read_config(files.directory)
        return {name for name in files.names if self.family.carries(name, config)}

    @override
    def raise_if_unfit(self, directory: Path) -> None:
        with Headers(directory, self.aliases) as files:
            self._stored_mappings(files)

    def _stored_mappings(self, files: TensorFiles) -> tuple[list[TensorMapping], tuple[str, ...]]:
        """Compare a checkpoint's tensors with the model, by their names and shapes.

        Return the mappings of those that are there, and the unified name of a scalar head that is not. Raise
        UserError that lists every missing, unexpected or misshapen tensor.
        """
        family, hf = self.family, read_config(files.directory)
        ours_shapes = weight_shapes(self)
        missing = ("head.weight",) if self.config.head == "scalar" and HF_NAME not in files.names else ()
        mappings = [mapping for mapping in self.mappings() if mapping.ours != missing]
        shapes = {
            name: mapping.shape(ours_shapes[mapping.ours[0]]) for mapping in mappings for name in self.names_of(mapping)
        }
        extra = {n for n in files.names - set(shapes) if not family.carries(n, hf)}
        ignorable = {f"{family.prefix}lm_head.weight"} if self.config.tied or self.config.head != "lm" else set()
        ignorable |= {HF_NAME} if self.config.head != "scalar" else set()
        if self.factory.constructors:  # the checkpoint may hold tensors of components that were replaced
            ignorable |= {
                name for mapping in family.mappings_for(standard_shapes(self)) for name in self.names_of(mapping)
            }
        problems = [f"missing: {n}" for n in sorted(set(shapes) - files.names)]
        problems += [f"unexpected: {n}" for n in sorted(extra - ignorable)]
        for name in sorted(set(shapes) & files.names):
            if files.shape(name) != shapes[name]:
                problems.append(f"wrong shape: {name} is {files.shape(name)}, the config says {shapes[name]}")
        if problems:
            raise UserError(f"model.path: {files.directory} does not fit its config.json:\n  " + "\n  ".join(problems))
        return mappings, missing

    def give_weights(
        self, directory: Path, device: torch.device, *, random: bool = False, seed: int = 0
    ) -> tuple[str, ...]:
        """See Model. Components of the user's own are read from the files beside the checkpoint."""
        self.to_empty(device=device)
        if self.config.tied:
            self.head._parameters["weight"] = self.get_parameter("embed.weight")
        new = self._draw(seed) if random else self._read(directory, seed)
        init_adapters(self, seed)
        for path, make in self.factory.constructors.items():  # buffers are constants: nothing trains or exports them
            module = self.get_submodule(path)
            if any(True for _ in module.buffers()):
                with torch.device("cpu"):
                    constant = dict(make().named_buffers())
                for name, buffer in module.named_buffers():
                    buffer.copy_(constant[name])
        return new

    def _read(self, directory: Path, seed: int) -> tuple[str, ...]:
        """Fill the parameters but those of adapters from a checkpoint; return the names of those that it lacks."""
        parameters, own = dict(self.named_parameters()), own_tensors(self)
        beside = own_files(directory, {name: tuple(parameters[name].shape) for name in own})
        new: dict[str, Tensor] = constructor_values(self, [n for n in own if n not in beside], seed)
        with TensorFiles(directory, self.aliases) as files:
            mappings, missing = self._stored_mappings(files)
            self._fill(progress.counted(mappings, f"read {directory}", "tensors"), self._reader(files))
        for name in own:
            fill(parameters[name], beside.get(name) or new[name].__getitem__)
        for name in missing:
            self._initialise(name, parameters[name], seed)
        return (*missing, *new)

    def _draw(self, seed: int) -> tuple[str, ...]:
        """Initialise the parameters but those of adapters: normal weights, unit norms, zero biases.

        Each tensor has a generator of its own, keyed by seed and name, so that sharding changes nothing. Raises
        ValueError for quantised weights, which are those of a checkpoint.
        """
        if quantised_weights(self):
            raise ValueError("quantised weights come from a checkpoint: write the random weights out and load them")
        own = constructor_values(self, [n for n, _ in self.named_parameters()], seed)
        for name, parameter in self.named_parameters():
            if name in own:  # a component of the user's own begins as its constructor leaves it
                fill(parameter, own[name].__getitem__)
            else:
                self._initialise(name, parameter, seed)
        return ()

    def _initialise(self, name: str, parameter: Tensor, seed: int) -> None:
        """Fill one parameter: constants for norms, biases and sinks, else normal values keyed by seed and name.

        The norm of linear attention has no offset. Its decay a token is exp(−softplus(1)) = 0.27 where its input is
        zero.
        """
        constant = 0.0 if name.endswith(("bias", "sinks", "a_log")) else float(not self.config.norm_offset)
        if name.endswith(("attn.norm.weight", "dt_bias")):
            constant = 1.0
        if name.endswith(("norm.weight", "bias", "sinks", "a_log")):
            fill(parameter, lambda part: torch.full([s.stop - s.start for s in part], constant))
            return
        rows = min(len(parameter), self.config.vocab) if name in TABLES else len(parameter)
        generator = torch.Generator().manual_seed(keyed(seed, name))
        values = torch.zeros(parameter.shape)
        values[:rows].normal_(0, self.config.init_std, generator=generator)
        fill(parameter, values.__getitem__)

    @override
    def load_hf_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._fill(self.mappings(), lambda name, part: tensors[self.family.prefix + name][part])
        for name in own_tensors(self):
            fill(self.get_parameter(name), tensors[OWN + name].__getitem__)

    def _fill(self, mappings: Iterable[TensorMapping], read: Callable[[str, Slices], Tensor]) -> None:
        """Fill the weights that the mappings give, from what `read` returns of the tensors of a checkpoint."""
        parameters, quantised = dict(self.named_parameters()), quantised_weights(self)
        for mapping in mappings:
            for i, ours in enumerate(mapping.ours):
                part = partial(mapping.read, i, read=read)
                if (weight := quantised.get(ours)) is None:
                    fill(parameters[ours], part)
                else:
                    fill_quantised(weight, parameters[weight.codes], parameters[weight.scales], part)

    @override
    def vocabulary_tables(self, names: Collection[str]) -> dict[str, str]:
        return {
            name: mapping.ours[0].removesuffix(".weight")
            for mapping in self.family.mappings
            if mapping.ours[0] in TABLES
            for name in self.names_of(mapping)
            if name in names
        }

    @override
    def peft(self) -> MappedPeftFormat:
        return MappedPeftFormat(self)

    @override
    def unstored_names(self) -> set[str]:
        return {*own_tensors(self), *(["head.weight"] if self.config.head == "scalar" else ())}

    @override
    def notes(self) -> list[str]:
        own = own_tensors(self)
        if not own:
            return []
        files = ", ".join(sorted({file_of(name) for name in own}))
        return [
            f"model: these tensors have no Hugging Face name: {abbreviated(own)}. "
            f"Exports hold them in {files} beside model.safetensors. ptf loads both files; transformers and vLLM "
            "load only the latter, so publishing as a plain Hugging Face model is refused if a layer is your own"
        ]
