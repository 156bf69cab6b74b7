"""The transports `object_store` and `files`, which collect all weights before an engine reads them.

`object_store` keeps all buckets in host memory, from where the launcher passes them to the engines. `files` writes each
bucket to a safetensors file, so that only one is in memory, and the engines read the files. Either way the manifest has
a digest of every tensor, and an engine checks all of them before it changes anything.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import override

from ptf.config.transports import TRANSPORTS
from ptf.rl.cluster import Cluster, RoleGroup
from ptf.rl.weights.transport import Transport
from ptf.rl.weights.verification import Bucket, Buckets, Manifest, Receipt, SyncError, digest

BUCKET_BYTES = 256 << 20


class Stored(Transport):
    """Through host memory, all tensors at once, or through files in the run's directory."""

    @override
    def open(self, policy: RoleGroup, version: int) -> tuple[Buckets, Manifest]:
        directory = self.directory if TRANSPORTS[self.name].in_files else None
        return policy.call("collect_weights", version, directory, self.adapter)

    @override
    def send(
        self, cluster: Cluster, policy: RoleGroup, rollout: RoleGroup, weights: Buckets, manifest: Manifest
    ) -> Receipt:
        with cluster.phase(rollout, "sync"):
            return rollout.call("load", weights, manifest)


class BucketFiles(Sequence[Bucket]):
    """Buckets in safetensors files, each read when it is accessed."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> Bucket:  # type: ignore[override]
        try:
            return list(load_file(self.files[i]).items())
        except (OSError, SafetensorError) as error:
            raise SyncError(f"a file of the weight sync cannot be read: {self.files[i]}: {error}") from error


def collect(tensors: Iterable[tuple[str, Tensor]], version: int) -> tuple[Buckets, Manifest]:
    """Copy tensors to host memory, and return the buckets with their manifest."""
    digests: dict[str, str] = {}
    buckets = list(into_buckets(tensors, digests))
    return buckets, Manifest(version, digests)


def into_buckets(
    tensors: Iterable[tuple[str, Tensor]], digests: dict[str, str], limit: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Yield copies of tensors in host memory, in lists of at most `limit` bytes; a larger tensor is a list of its own.

    Their digests are added to `digests`, computed on their device, so that the copy is verified too.
    """
    bucket, size = Bucket(), 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        digests[name] = digest(tensor)
        bucket.append((name, tensor.to("cpu", copy=True)))
        size += tensor.nbytes
    if bucket:
        yield bucket


def write_buckets(
    tensors: Iterable[tuple[str, Tensor]], directory: Path, version: int, limit: int = BUCKET_BYTES
) -> tuple[BucketFiles, Manifest]:
    """Write buckets to files under `directory` and return them with their manifest.

    At most one bucket is in memory. The files of the version before stay, for an engine that is being replaced.
    """
    for old in directory.glob("*"):
        if old.name != str(version - 1):
            shutil.rmtree(old)
    subdirectory = directory / str(version)
    subdirectory.mkdir(parents=True)
    files, digests = list[Path](), dict[str, str]()
    for bucket in into_buckets(tensors, digests, limit):
        files.append(subdirectory / f"{len(files)}.safetensors")
        save_file({name: tensor.contiguous() for name, tensor in bucket}, files[-1])
        bucket.clear()  # before the next one fills
    return BucketFiles(files), Manifest(version, digests)
