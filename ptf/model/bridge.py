"""Conversion of a Hugging Face checkpoint into our decoder and back.

A family's list of names is read in both directions, and a tensor is read from safetensors only in the slice that this
process owns, so that loading a sharded model needs no whole copy anywhere.
"""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ptf import storage
from ptf.errors import UserError
from ptf.model import hub
from ptf.model.checkpoint_mapping import Bits, PaddedRows, Rename, Slices, TensorMapping
from ptf.model.components import (
    OWN,
    constructor_values,
    file_of,
    fill_buffers,
    own_files,
    own_tensors,
    raise_if_unmatched,
    standard_shapes,
)
from ptf.model.config import DecoderConfig
from ptf.model.decoder import Decoder
from ptf.model.families import MODULES, family_of
from ptf.model.layers import LayerFactory
from ptf.model.lora import Lora, adapter_names, initial_value, keyed, merged_weights, raise_if_unmatched_targets, whole
from ptf.model.quantised_weights import FORMS, QuantisedWeight, quantised_weights, weight_shapes
from ptf.model.scalar import HF_NAME, is_scalar
from ptf.model.tensor_files import TensorFiles, has_own_head, has_weights, weight_map
from ptf.storage import file_verification, published_versions
from ptf.workspace import progress

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARD_BYTES = 4 << 30
CPU = torch.device("cpu")
CHAT_TEMPLATES = ("chat_template", "additional_chat_templates/")  # how the names of their files begin
Carried = tuple[str, Tensor, torch.dtype]  # name in a checkpoint, tensor, dtype in which it is stored


def locate(path: str, cache: str | None = None, verify_up_to: float | None = float("inf")) -> Path:
    """Return the local directory of a model (`local_directory`). Raises UserError if there is none, it has no
    config.json or is not what was written."""
    local = local_directory(path, cache, verify_up_to)
    if not (local / "config.json").is_file():
        if (local / "adapter_config.json").is_file():
            raise UserError(
                f"model.path: {path} is an adapter and not a whole model; give the merged one "
                "(publish.what: merged or both)"
            )
        raise UserError(f"model.path: {path} is not a model: it has no config.json")
    if (index := local / "model.safetensors.index.json").is_file():
        weight_map(index)  # checked here, because transformers and vLLM would follow it to any file
    return local


def local_directory(path: str, cache: str | None = None, verify_up_to: float | None = float("inf")) -> Path:
    """Return the local directory of a model or an adapter: a directory (of versions: the one named by the pointer), a
    URI (copied into `cache`), or a Hugging Face id (`owner/name`, `owner/name@revision`), through its cache. A
    published version and a copy are verified first (ptf.storage.file_verification), up to `verify_up_to` bytes; None
    is for callers that read no weights, and verifies nothing. Raises UserError if there is no such model."""
    path = published_versions.latest(path) or path
    if "://" in path:
        into = cache or os.path.join("runs", "models")
        if verify_up_to is None:
            return Path(storage.localize(path, into, without=hub.COPIES))
        local = Path(file_verification.localized(path, into, verify_up_to, without=hub.COPIES))
        published_versions.raise_if_damaged(local, path, verify_up_to, without=hub.COPIES)
        return local
    if os.path.isdir(path):
        if verify_up_to is not None:
            published_versions.raise_if_damaged(Path(path), path, verify_up_to)
        return Path(path)
    if hub.is_id(path):
        return hub.fetch(path)
    raise UserError(f"model.path: there is no directory {path}")


