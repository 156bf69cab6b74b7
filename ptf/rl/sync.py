"""Moving weights from the trainer to an engine so that a wrong copy cannot be sampled from.

The one idea: the trainer says beforehand what it sends (`Manifest`: the version, and a digest for every tensor by Hugging Face name), the
engine checks what arrived against it before it loads anything, and a fixed-prompt canary compares what both then compute, because
engines fuse and pack weights and what they hold can no longer be hashed.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Buckets = list[list[tuple[str, Tensor]]]


class SyncError(RuntimeError):
    """The engine does not hold the weights that the trainer sent. Nothing may be generated from it."""


@dataclass(frozen=True, slots=True)
class Manifest:
    version: int
    digests: Mapping[str, str]  # Hugging Face name → digest


@dataclass(frozen=True, slots=True)
class Receipt:
    """What an engine says it loaded."""

    version: int
    tensors: int
    bytes: int


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's type, shape and bytes."""
    data = tensor.detach().to("cpu").contiguous()
    sha = hashlib.sha256(f"{data.dtype} {tuple(data.shape)} ".encode())
    sha.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def bucketed(tensors: Iterable[tuple[str, Tensor]], limit: int = 256 << 20) -> Iterator[list[tuple[str, Tensor]]]:
    """Group tensors into lists of at most `limit` bytes (one tensor at least)."""
    bucket: list[tuple[str, Tensor]] = []
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


def check(buckets: Buckets, manifest: Manifest, held: int) -> Receipt:
    """Compare what arrived with what was sent; `held` is the version the engine has now, -1 before its first sync. Raises SyncError naming every fault."""
    faults: list[str] = []
    if held >= 0 and manifest.version != held + 1:
        faults.append(f"version {manifest.version} was sent, but the engine holds {held}: a sync was lost or repeated")
    seen: dict[str, Tensor] = {}
    for bucket in buckets:
        for name, tensor in bucket:
            if name in seen:
                faults.append(f"{name} arrived twice")
            seen[name] = tensor
    faults += [f"{name} did not arrive" for name in manifest.digests if name not in seen]
    for name, tensor in seen.items():
        if name not in manifest.digests:
            faults.append(f"{name} was not announced")
        elif digest(tensor) != manifest.digests[name]:
            faults.append(f"{name} arrived changed")
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise SyncError(f"weight sync {manifest.version} refused: " + "; ".join(faults[:5]) + more)
    return Receipt(manifest.version, len(seen), sum(t.nbytes for t in seen.values()))
