"""The way from a Hugging Face checkpoint into our decoder and back.

The one idea: a family's list of names is read in both directions, and a tensor is read from safetensors only in the slice that this
process owns, so that loading a sharded model needs no whole copy anywhere.
"""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ptf import published, storage, verified
from ptf.errors import UserError
from ptf.model import hub
from ptf.model.components import OWN, constructed, file_of, fill_buffers, own_files, own_tensors, refuse_unmatched, standard
from ptf.model.config import DecoderConfig
from ptf.model.decoder import Decoder
from ptf.model.families import MODULES, Family, family_of
from ptf.model.layers import Parts
from ptf.model.lora import Lora, Merged, adapter_names, drawn, refuse_unmatched_targets
from ptf.model.ops import Op, Rename, Rows, Slices
from ptf.model.scalar import HF_NAME, is_scalar
from ptf.model.tensor_files import TensorFiles, weight_map

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARD_BYTES = 4 << 30


def locate(path: str, revision: str | None = None, cache: str | None = None, verify_up_to: float | None = float("inf")) -> Path:
    """The local directory of a model: a directory (of versions: the one its pointer names), a URI (copied into `cache`), or a
    Hugging Face id, through its cache. A published version and a copy are verified first (ptf.verified), up to so many bytes; with None they
    are not, for who reads no weights. Raises UserError if there is none, it has no config.json or is not what was written."""
    path = published.latest(path) or path
    if "://" in path:
        into = cache or os.path.join("runs", "models")
        if verify_up_to is None:
            local = Path(storage.localize(path, into, without=hub.COPIES))
        else:
            local = Path(verified.localized(path, into, verify_up_to, without=hub.COPIES))
            published.refuse_damaged(local, path, verify_up_to, without=hub.COPIES)
    elif os.path.isdir(path):
        local = Path(path)
        if verify_up_to is not None:
            published.refuse_damaged(local, path, verify_up_to)
    elif path.count("/") == 1 and not path.startswith((".", "/", "~")):
        local = hub.fetch(path, revision)
    else:
        raise UserError(f"model.path: there is no directory {path}")
    if not (local / "config.json").is_file():
        raise UserError(f"model.path: {path} is not a model: it has no config.json")
    if (index := local / "model.safetensors.index.json").is_file():
        weight_map(index)  # now, for transformers and vLLM would follow it anywhere
    return local


def read_config(directory: Path) -> dict[str, Any]:
    """Raises UserError if it is not a JSON object."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise UserError(f"model.path: {directory}/config.json is not a JSON object")
    return config


def _mapped(family: Family, hf: Mapping[str, Any], directory: Path) -> DecoderConfig:
    try:
        return family.config(hf)
    except KeyError as error:  # a setting without a default
        if error.args[0] in hf:
            raise
        raise UserError(f"model.path: {directory}/config.json has no {error.args[0]}") from error


def export_dtype(directory: Path) -> torch.dtype:
    """What a checkpoint's weights are stored in, by its config.json."""
    config = read_config(directory)
    name = config.get("dtype") or config.get("torch_dtype") or ("bfloat16" if "quantization_config" in config else "float32")
    if name not in DTYPES:
        raise UserError(f"model.path: {directory}/config.json stores weights as {name}; ptf trains {', '.join(DTYPES)}")
    return DTYPES[name]


def build(directory: Path, *, head: Literal["lm", "scalar"] | None = None, parts: Parts | None = None) -> tuple[Decoder, Family]:
    """A decoder of the right shape on the meta device: no memory yet. `head`: what the positions are turned into; None takes what the checkpoint
    has. `parts` replaces components and adds adapters. Raises UserError for what cannot be trained, or a replacement or an adapter of nothing."""
    hf = read_config(directory)
    family = family_of(hf)
    if (method := hf.get("quantization_config", {}).get("quant_method", "mxfp4")) != "mxfp4":
        raise UserError(f"model.path: {directory} is quantised ({method}), and ptf cannot train that; take the checkpoint it was made from")
    config = _mapped(family, hf, directory)
    config = replace(config, head=head or ("scalar" if is_scalar(hf) else "lm"))
    if parts is not None:
        refuse_unmatched(config, parts)
    with torch.device("meta"):
        model = Decoder(config, parts)
        if parts is not None and parts.lora is not None:
            refuse_unmatched_targets(model, parts.lora, Decoder(config, replace(parts, lora=Lora(targets=("*",)))))
    return model, family