def read_config(directory: Path) -> dict[str, Any]:
    """Return the config.json of a directory, untied if its tensors are (`unties`). Raise UserError if it is not a JSON
    object."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise UserError(f"model.path: {directory}/config.json is not a JSON object")
    parts = [config, *([config["text_config"]] if config.get("text_config") else ())]
    stated = [part["tie_word_embeddings"] for part in parts if "tie_word_embeddings" in part]
    if (not stated or stated[0] is not False) and has_own_head(directory):
        for part in parts:
            part["tie_word_embeddings"] = False
    return config


def unties(directory: Path) -> bool:
    """Return whether a directory stores a head unlike the embedding that its config.json ties it to, or a default does.
    It is not tied, as in transformers 5."""
    return read_config(directory) != json.loads((directory / "config.json").read_text())


def decoder_config(directory: Path) -> DecoderConfig:
    """Return the sizes of ptf's model of a directory, mapped from its config.json. Raise UserError for a required
    setting that is missing."""
    hf = read_config(directory)
    try:
        return family_of(hf).config(hf)
    except KeyError as error:  # a setting without a default
        if error.args[0] in hf:
            raise
        raise UserError(f"model.path: {directory}/config.json has no {error.args[0]}") from error


def export_dtype(directory: Path) -> torch.dtype:
    """Return the dtype in which a checkpoint's weights are stored, by its config.json."""
    config = read_config(directory)
    text = config.get("text_config") or {}
    name = (
        config.get("dtype")
        or config.get("torch_dtype")
        or text.get("dtype")
        or text.get("torch_dtype")
        or ("bfloat16" if "quantization_config" in config else "float32")
    )
    if name not in DTYPES:
        raise UserError(f"model.path: {directory}/config.json stores weights as {name}; ptf trains {', '.join(DTYPES)}")
    return DTYPES[name]


def stored_dtypes(directory: Path) -> dict[str, torch.dtype]:
    """Return the dtypes of a checkpoint's tensors, by the names that ptf writes; {} where there are none."""
    if not has_weights(directory):
        return {}
    kind = read_config(directory)["model_type"]
    with TensorFiles(directory, family_of({"model_type": kind}).aliases if kind in MODULES else None) as files:
        return {name: files.dtype(name) for name in files.names}


def build(
    directory: Path, *, head: Literal["lm", "scalar"] | None = None, factory: LayerFactory | None = None
) -> Decoder:
    """Return a decoder of the right shape on the meta device (without memory).

    `head` is the kind of head; None takes that of the checkpoint. `factory` replaces components and adds adapters.
    Raise UserError for a model that cannot be trained, and for a replacement or an adapter that matches nothing.
    """
    hf = read_config(directory)
    family = family_of(hf)
    if family.per_expert and has_weights(directory):  # the form in which the checkpoint stores experts
        with TensorFiles(directory, family.aliases) as files:
            if any(".experts.0." in name for name in files.names):
                family = replace(family, mappings=family.per_expert)
    if (method := hf.get("quantization_config", {}).get("quant_method", "mxfp4")) != "mxfp4":
        copy = ", or a copy in bf16, as transformers' FineGrainedFP8Config(dequantize=True) loads one"
        raise UserError(
            f"model.path: {directory} is quantised ({method}), which ptf cannot train; "
            f"use the checkpoint it was made from{copy if method == 'fp8' else ''}"
        )
    config = replace(decoder_config(directory), head=head or ("scalar" if is_scalar(hf) else "lm"))
    if factory is not None:
        raise_if_unmatched(config, factory)
    with torch.device("meta"):
        model = Decoder(config, factory)
        if factory is not None and factory.lora is not None:
            raise_if_unmatched_targets(
                model, factory.lora, Decoder(config, replace(factory, lora=Lora(targets=("*",))))
            )
    if factory is not None and factory.quantised is not None and not quantised_weights(model):
        raise UserError(
            f"model.quantization: the model in {directory} has no weight that it holds in four bits (mxfp4 holds "
            "experts only), or all of them train; set model.quantization: nf4, or leave it out"
        )
    model.family = family
    return model


def materialize(model: Decoder, device: torch.device) -> None:
    """Give a (sharded) meta model memory, keeping its head tied."""
    model.to_empty(device=device)
    if model.config.tied:
        model.head._parameters["weight"] = model.embed._parameters["weight"]


def load(
    directory: Path,
    device: torch.device = CPU,
    *,
    head: Literal["lm", "scalar"] | None = None,
    factory: LayerFactory | None = None,
    seed: int = 0,
) -> Decoder:
    """Return the model of a directory with its weights, whole, on a device (`build`, `load_hf`)."""
    model = build(directory, head=head, factory=factory)
    materialize(model, device)
    load_hf(model, directory, seed)
    return model


