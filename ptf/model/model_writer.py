"""A Hugging Face directory, written whole or not at all: tensors in files of 4 GiB, config.json, and what lies beside
the weights that the model was made from."""

import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from ptf import storage
from ptf.model.components import OWN, file_of
from ptf.model.model import Carried
from ptf.model.model_files import export_dtype, read_config, stored_dtypes

SHARD_BYTES = 4 << 30
CHAT_TEMPLATES = ("chat_template", "additional_chat_templates/")  # how the names of their files begin


def save_hf(
    tensors: Iterator[tuple[str, Tensor]],
    source: Path,
    directory: Path,
    *,
    writes: bool,
    tokenizer: str | None = None,
    config: Mapping[str, Any] | None = None,
    manifest: Mapping[str, Any] | None = None,
    carried: Iterable[Carried] = (),
    files: Mapping[str, str] | None = None,
) -> None:
    """Write a Hugging Face directory: safetensors, config.json, and the other files of `source`.

    Each tensor gets the dtype that it has in `source`; one that is not there, that of the model. `config` replaces
    the source's config.json; the tokenizer's files come from the directory `tokenizer` if given; components of the
    user's own go to files of their own (components.py); `manifest` is written with the SHA-256 of every file; `carried`
    is what is copied as it is; `files` are texts by name that replace other files. Every rank calls this function;
    the one that `writes` does. The directory appears only when it is complete.
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
    for name, tensor, stored in itertools.chain(trained, carried):
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
    """Copy what lies beside the weights of `source`, and the tokenizer's files from their own directory if given,
    which then has all chat templates."""
    beside: dict[str, Path] = {}
    for place in (source, Path(tokenizer or source)):
        beside = {name: file for name, file in beside.items() if not name.startswith(CHAT_TEMPLATES)}
        found = (*place.iterdir(), *place.glob("additional_chat_templates/*.jinja"))
        beside |= {str(f.relative_to(place)): f for f in found if f.suffix in (".json", ".jinja", ".txt", ".model")}
    for name, file in sorted(beside.items()):
        if name not in ("config.json", "rendering.json") and not name.startswith(("model.safetensors", "manifest")):
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(file.read_bytes())


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