def shape(directory: Path, backend: Literal["ptf", "hf"] = "ptf") -> DecoderConfig:
    """The sizes of the model that a backend makes of a directory."""
    if backend == "hf":
        from ptf.model import hf_backend

        return hf_backend.shape(hf_backend.configured(directory))
    hf = read_config(directory)
    return _mapped(family_of(hf), hf, directory)


def materialize(model: Decoder, device: torch.device) -> None:
    """Give a (sharded) meta model memory, keeping its head tied."""
    model.to_empty(device=device)
    if model.config.tied:
        model.head._parameters["weight"] = model.embed._parameters["weight"]


def fill(parameter: Tensor, read: Callable[[Slices], Tensor]) -> None:
    """Write what `read` gives for the slices that this process owns."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
            part = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            if 0 not in shape:
                parameter.to_local().copy_(read(part))
        else:
            parameter.copy_(read(tuple(slice(0, n) for n in parameter.shape)))


def random_init(model: Decoder, seed: int) -> None:
    """Normal weights, unit norms, zero biases; each tensor from a generator of its own, keyed by seed and name, so that sharding changes nothing."""
    own = constructed(model, [n for n, _ in model.named_parameters()], seed)
    for name, parameter in model.named_parameters():
        if name in own:  # of a component of the user's own: as its constructor leaves it
            fill(parameter, own[name].__getitem__)
        else:
            _draw(name, parameter, model.config, seed)
    init_adapters(model, seed)
    fill_buffers(model)


def init_adapters(model: Decoder, seed: int) -> None:
    """Adapters begin from the seed, for no checkpoint of the model has them; with them it computes what it did without."""
    names = adapter_names(model)
    for name, parameter in model.named_parameters():
        if name in names:
            fill(parameter, drawn(name, parameter.shape, seed).__getitem__)


def _draw(name: str, parameter: Tensor, config: DecoderConfig, seed: int) -> None:
    constant = 0.0 if name.endswith(("bias", "sinks")) else float(not config.norm_offset)
    if name.endswith(("norm.weight", "bias", "sinks")):
        fill(parameter, lambda part: torch.full([s.stop - s.start for s in part], constant))
        return
    key = int.from_bytes(hashlib.sha256(f"init/{seed}/{name}".encode()).digest()[:8], "little") >> 1
    rows = config.vocab if _in_vocabulary(name, config) else len(parameter)
    values = torch.empty(rows, *parameter.shape[1:]).normal_(0, config.init_std, generator=torch.Generator().manual_seed(key))
    fill(parameter, partial(Rows(name, name, rows).read, 0, read=lambda _, part: values[part], experts=0))


def _in_vocabulary(name: str, config: DecoderConfig) -> bool:
    """True for the tensors whose last rows may be padding."""
    return name == "embed.weight" or (name == "head.weight" and config.head == "lm")


def links(model: Decoder, family: Family) -> list[Op]:
    """The ops of this model: padding of the vocabulary stays on our side, a scalar head has a name of its own, own components have no ops."""
    other, config = {*own_tensors(model, family), *adapter_names(model)}, model.config
    ops = family.links(n for n, _ in model.named_parameters() if n not in other)
    changed: dict[str, Op] = {name: Rows(name, other, config.vocab) for name, other in _outer(ops) if _in_vocabulary(name, config)}
    if config.head == "scalar":
        changed["head.weight"] = Rename("head.weight", HF_NAME)
    return [changed.get(op.ours[0], op) for op in ops]


def _outer(ops: Sequence[Op]) -> list[tuple[str, str]]:
    return [(op.ours[0], op.theirs(0)[0]) for op in ops if not op.ours[0].startswith("layers.")]


def load_hf(model: Decoder, directory: Path, family: Family, seed: int = 0) -> tuple[str, ...]:
    """Fill the model from safetensors, components of the user's own from the files beside them. Returns the unified names of what the checkpoint
    does not have because a scalar head or an own component is new: these are drawn from `seed`. Raises UserError that lists every missing,
    unexpected or misshapen tensor."""
    parameters = dict(model.named_parameters())
    ops, experts = links(model, family), model.config.experts
    own = own_tensors(model, family)
    beside = own_files(directory, {name: tuple(parameters[name].shape) for name in own})
    new: dict[str, Tensor] = constructed(model, [n for n in own if n not in beside], seed)
    with TensorFiles(directory, family.aliases) as files:
        missing = ("head.weight",) if model.config.head == "scalar" and HF_NAME not in files.names else ()
        ops = [op for op in ops if op.ours != missing]
        shapes = {family.prefix + name: op.shape(parameters[op.ours[0]].shape) for op in ops for name in op.theirs(experts)}
        extra = {n for n in files.names - set(shapes) if not n.startswith(family.carried)}
        ignorable = {f"{family.prefix}lm_head.weight"} if model.config.tied or model.config.head != "lm" else set()
        ignorable |= {HF_NAME} if model.config.head != "scalar" else set()
        if model.parts.own:  # what was replaced may be left over
            usual = family.links(standard(model.config))
            ignorable |= {family.prefix + name for op in usual for name in op.theirs(experts)}
        problems = [f"missing: {n}" for n in sorted(set(shapes) - files.names)]
        problems += [f"unexpected: {n}" for n in sorted(extra - ignorable) if not n.endswith("rotary_emb.inv_freq")]
        for name in sorted(set(shapes) & files.names):
            if files.shape(name) != shapes[name]:
                problems.append(f"wrong shape: {name} is {files.shape(name)}, the config says {shapes[name]}")
        if problems:
            raise UserError(f"model.path: {directory} does not fit its config.json:\n  " + "\n  ".join(problems))
        read = lambda name, part: files.read(family.prefix + name, part)  # noqa: E731
        for op in ops:
            for i, ours in enumerate(op.ours):
                fill(parameters[ours], partial(op.read, i, read=read, experts=experts))
    for name in own:
        fill(parameters[name], beside.get(name) or new[name].__getitem__)
    for name in missing:
        _draw(name, parameters[name], model.config, seed)
    init_adapters(model, seed)
    fill_buffers(model)
    return (*missing, *new)


def copy_hf(model: Decoder, tensors: Mapping[str, Tensor], family: Family) -> None:
    """Fill the model from whole tensors under the names of `hf_tensors`. Raises KeyError for one that is missing."""
    parameters = dict(model.named_parameters())
    experts = model.config.experts
    read = lambda name, part: tensors[family.prefix + name][part]  # noqa: E731
    for op in links(model, family):
        for i, ours in enumerate(op.ours):
            fill(parameters[ours], partial(op.read, i, read=read, experts=experts))
    for name in own_tensors(model, family):
        fill(parameters[name], tensors[OWN + name].__getitem__)


def hf_names(model: Decoder, family: Family) -> set[str]:
    """The names under which `hf_tensors` gives this model's tensors."""
    experts = model.config.experts
    return {family.prefix + n for op in links(model, family) for n in op.theirs(experts)} | {OWN + n for n in own_tensors(model, family)}


