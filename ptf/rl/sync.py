"""Moving weights from the trainer to an engine so that a wrong copy cannot be sampled from.

The one idea: the trainer says beforehand what it sends (`Manifest`: the version, and a digest for every tensor by Hugging Face name), the
engine checks what arrived against it before it loads anything, and a fixed-prompt canary compares what both then compute, because
engines fuse and pack weights and what they hold can no longer be hashed.
"""

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

Bucket = list[tuple[str, Tensor]]
Buckets = Iterable[Bucket]  # a sequence, which can be looked at twice, or what is still to come (ptf/rl/transfer.py)


BUCKET_BYTES = 256 << 20


class SyncError(RuntimeError):
    """The engine does not hold the weights that the trainer sent. Nothing may be generated from it."""


@dataclass(frozen=True, slots=True)
class Manifest:
    version: int
    digests: Mapping[str, str]  # Hugging Face name → digest, "" where each bucket brings its own; of an adapter, PEFT's names
    adapter: Mapping[str, Any] | None = None  # its adapter_config.json, if that is what was sent: the engine has the base model already


@dataclass(frozen=True, slots=True)
class Receipt:
    """What an engine says it loaded."""

    version: int
    tensors: int
    bytes: int


class OnPath(Sequence[Bucket]):
    """Buckets in files of safetensors, each read when it is looked at."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> Bucket:  # type: ignore[override]
        try:
            return list(load_file(self.files[i]).items())
        except (OSError, SafetensorError) as error:
            raise SyncError(f"a file of the weight sync cannot be read: {self.files[i]}: {error}") from error


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's type, shape and bytes."""
    data = tensor.detach().to("cpu").contiguous()
    sha = hashlib.sha256(f"{data.dtype} {tuple(data.shape)} ".encode())
    sha.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def bucketed(tensors: Iterable[tuple[str, Tensor]], limit: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Group tensors into lists of at most `limit` bytes (one tensor at least)."""
    bucket: Bucket = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def manifest_of(buckets: Buckets, version: int) -> Manifest:
    return Manifest(version, {name: digest(tensor) for bucket in buckets for name, tensor in bucket})


def written(tensors: Iterable[tuple[str, Tensor]], directory: Path, version: int, limit: int = BUCKET_BYTES) -> tuple[OnPath, Manifest]:
    """Buckets in files under `directory`, with their manifest; no more than one is in memory. Those of the version before stay, for an engine that
    is replaced now."""
    for old in directory.glob("*"):
        if old.name != str(version - 1):
            shutil.rmtree(old)
    place = directory / str(version)
    place.mkdir(parents=True)
    files, digests = list[Path](), dict[str, str]()
    for bucket in bucketed(tensors, limit):
        files.append(place / f"{len(files)}.safetensors")
        save_file({name: tensor.contiguous() for name, tensor in bucket}, files[-1])
        digests |= {name: digest(tensor) for name, tensor in bucket}
        bucket.clear()  # before the next one fills
    return OnPath(files), Manifest(version, digests)


def check(buckets: Buckets, manifest: Manifest, held: int) -> Receipt:
    """Compare what arrived with what was sent; `held` is the version the engine has now, -1 before its first sync. Raises SyncError naming every fault.
    Of what is still to come (ptf/rl/transfer.py) the version alone; each of its buckets is compared as it comes."""
    faults: list[str] = []
    if held >= 0 and manifest.version != held + 1:
        faults.append(f"version {manifest.version} was sent, but the engine holds {held}: a sync was lost or repeated")
    if not isinstance(buckets, Sequence):
        if faults:
            raise SyncError(f"weight sync {manifest.version} refused: {faults[0]}")
        return Receipt(manifest.version, len(manifest.digests), 0)
    seen, size = set[str](), 0
    for bucket in buckets:
        for name, tensor in bucket:
            if name in seen:
                faults.append(f"{name} arrived twice")
            elif name not in manifest.digests:
                faults.append(f"{name} was not announced")
            elif digest(tensor) != manifest.digests[name]:
                faults.append(f"{name} arrived changed")
            seen.add(name)
            size += tensor.nbytes
    faults += [f"{name} did not arrive" for name in manifest.digests if name not in seen]
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise SyncError(f"weight sync {manifest.version} refused: " + "; ".join(faults[:5]) + more)
    return Receipt(manifest.version, len(seen), size)
