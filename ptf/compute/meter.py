"""The peak FLOP/s of a device, by which MFU divides, and the peak memory of a process."""

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]

# dense TFLOP/s from the vendors' data sheets: in bf16, and in fp32 without tensor cores, because TF32 is never enabled
PEAKS = {
    "H200": (989.0, 67.0),
    "H100": (989.0, 67.0),
    "H100 NVL": (835.0, 60.0),
    "H100 PCIe": (756.0, 51.0),
    "H20": (148.0, 44.0),
    "A100": (312.0, 19.5),
    "L4": (121.0, 30.3),
    "L40S": (362.0, 91.6),
    "RTX 4090": (165.0, 82.6),
    "B200": (2250.0, 75.0),
}
OTHERS = {"MIG", "Laptop"}  # a slice of a GPU, or another GPU of the same name


def known_gpu(name: str) -> str | None:
    """Return the key of PEAKS for a device's name, or None: all words of the key occur in the name. If several keys
    match, it is the one with the most words."""
    words = set(re.split(r"[^A-Za-z0-9]+", name))
    found = [key for key in PEAKS if words.issuperset(key.split()) and not words & OTHERS]
    return max(found, key=lambda key: len(key.split()), default=None)


def peak_flops(device: torch.device, precision: str, product: Product = F.linear) -> float:
    """Return the device's FLOP/s: from the table for a known GPU, else measured by `product` (x · weightᵀ), with which
    the model computes (best of 5)."""
    if device.type == "cuda" and (key := known_gpu(torch.cuda.get_device_name(device))):
        return PEAKS[key][precision == "fp32"] * 1e12
    dtypes = [torch.float32] if precision == "fp32" else [torch.bfloat16]
    if device.type == "cpu" and precision == "bf16":  # faster in fp32 without units for bf16
        dtypes.append(torch.float32)
    n, best = 8192 if device.type == "cuda" else 768, 0.0
    for dtype in dtypes:
        a = torch.randn(n, n, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
        for _ in range(5):
            start = time.perf_counter()
            product(a, a)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = max(best, 2 * n**3 / (time.perf_counter() - start))
    return best


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak of the GPU memory that this process has allocated since the last call; without a GPU, the peak of
    its resident memory."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**30
    else:
        status = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 2**20  # in KiB
    reset_peak_memory(device)
    return peak


def reset_peak_memory(device: torch.device | None = None) -> None:
    """Let the peaks begin anew with the memory that is in use now: that of GPU memory, and that of resident memory.

    Where the system does not let a process reset the latter (proc(5), `clear_refs`), it is of the time since the
    process started.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats(None if device is None or device.type == "cpu" else device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