def under_hf_names(values: Mapping[str, Tensor], model: Decoder, family: Family) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of the model's weights, or of anything shaped like them, given under our names; a sharded tensor is gathered.
    What has no Hugging Face name comes last, under ours (`own:…`)."""
    whole = lambda name: value.full_tensor() if isinstance(value := values[name], DTensor) else value  # noqa: E731
    for op in links(model, family):
        for name, tensor in zip(op.theirs(model.config.experts), op.write([whole(ours) for ours in op.ours]), strict=True):
            yield family.prefix + name, tensor
    for name in own_tensors(model, family):
        yield OWN + name, whole(name)


def hf_tensors(model: Decoder, family: Family) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) one by one, adapters merged. Every rank must iterate, since each gathers its part."""
    if not isinstance(model, Decoder):  # hf_backend.py
        yield from model.hf_tensors()
        return
    if isinstance(model, FSDPModule):
        model.reshard()  # after a forward pass without a backward the root still shows its copies in the compute dtype
    yield from under_hf_names(Merged(model), model, family)


def save_hf(
    tensors: Iterator[tuple[str, Tensor]], source: Path, directory: Path, *, writes: bool, tokenizer: str | None = None,
    config: Mapping[str, Any] | None = None, manifest: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write safetensors in the source's dtype, its config.json (or `config`), and what else lies beside it except weights; the tokenizer's files
    from its own directory if that is another; components of the user's own in files of theirs (components.py); and `manifest`, with the SHA-256 of
    every file. Every rank calls it; the one that `writes` does. The directory appears only when it is complete."""
    dtype = export_dtype(source)
    temporary = directory.with_name(directory.name + ".tmp")
    shards: list[dict[str, Tensor]] = [{}]
    if writes:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    size = total = 0
    numbers: dict[str, int] = {}
    own: dict[str, dict[str, Tensor]] = {}
    for name, tensor in itertools.chain(tensors, _carried(source) if writes else ()):
        if not writes:
            continue
        tensor = tensor.to("cpu", dtype).contiguous()
        if name.startswith(OWN):
            ours = name.removeprefix(OWN)
            own.setdefault(file_of(ours), {})[ours] = tensor
            continue
        if size and size + tensor.nbytes > SHARD_BYTES:
            _write_shard(temporary, shards)
            size = 0
        shards[-1][name] = tensor
        numbers[name] = len(shards) - 1
        size += tensor.nbytes
        total += tensor.nbytes
    if not writes:
        return
    _write_shard(temporary, shards)
    _name_shards(temporary, len(shards) - 1, numbers, total)
    for file, inside in own.items():
        save_file(inside, temporary / file, metadata={"format": "pt"})
    beside = {f.name: f for d in (source, Path(tokenizer or source)) for f in sorted(d.iterdir()) if f.suffix in (".json", ".jinja", ".txt", ".model")}
    for name, file in beside.items():
        if name not in ("config.json", "rendering.json") and not name.startswith(("model.safetensors", "manifest")):
            (temporary / name).write_bytes(file.read_bytes())
    written = {k: v for k, v in (config or read_config(source)).items() if k != "quantization_config"}  # MXFP4 was dequantised
    (temporary / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    if manifest is not None:
        storage.commit(temporary, dict(manifest))
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(temporary, directory)


def _carried(source: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint that its family does not train but keeps."""
    if (config := read_config(source))["model_type"] not in MODULES:  # hf_backend.py
        return
    family = family_of(config)
    stored = any((source / f"model.safetensors{end}").is_file() for end in ("", ".index.json"))
    if family.carried and stored:
        with TensorFiles(source, family.aliases) as files:
            for name in sorted(n for n in files.names if n.startswith(family.carried)):
                yield name, files.read(name, tuple(slice(0, n) for n in files.shape(name)))


def _write_shard(directory: Path, shards: list[dict[str, Tensor]]) -> None:
    save_file(shards[-1], directory / f"shard-{len(shards) - 1}.safetensors", metadata={"format": "pt"})
    shards[-1] = {}  # its memory is free
    shards.append({})


def _name_shards(directory: Path, count: int, numbers: Mapping[str, int], total: int) -> None:
    if count == 1:
        os.replace(directory / "shard-0.safetensors", directory / "model.safetensors")
        return
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for i, name in enumerate(names):
        os.replace(directory / f"shard-{i}.safetensors", directory / name)
    index = {"metadata": {"total_size": total}, "weight_map": {n: names[i] for n, i in numbers.items()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
