"""The tensors of a checkpoint directory, read slice by slice from safetensors, one file or many; MXFP4 tensors are
dequantised as they are read.

GPT-OSS stores a matrix `NAME` [.., in, out] in MXFP4 (`mxfp4.py`): its codes as `NAME_blocks` [.., out, in / 32, 16],
its scales as `NAME_scales` [.., out, in / 32].
"""

import contextlib
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ptf.errors import UserError
from ptf.model.checkpoint_mapping import Slices
from ptf.model.mxfp4 import BLOCK, dequantise

ROWS = 4096  # that are compared at once
# ends of the names of output projections, and of the embeddings that they may be tied to
HEADS = (".lm_head.weight", ".embed_out.weight")
EMBEDDINGS = tuple(f".{name}.weight" for name in ("embed_tokens", "wte", "embed_in", "word_embeddings", "embeddings"))


class TensorFiles(contextlib.ExitStack):
    """The tensors of a directory by name.

    `aliases` maps prefixes under which checkpoints store names to the prefixes used here.
    """

    def __init__(self, directory: Path, aliases: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.directory = directory
        self.open: dict[Path, Any] = {}
        self.where: dict[str, tuple[Path, str]] = {}  # name → file, name in the file
        for stored, path in self._stored().items():
            begins = next((b for b in aliases or {} if stored.startswith(b)), None)
            name = stored if begins is None else (aliases or {})[begins] + stored.removeprefix(begins)
            self.where[name] = (path, stored)
        self.packed = packed = {
            n.removesuffix("_blocks")
            for n in self.where
            if n.endswith("_blocks") and n.removesuffix("_blocks") + "_scales" in self.where
        }
        self.names = {n for n in self.where if n.removesuffix("_blocks").removesuffix("_scales") not in packed} | packed

    def _stored(self) -> dict[str, Path]:
        """Return the file of each stored tensor; raise UserError where a file is missing or has another format."""
        index = self.directory / "model.safetensors.index.json"
        single = self.directory / "model.safetensors"
        if index.is_file():
            files = {name: self.directory / file for name, file in weight_map(index).items()}
            if absent := sorted({p.name for p in files.values() if not p.is_file()}):
                raise UserError(f"model.path: {index} names files that do not exist: {', '.join(absent)}")
            return files
        if not single.is_file():
            other = next((f.name for f in sorted(self.directory.glob("pytorch_model*.bin"))), None)
            hint = f"; {other} is in another format: convert it with transformers' save_pretrained" if other else ""
            raise UserError(
                f"model.path: {self.directory} has no model.safetensors (for random weights set model.init: "
                f"random){hint}"
            )
        return dict.fromkeys(self._file(single).keys(), single)

    def _file(self, path: Path) -> Any:
        """Return the open file; raise UserError if it cannot be read."""
        if path not in self.open:
            try:
                self.open[path] = self.enter_context(safe_open(path, "pt"))
            except (SafetensorError, OSError) as error:
                raise UserError(f"model.path: {path} cannot be read: {error}") from error
        return self.open[path]

    def _slice(self, name: str) -> Any:
        """Return the lazy slice of a stored tensor; raise UserError if it cannot be read."""
        path, stored = self.where[name]
        try:
            return self._file(path).get_slice(stored)
        except SafetensorError as error:
            raise UserError(f"model.path: {path} cannot be read: {error}") from error

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, dequantised."""
        if name in self.packed:
            *outer, out, blocks = self._slice(f"{name}_scales").get_shape()
            return (*outer, blocks * BLOCK, out)
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, dequantised."""
        lazy = self._slice(f"{name}_scales" if name in self.packed else name)
        return torch.bfloat16 if name in self.packed else lazy[...].dtype if not lazy.get_shape() else lazy[0:0].dtype

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor, dequantised."""
        return self.read(name, tuple(slice(0, n) for n in self.shape(name)))

    def read(self, name: str, part: Slices) -> Tensor:
        """Read a slice of a tensor, dequantised."""
        if name not in self.packed:
            return self._slice(name)[part] if part else self._slice(name)[...]
        *outer, rows, columns = part
        inside = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
        blocks = self._slice(f"{name}_blocks")[(*outer, columns, inside, slice(None))]
        scales = self._slice(f"{name}_scales")[(*outer, columns, inside)]
        here = slice(rows.start - inside.start * BLOCK, rows.stop - inside.start * BLOCK)
        return dequantise(blocks.flatten(-2), scales, torch.bfloat16)[..., here].transpose(-2, -1)


class Headers(TensorFiles):
    """The same, of which only names, shapes and formats are read: each tensor is one without values."""

    def read(self, name: str, part: Slices) -> Tensor:
        """Return a tensor of the slice's shape on the meta device."""
        return torch.empty([s.stop - s.start for s in part], device="meta")


def has_weights(directory: Path) -> bool:
    """Return whether a directory has tensors that TensorFiles reads."""
    return any((directory / f"model.safetensors{end}").is_file() for end in ("", ".index.json"))


def equal(files: Any, one: str, other: str) -> bool:
    """Return whether two tensors of TensorFiles, or of what reads like them, have the same shape and values, for which
    those of Headers are read."""
    shape = files.shape(one)
    read = functools.partial(TensorFiles.read, files) if isinstance(files, Headers) else files.read
    if shape != files.shape(other):
        return False
    rest = tuple(slice(0, n) for n in shape[1:])
    parts = ((slice(at, min(at + ROWS, shape[0])), *rest) for at in range(0, shape[0], ROWS)) if shape else ((),)
    return all(torch.equal(read(one, part).float(), read(other, part).float()) for part in parts)


def has_own_head(directory: Path) -> bool:
    """Return whether a directory stores an output projection unlike its embedding, of which none can be tied."""
    if not has_weights(directory):
        return False
    files = (file.stat() for file in sorted(directory.glob("*.safetensors")))
    return _has_own_head(directory, tuple((file.st_size, file.st_mtime_ns) for file in files))


@functools.lru_cache(maxsize=64)  # of files as they are now: equal tables are read whole
def _has_own_head(directory: Path, identities: tuple[tuple[int, int], ...]) -> bool:
    with TensorFiles(directory) as files:
        # the shortest: layers that predict further tokens have such tables too
        found = [
            min((n for n in files.names if f".{n}".endswith(ends)), key=len, default="") for ends in (HEADS, EMBEDDINGS)
        ]
        return all(found) and not equal(files, *found)


def weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, by an index; all files lie in the same directory.

    Raise UserError for a file that is not an index, and for one that names a file elsewhere.
    """
    try:
        files = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"model.path: {index} is not an index of tensors: it has no weight_map") from error
    if others := [
        name for name in files.values() if not isinstance(name, str) or Path(name).name != name or name in ("", "..")
    ]:
        raise UserError(f"model.path: {index} names a file that does not lie beside it: {others[0]!r}")
    return files