def fill(parameter: Tensor, read: Callable[[Slices], Tensor]) -> None:
    """Fill a parameter with what `read` returns for the slices that this process owns."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            shape, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            part = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            if 0 not in shape:
                parameter.to_local().copy_(read(part))
        else:
            parameter.copy_(read(tuple(slice(0, n) for n in parameter.shape)))


def fill_quantised(weight: QuantisedWeight, codes: Tensor, scales: Tensor, read: Callable[[Slices], Tensor]) -> None:
    """Fill the parts of a quantised weight with what `read` returns for whole rows of the weight.

    A process quantises only the rows of which it owns a part, once where both parts are sharded alike.
    """
    last: tuple[Slices, tuple[Tensor, Tensor]] = ((), (codes, scales))

    def part_of(which: int, part: Slices) -> Tensor:
        nonlocal last
        rows = part[:-1]
        if rows != last[0]:
            whole = read((*rows, slice(0, 2 * codes.shape[-1])))
            last = (rows, FORMS[weight.form].quantise(whole.to(codes.device, torch.float32)))
        return last[1][which][..., part[-1]]

    fill(codes, partial(part_of, 0))
    fill(scales, partial(part_of, 1))


def random_init(model: Decoder, seed: int) -> None:
    """Initialise a model randomly: normal weights, unit norms, zero biases.

    Each tensor has a generator of its own, keyed by seed and name, so that sharding changes nothing. Raises ValueError
    for a model with quantised weights, which are those of a checkpoint.
    """
    if quantised_weights(model):
        raise ValueError("quantised weights come from a checkpoint: write the random weights out and load them")
    own = constructor_values(model, [n for n, _ in model.named_parameters()], seed)
    for name, parameter in model.named_parameters():
        if name in own:  # a component of the user's own begins as its constructor leaves it
            fill(parameter, own[name].__getitem__)
        else:
            _initialise(name, parameter, model.config, seed)
    init_adapters(model, seed)
    fill_buffers(model)


def init_adapters(model: Decoder, seed: int) -> None:
    """Initialise the adapters from the seed; no checkpoint of the model has them.

    The model then computes what it does without them.
    """
    names = adapter_names(model)
    for name, parameter in model.named_parameters():
        if name in names:
            fill(parameter, initial_value(name, parameter.shape, seed).__getitem__)


def _initialise(name: str, parameter: Tensor, config: DecoderConfig, seed: int) -> None:
    """Fill one parameter: constants for norms, biases and sinks, else normal values keyed by seed and name.

    The norm of linear attention has no offset. Its decay a token is exp(−softplus(1)) = 0.27 where its input is zero.
    """
    constant = 0.0 if name.endswith(("bias", "sinks", "a_log")) else float(not config.norm_offset)
    if name.endswith(("attn.norm.weight", "dt_bias")):
        constant = 1.0
    if name.endswith(("norm.weight", "bias", "sinks", "a_log")):
        fill(parameter, lambda part: torch.full([s.stop - s.start for s in part], constant))
        return
    rows = config.vocab if _in_vocabulary(name, config) else len(parameter)
    generator = torch.Generator().manual_seed(keyed(seed, name))
    values = torch.empty(rows, *parameter.shape[1:]).normal_(0, config.init_std, generator=generator)
    fill(parameter, partial(PaddedRows(name, name, rows).read, 0, read=lambda _, part: values[part], experts=0))


def _in_vocabulary(name: str, config: DecoderConfig) -> bool:
    """Return whether the last rows of the tensor of this name may be padding."""
    return name == "embed.weight" or (name == "head.weight" and config.head == "lm")


def checkpoint_mappings(model: Decoder) -> list[TensorMapping]:
    """Return the mappings of this model.

    They leave the padding of the vocabulary out of checkpoints, give a scalar head its own name, and have none for own
    components and adapters.
    """
    config = model.config
    without_mappings = {*own_tensors(model), *adapter_names(model)}
    mappings = model.family.mappings_for({n: s for n, s in weight_shapes(model).items() if n not in without_mappings})
    changed: dict[str, TensorMapping] = {
        mapping.ours[0]: PaddedRows(mapping.ours[0], mapping.theirs(0)[0], config.vocab)
        for mapping in mappings
        if _in_vocabulary(mapping.ours[0], config)
    }
    if config.head == "scalar":
        changed["head.weight"] = Rename("head.weight", HF_NAME)
    return [changed.get(mapping.ours[0], mapping) for mapping in mappings]


def stored_mappings(model: Decoder, files: TensorFiles) -> tuple[list[TensorMapping], tuple[str, ...]]:
    """Compare a checkpoint's tensors with the model, which may be on the meta device, by their names and shapes.

    Return the mappings of those that are there, and the unified name of a scalar head that is not. Raise UserError that
    lists every missing, unexpected or misshapen tensor.
    """
    family, hf = model.family, read_config(files.directory)
    ours_shapes, experts = weight_shapes(model), model.config.experts
    missing = ("head.weight",) if model.config.head == "scalar" and HF_NAME not in files.names else ()
    mappings = [mapping for mapping in checkpoint_mappings(model) if mapping.ours != missing]
    shapes = {
        family.prefix + name: mapping.shape(ours_shapes[mapping.ours[0]])
        for mapping in mappings
        for name in mapping.theirs(experts)
    }
    extra = {n for n in files.names - set(shapes) if not family.carries(n, hf)}
    ignorable = {f"{family.prefix}lm_head.weight"} if model.config.tied or model.config.head != "lm" else set()
    ignorable |= {HF_NAME} if model.config.head != "scalar" else set()
    if model.factory.constructors:  # the checkpoint may hold tensors of components that were replaced
        usual = family.mappings_for(standard_shapes(model.config))
        ignorable |= {family.prefix + name for mapping in usual for name in mapping.theirs(experts)}
    problems = [f"missing: {n}" for n in sorted(set(shapes) - files.names)]
    problems += [f"unexpected: {n}" for n in sorted(extra - ignorable)]
    for name in sorted(set(shapes) & files.names):
        if files.shape(name) != shapes[name]:
            problems.append(f"wrong shape: {name} is {files.shape(name)}, the config says {shapes[name]}")
    if problems:
        raise UserError(f"model.path: {files.directory} does not fit its config.json:\n  " + "\n  ".join(problems))
    return mappings, missing


def load_hf(model: Decoder, directory: Path, seed: int = 0) -> tuple[str, ...]:
    """Fill the model from safetensors, and components of the user's own from the files beside them.

    Return the unified names of the tensors that the checkpoint lacks because a scalar head or an own component is new:
    these are drawn from `seed`. Raise UserError that lists every missing, unexpected or misshapen tensor.
    """
    parameters, own = dict(model.named_parameters()), own_tensors(model)
    beside = own_files(directory, {name: tuple(parameters[name].shape) for name in own})
    new: dict[str, Tensor] = constructor_values(model, [n for n in own if n not in beside], seed)
    with TensorFiles(directory, model.family.aliases) as files:
        mappings, missing = stored_mappings(model, files)

        counted = progress.counted(mappings, f"read {directory}", "tensors")
        _fill_all(model, counted, lambda name, part: files.read(model.family.prefix + name, part))
    for name in own:
        fill(parameters[name], beside.get(name) or new[name].__getitem__)
    for name in missing:
        _initialise(name, parameters[name], model.config, seed)
    init_adapters(model, seed)
    fill_buffers(model)
    return (*missing, *new)


def load_hf_tensors(model: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Fill the model from whole tensors under the names of `hf_tensors`. Raise KeyError for one that is missing."""
    if not isinstance(model, Decoder):  # hf_backend.py
        model.load_hf_tensors(tensors)
        return
    _fill_all(model, checkpoint_mappings(model), lambda name, part: tensors[model.family.prefix + name][part])
    for name in own_tensors(model):
        fill(model.get_parameter(name), tensors[OWN + name].__getitem__)


