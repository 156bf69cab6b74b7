"""The way from a Hugging Face checkpoint into our decoder and back.

The one idea: a family's list of names is read in both directions, and a tensor is read from safetensors only in the slice that this
process owns, so that loading a sharded model needs no whole copy anywhere.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ptf import storage
from ptf.errors import UserError
from ptf.model.decoder import Decoder
from ptf.model.families import Family, family_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARD_BYTES = 4 << 30
Slices = tuple[slice, ...]


def locate(path: str, revision: str | None = None, cache: str | None = None) -> Path:
    """The local directory of a model: a directory (of versions: the one its pointer names), a URI (copied into `cache`), or a
    Hugging Face id, through its cache. Raises UserError if there is none or it has no config.json."""
    if storage.exists(f"{path}/latest.json"):
        path = f"{path}/{json.loads(storage.read_text(f'{path}/latest.json'))['version']}"
    if "://" in path:
        local = Path(storage.localize(path, cache or os.path.join("runs", "models")))
    elif os.path.isdir(path):
        local = Path(path)
    elif path.count("/") == 1 and not path.startswith((".", "/", "~")):
        local = _from_hub(path, revision)
    else:
        raise UserError(f"model.path: there is no directory {path}")
    if not (local / "config.json").is_file():
        raise UserError(f"model.path: {path} is not a model: it has no config.json")
    return local


def _from_hub(path: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]))
    except Exception as error:  # the hub raises a dozen kinds; each means that the model is not to be had
        why = str(error).strip().split("\n")[0]
        raise UserError(f"model.path: {path} is no directory here, and as a Hugging Face id it cannot be had: {why}") from error


def read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def export_dtype(directory: Path) -> torch.dtype:
    """What a checkpoint's weights are stored in, by its config.json."""
    config = read_config(directory)
    return DTYPES[config.get("dtype") or config.get("torch_dtype") or "float32"]


def build(directory: Path) -> tuple[Decoder, Family]:
    """A decoder of the right shape on the meta device: no memory yet."""
    hf = read_config(directory)
    family = family_of(hf)
    with torch.device("meta"):
        return Decoder(family.config(hf)), family


def materialize(model: Decoder, device: torch.device) -> None:
    """Give a (sharded) meta model memory, keeping its head tied."""
    model.to_empty(device=device)
    if model.config.tied:
        model.head._parameters["weight"] = model.embed._parameters["weight"]


def _fill(parameter: Tensor, read: Callable[[Slices], Tensor]) -> None:
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
    """Normal weights and unit norms; each tensor from a generator of its own, keyed by seed and name, so that sharding changes nothing."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            _fill(parameter, lambda part: torch.ones([s.stop - s.start for s in part]))
            continue
        key = int.from_bytes(hashlib.sha256(f"init/{seed}/{name}".encode()).digest()[:8], "little") >> 1
        values = torch.empty(parameter.shape).normal_(0, model.config.init_std, generator=torch.Generator().manual_seed(key))
        _fill(parameter, values.__getitem__)


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name → the safetensors file that holds it."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    try:
        if index.is_file():
            return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        if not single.is_file():
            raise UserError(f"model.path: {directory} has no model.safetensors (for random weights set model.init: random)")
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single)
    except SafetensorError as error:
        raise UserError(f"model.path: {single} cannot be read: {error}") from error


def load_hf(model: Decoder, directory: Path, family: Family) -> None:
    """Fill the model from safetensors. Raises UserError that lists every missing, unexpected or misshapen tensor."""
    files = _tensor_files(directory)
    names = family.names(model.config)
    wanted = set(names.values())
    ignorable = {"lm_head.weight"} if model.config.tied else set()
    problems = [f"missing: {n}" for n in sorted(wanted - set(files))]
    problems += [f"unexpected: {n}" for n in sorted(set(files) - wanted - ignorable)]
    parameters = {names[ours]: p for ours, p in model.named_parameters()}
    handles: dict[Path, Any] = {}
    try:
        for name in sorted(wanted & set(files)):
            path = files[name]
            if path not in handles:
                handles[path] = safe_open(path, "pt").__enter__()
            view = handles[path].get_slice(name)
            if tuple(view.get_shape()) != tuple(parameters[name].shape):
                problems.append(f"wrong shape: {name} is {tuple(view.get_shape())}, the config says {tuple(parameters[name].shape)}")
            elif not problems:
                _fill(parameters[name], lambda part, view=view: view[part])
    except (SafetensorError, OSError) as error:
        raise UserError(f"model.path: {directory} cannot be read: {error}") from error
    finally:
        for handle in handles.values():
            handle.__exit__(None, None, None)
    if problems:
        raise UserError(f"model.path: {directory} does not fit its config.json:\n  " + "\n  ".join(problems))


def hf_tensors(model: Decoder, family: Family) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) one by one. Every rank must iterate, since each gathers its part."""
    names = family.names(model.config)
    if isinstance(model, FSDPModule):
        model.reshard()  # after a forward pass without a backward the root still shows its copies in the compute dtype
    for ours, parameter in model.named_parameters():
        data = parameter.detach()
        yield names[ours], data.full_tensor() if isinstance(data, DTensor) else data


def save_hf(tensors: Iterator[tuple[str, Tensor]], source: Path, directory: Path, *, writes: bool, tokenizer: str | None = None) -> None:
    """Write safetensors in the source's dtype, its config.json, and what else lies beside it except weights; the tokenizer's files from
    its own directory if that is another. Every rank calls it; the one that `writes` does. The directory appears only when it is complete."""
    dtype = export_dtype(source)
    temporary = directory.with_name(directory.name + ".tmp")
    shards: list[dict[str, Tensor]] = [{}]
    if writes:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    size = total = 0
    weight_map: dict[str, int] = {}
    for name, tensor in tensors:
        if not writes:
            continue
        tensor = tensor.to("cpu", dtype).contiguous()
        if size and size + tensor.nbytes > SHARD_BYTES:
            _write_shard(temporary, shards)
            size = 0
        shards[-1][name] = tensor
        weight_map[name] = len(shards) - 1
        size += tensor.nbytes
        total += tensor.nbytes
    if not writes:
        return
    _write_shard(temporary, shards)
    _name_shards(temporary, len(shards) - 1, weight_map, total)
    beside = {f.name: f for d in (source, Path(tokenizer or source)) for f in sorted(d.iterdir()) if f.suffix in (".json", ".jinja", ".txt", ".model")}
    for name, file in beside.items():
        if name != "config.json" and not name.startswith(("model.safetensors", "manifest")):
            (temporary / name).write_bytes(file.read_bytes())
    (temporary / "config.json").write_bytes((source / "config.json").read_bytes())
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(temporary, directory)


def _write_shard(directory: Path, shards: list[dict[str, Tensor]]) -> None:
    save_file(shards[-1], directory / f"shard-{len(shards) - 1}.safetensors", metadata={"format": "pt"})
    shards[-1] = {}  # its memory is free
    shards.append({})


def _name_shards(directory: Path, count: int, weight_map: Mapping[str, int], total: int) -> None:
    if count == 1:
        os.replace(directory / "shard-0.safetensors", directory / "model.safetensors")
        return
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for i, name in enumerate(names):
        os.replace(directory / f"shard-{i}.safetensors", directory / name)
    index = {"metadata": {"total_size": total}, "weight_map": {n: names[i] for n, i in weight_map.items()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
