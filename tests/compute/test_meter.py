"""The speed that MFU divides by: the right GPU's, in the precision that it computes in."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ptf.compute import meter
from ptf.compute.meter import PEAKS, known_gpu, peak_flops
from ptf.compute.world import World
from ptf.train.step_metrics import StepMeter
from tests.child import run_python

GPUS = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200",
    "NVIDIA H20": "H20",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
    "NVIDIA B200": "B200",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA L40": None,
    "NVIDIA A10G": None,
    "NVIDIA GH200 480GB": None,
}


@pytest.mark.parametrize(("name", "found"), GPUS.items())
def test_a_gpu_is_known_by_whole_words(name, found) -> None:
    assert known_gpu(name) == found


def test_every_entry_is_found(monkeypatch) -> None:
    assert {found for found in GPUS.values() if found} == PEAKS.keys()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    assert peak_flops(torch.device("cuda"), "bf16") == 362e12
    assert peak_flops(torch.device("cuda"), "fp32") == 91.6e12


def test_fp32_is_computed_without_tensor_cores() -> None:
    """The peaks of fp32 are those of full products."""
    assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"


PEAK = """
import torch
from ptf.compute.meter import peak_memory_gib
device, gib = torch.device("cpu"), 0.25
peak_memory_gib(device)
before = peak_memory_gib(device)
held = torch.ones(int(gib * 2**28))  # larger than what the allocator keeps when it is freed
del held
assert peak_memory_gib(device) >= before + 0.9 * gib
assert peak_memory_gib(device) < before + 0.5 * gib, "the peak since the last call"
"""


def test_on_a_cpu_the_peak_is_of_memory_that_has_been_freed_since() -> None:
    """In a process of its own, since a rank keeps what it frees (ptf/compute/world.py)."""
    done = run_python("-c", PEAK, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_peak_of_a_cpu_is_that_of_the_fastest_product(monkeypatch) -> None:
    """Of those that a precision may be computed with: without units, bf16 is computed in fp32, too."""
    asked: list[torch.dtype] = []
    speeds = {torch.float32: 3.0, torch.bfloat16: 1.0}
    now = [0.0]

    def product(a: Tensor, b: Tensor) -> Tensor:
        asked.append(a.dtype)
        now[0] += 2 * len(a) ** 3 / speeds[a.dtype]
        return a

    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    cpu = torch.device("cpu")
    assert [peak_flops(cpu, precision, product) for precision in ("bf16", "fp32")] == pytest.approx([3.0, 3.0])
    assert asked == [torch.bfloat16] * 5 + [torch.float32] * 10


def test_an_mfu_above_1_is_never_reported(monkeypatch, capsys) -> None:
    """The peak is measured again; if that is not enough, there is no MFU, and a line says so once."""
    measured = iter([2.0, 1.0, 1.0])
    monkeypatch.setattr(StepMeter, "measured_peak", lambda self: next(measured))
    made = StepMeter.__new__(StepMeter)
    made.peak, made.world, made.said = 1.0, World(), set()
    assert made.mfu(0.5) == {"mfu": 0.5}
    assert made.mfu(1.5) == {"mfu": 0.75}
    assert made.mfu(3.0) == made.mfu(3.0) == {}
    assert capsys.readouterr().out == "train: mfu is left out: 1.500 is above 1, an error of ptf's; please report it\n"