def _fill_all(model: Decoder, mappings: Iterable[TensorMapping], read: Callable[[str, Slices], Tensor]) -> None:
    """Fill the weights that the mappings give, from what `read` returns of the tensors of a checkpoint."""
    parameters, quantised = dict(model.named_parameters()), quantised_weights(model)
    for mapping in mappings:
        for i, ours in enumerate(mapping.ours):
            part = partial(mapping.read, i, read=read, experts=model.config.experts)
            if (weight := quantised.get(ours)) is None:
                fill(parameters[ours], part)
            else:
                fill_quantised(weight, parameters[weight.codes], parameters[weight.scales], part)


def hf_names(model: Decoder) -> set[str]:
    """Return the names under which `hf_tensors` gives this model's tensors."""
    if not isinstance(model, Decoder):  # hf_backend.py
        return model.hf_names()
    theirs = (name for mapping in checkpoint_mappings(model) for name in mapping.theirs(model.config.experts))
    return {model.family.prefix + name for name in theirs} | {OWN + name for name in own_tensors(model)}


def exact_names(model: Decoder) -> set[str]:
    """Return the names, of those of `hf_tensors`, of tensors that the model computes with in fp32, whatever dtype the
    others have."""
    if not isinstance(model, Decoder):  # hf_backend.py
        return {name for name, _ in model.hf.named_buffers()}
    exact = (mapping for mapping in checkpoint_mappings(model) if isinstance(mapping, Bits))
    return {model.family.prefix + name for mapping in exact for name in mapping.theirs(model.config.experts)}


