"""Verification of weight syncs, so that an engine never samples from a wrong copy of the trainer's weights.

The trainer announces what it sends in a `Manifest`. With stored transports (`object_store`, `files`) it has the version
and a digest of every tensor by Hugging Face name, and the engine compares all tensors that arrived before it loads any.
With streamed transports (`ipc`, `nccl`) it has the version and the names, and each bucket is compared with a checksum
of its own as it arrives, when earlier ones may have been loaded: a fault makes the engine unusable. Engines fuse and
pack weights, so the loaded weights cannot be hashed; therefore the log-probs that trainer and engine compute of fixed
prompts, the canary, are compared as well.

Engine and trainer round differently, and in bf16 the largest difference of many tokens grows with their number, so that
no bound separates it from a fault. The mean and the share of tokens beyond a threshold do not grow with it; the largest
difference is only reported.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptf.config.logprob_limits import LogprobLimits

Bucket = list[tuple[str, Tensor]]
# a sequence, which can be read twice, or an iterable of buckets that are still to arrive (ptf/rl/weights/streamed.py)
Buckets = Iterable[Bucket]

MEAN, SHARE, LARGEST = "logprob_diff_mean", "logprob_diff_share", "logprob_diff_max"  # metrics of recipes and steps
SAMPLED_TOKENS = "the engine's and the trainer's log-probs of the sampled tokens"
# of log-probs that differ, for messages
LIKELY_CAUSES = (
    "Either the engine computes otherwise, for example with another precision or attention kernel, or it did not load "
    "the weights that were sent. `ptf check-engine` compares an engine with ptf's own forward pass; if the difference "
    "is one of precision, use the same precision for both or raise the limit"
)


class SyncError(RuntimeError):
    """The engine does not hold the weights that the trainer sent. Nothing may be generated from it."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the trainer sends: the version, and a digest of each tensor."""

    version: int
    # Hugging Face name (for an adapter: PEFT's name) → digest; "" if each bucket carries its own checksum
    digests: Mapping[str, str]
    # adapter_config.json, if an adapter is sent: the engine has the base model already
    adapter: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """An engine's acknowledgement of what it has loaded."""

    version: int
    tensors: int


def checksum(data: Tensor) -> int:
    """Return a checksum of bytes [n], computed on their device; it reads its memory about twenty times.

    It is the sum of the mixed 64-bit words (as in splitmix64, Steele et al. 2014; the last one filled up with zeros),
    each times its own odd number, modulo 2^64. A change of one word always changes it; of several changed words, or
    words that change places, about one case in 2^40 is missed. It is no defence against an attacker.
    """
    whole = len(data) // 8 * 8
    total, step = 0, 8 * WORDS[data.device.type == "cuda"]
    for start in range(0, whole, step):
        part = data[start : min(start + step, whole)]
        words = (part if part.storage_offset() % 8 == 0 else part.clone()).view(torch.int64)
        mixed = words >> 32
        mixed.bitwise_and_(0xFFFFFFFF).bitwise_xor_(words).mul_(-0x40A7B892E31B1A47)  # 0xBF58476D1CE4E5B9
        mixed ^= (mixed >> 29).bitwise_and_((1 << 35) - 1)
        # the odd number of word i is 2 i + 1: that of its place in the part, and twice the part's start
        parts = torch.stack([(mixed * _odd_numbers(data.device)[: len(words)]).sum(), mixed.sum()]).tolist()
        total += parts[0] + 2 * (start // 8) * parts[1]
    if whole < len(data):
        last = int.from_bytes(bytes(data[whole:].tolist()), "little")
        mixed_last = ((last >> 32) ^ last) * 0xBF58476D1CE4E5B9 % 2**64
        total += (mixed_last ^ mixed_last >> 29) * (2 * (whole // 8) + 1)
    return total % 2**64


WORDS = {False: 1 << 15, True: 1 << 23}  # in one part: on a CPU 256 KiB, which its cache holds; on a GPU 64 MiB


@functools.cache
def _odd_numbers(device: torch.device) -> Tensor:
    return torch.arange(WORDS[device.type == "cuda"], device=device) * 2 + 1


def digest(tensor: Tensor) -> str:
    """Return a tensor's type and shape, and the checksum of its bytes, which is computed on its device."""
    data = tensor.detach().contiguous()
    return f"{data.dtype} {tuple(data.shape)} {checksum(data.reshape(-1).view(torch.uint8)):016x}"


def manifest_of(buckets: Buckets, version: int) -> Manifest:
    """Return the manifest of these buckets."""
    return Manifest(version, {name: digest(tensor) for bucket in buckets for name, tensor in bucket})


def check(buckets: Buckets, manifest: Manifest, current: int) -> Receipt:
    """Compare what arrived with what was sent. Raises SyncError with every fault.

    `current` is the version that the engine holds, -1 before its first sync. If the buckets are still to arrive
    (ptf/rl/weights/streamed.py), only the version is compared here; each bucket is compared when it arrives.
    """
    faults: list[str] = []
    if current >= 0 and manifest.version != current + 1:
        faults.append(
            f"version {manifest.version} was sent, but the engine holds {current}: a sync was lost or repeated"
        )
    if isinstance(buckets, Sequence):
        seen = set[str]()
        for name, tensor in (pair for bucket in buckets for pair in bucket):
            if name in seen:
                faults.append(f"{name} arrived twice")
            elif name not in manifest.digests:
                faults.append(f"{name} was not announced")
            elif digest(tensor) != manifest.digests[name]:
                faults.append(f"{name} arrived changed")
            seen.add(name)
        faults += [f"{name} did not arrive" for name in manifest.digests if name not in seen]
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise SyncError(f"weight sync {manifest.version} refused: " + "; ".join(faults[:5]) + more)
    return Receipt(manifest.version, len(manifest.digests))


@dataclass(frozen=True)
class LogprobDifference:
    """The absolute differences between the engine's and the trainer's log-probs of many tokens."""

    mean: float
    share: float  # of the tokens beyond the threshold of the limits
    largest: float
    tokens: int

    @classmethod
    def of(cls, differences: np.ndarray, threshold: float) -> "LogprobDifference":
        """Return the mean and the largest of these differences [n], n at least 1, and the share of the tokens beyond
        `threshold`. A difference that is not a number is beyond every threshold."""
        beyond = ~(differences <= threshold)
        values = differences.astype(np.float64)
        return cls(float(values.mean()), float(beyond.mean()), float(values.max()), len(differences))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step."""
        return {MEAN: self.mean, SHARE: self.share, LARGEST: self.largest}

    def raise_if_beyond(self, limits: LogprobLimits, what: str) -> None:
        """Raise SyncError if the mean or the share exceeds its limit. `what` begins the message: whose log-probs.

        The share may exceed its limit by three standard deviations of the count of tokens beyond the threshold, so that
        a few tokens of a short text do not stop a run. With a limit of 0, the default in fp32, any token does.
        """
        if not self.mean <= limits.mean:
            raise SyncError(
                f"{what} differ by {self.mean:.3g} on average over {self.tokens} tokens "
                f"(the limit is {limits.mean:g}, by rollout.logprob_tolerance), by up to {self.largest:.3g}. "
                f"{LIKELY_CAUSES}"
            )
        if not self.share <= limits.share + 3 * math.sqrt(limits.share / self.tokens):
            raise SyncError(
                f"{what} differ by more than {limits.threshold:g} (by rollout.logprob_tolerance) for "
                f"{self.share:.3%} of {self.tokens} tokens (the limit is {limits.share:.3%}), "
                f"by up to {self.largest:.3g}. {LIKELY_CAUSES}"
            )