def stored_in_fp32(model: Decoder, directory: Path) -> set[str]:
    """Return the model's parameters that a checkpoint stores in fp32, all of them or in part."""
    wide = {name for name, dtype in stored_dtypes(directory).items() if dtype == torch.float32}
    if not isinstance(model, Decoder):  # hf_backend.py
        return {f"hf.{name}" for stored, name in model.renamed(wide).items()} if wide else set()
    return {
        ours
        for mapping in checkpoint_mappings(model)
        if not wide.isdisjoint(model.family.prefix + name for name in mapping.theirs(model.config.experts))
        for ours in mapping.ours
    }


def under_hf_names(values: Callable[[str], Tensor], model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) of values by our names: weights, or anything of their shapes.

    A sharded tensor is gathered. Tensors that have no Hugging Face name come last, under ours (`own:…`).
    """
    for mapping in checkpoint_mappings(model):
        written = mapping.write([whole(values(ours)) for ours in mapping.ours])
        for name, tensor in zip(mapping.theirs(model.config.experts), written, strict=True):
            yield model.family.prefix + name, tensor
    for name in own_tensors(model):
        yield OWN + name, whole(values(name))


def hf_tensors(model: Decoder, source: Path | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor), adapters merged; quantised weights are those of the checkpoint
    `source`, or without it what they are dequantised to.

    Every rank must iterate, because each gathers its part.
    """
    if not isinstance(model, Decoder):  # hf_backend.py
        yield from model.hf_tensors()
        return
    if isinstance(model, FSDPModule):
        model.reshard()  # after a forward pass without a backward the root still has copies in the compute dtype
    if source is None or not quantised_weights(model):
        yield from under_hf_names(merged_weights(model), model)
        return
    with TensorFiles(source, model.family.aliases) as files:
        yield from under_hf_names(merged_weights(model, _original_weights(model, files)), model)


def _original_weights(model: Decoder, files: TensorFiles) -> Callable[[str], Tensor]:
    """Return a function that reads the whole weight of a unified name from a checkpoint."""
    shapes, experts = weight_shapes(model), model.config.experts
    mappings = {ours: (mapping, i) for mapping in checkpoint_mappings(model) for i, ours in enumerate(mapping.ours)}

    def original(name: str) -> Tensor:
        mapping, i = mappings[name]
        part = tuple(slice(0, n) for n in shapes[name])
        return mapping.read(i, part, lambda theirs, of: files.read(model.family.prefix + theirs, of), experts)

    return original


def save_hf(
    tensors: Iterator[tuple[str, Tensor]],
    source: Path,
    directory: Path,
    *,
    writes: bool,
    tokenizer: str | None = None,
    config: Mapping[str, Any] | None = None,
    manifest: Mapping[str, Any] | None = None,
    carried: Iterator[Carried] | None = None,
    files: Mapping[str, str] | None = None,
) -> None:
    """Write a Hugging Face directory: safetensors, config.json, and the other files of `source`.

    Each tensor gets the dtype that it has in `source`; one that is not there, that of the model. `config` replaces the
    source's config.json; the tokenizer's files come from the directory `tokenizer` if given;
    components of the user's own go to files of their own (components.py); `manifest` is written with the SHA-256 of
    every file; `carried` is what is copied as it is, if that is not for the source's family to say; `files` are texts
    by name that replace other files. Every rank calls this function; the one that `writes` does. The directory appears
    only when it is complete.
    """
    dtype, dtypes, hf = export_dtype(source), stored_dtypes(source), read_config(source)
    if not writes:
        for _ in tensors:
            pass
        return
    temporary = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    shards, own = _Shards(temporary), dict[str, dict[str, Tensor]]()
    trained = ((name, t, dtypes.get(name, dtype)) for name, t in tensors)
    for name, tensor, stored in itertools.chain(trained, _carried_tensors(source) if carried is None else carried):
        tensor = tensor.to("cpu", stored).contiguous()
        if name.startswith(OWN):
            ours = name.removeprefix(OWN)
            own.setdefault(file_of(ours), {})[ours] = tensor
        else:
            shards.add(name, tensor)
    shards.finish()
    for file, inside in own.items():
        save_file(inside, temporary / file, metadata={"format": "pt"})
    _copy_other_files(source, tokenizer, temporary)
    for name, text in (files or {}).items():
        (temporary / name).write_text(text)
    # MXFP4 weights were dequantised when they were read
    written = {k: v for k, v in (config or hf).items() if k != "quantization_config"}
    (temporary / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    if manifest is not None:
        storage.commit(temporary, dict(manifest))
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(temporary, directory)


def _copy_other_files(source: Path, tokenizer: str | None, directory: Path) -> None:
    """Copy what lies beside the weights of `source`, and the tokenizer's files from their own directory if given, which
    then has all chat templates."""
    beside: dict[str, Path] = {}
    for place in (source, Path(tokenizer or source)):
        beside = {name: file for name, file in beside.items() if not name.startswith(CHAT_TEMPLATES)}
        found = (*place.iterdir(), *place.glob("additional_chat_templates/*.jinja"))
        beside |= {str(f.relative_to(place)): f for f in found if f.suffix in (".json", ".jinja", ".txt", ".model")}
    for name, file in sorted(beside.items()):
        if name not in ("config.json", "rendering.json") and not name.startswith(("model.safetensors", "manifest")):
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(file.read_bytes())


def carried_tensors(model: Decoder, source: Path) -> Iterator[Carried]:
    """Yield what an export of a model has beside `hf_tensors`: what it does not train of the checkpoint `source`."""
    return _carried_tensors(source) if isinstance(model, Decoder) else model.carried(source)  # hf_backend.py


def _carried_tensors(source: Path) -> Iterator[Carried]:
    """Yield the tensors of a checkpoint that its family does not train but keeps, and their dtypes."""
    if (config := read_config(source))["model_type"] not in MODULES:  # hf_backend.py
        return
    family = family_of(config)
    if has_weights(source):
        with TensorFiles(source, family.aliases) as files:
            for name in sorted(n for n in files.names if family.carries(n, config)):
                tensor = files[name]
                yield name, tensor, tensor.dtype


@dataclass
class _Shards:
    """The files of a checkpoint, written one after the other; `finish` names them as transformers does."""

    directory: Path
    tensors: dict[str, Tensor] = field(default_factory=dict)  # of the file that is not written yet
    numbers: dict[str, int] = field(default_factory=dict)  # of each tensor's file
    count: int = 0  # of files
    size: int = 0  # bytes of `tensors`, and of all
    total: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, with the others of its file."""
        if self.size and self.size + tensor.nbytes > SHARD_BYTES:
            self._write()
        self.tensors[name], self.numbers[name] = tensor, self.count
        self.size += tensor.nbytes
        self.total += tensor.nbytes

    def _write(self) -> None:
        save_file(self.tensors, self.directory / f"shard-{self.count}.safetensors", metadata={"format": "pt"})
        self.tensors, self.size, self.count = {}, 0, self.count + 1  # frees its memory

    def finish(self) -> None:
        """Write the last file; give the files their final names, and write the index."""
        self._write()
        if self.count == 1:
            os.replace(self.directory / "shard-0.safetensors", self.directory / "model.safetensors")
            return
        names = [f"model-{i + 1:05}-of-{self.count:05}.safetensors" for i in range(self.count)]
        for i, name in enumerate(names):
            os.replace(self.directory / f"shard-{i}.safetensors", self.directory / name)
        index = {"metadata": {"total_size": self.total}, "weight_map": {n: names[i] for n, i in self.numbers.items()}}
        (self.directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
