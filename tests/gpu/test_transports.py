"""Weights sent from one process to another that shares its GPU (`ipc`), or has another one (`nccl`)."""

import hashlib
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ptf.rl.weights.ipc import Ipc
from ptf.rl.weights.nccl import Nccl
from ptf.rl.weights.streamed import Transfer

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60
VERSIONS = 2
# in a process of its own: an engine that reads two versions, and prints the SHA-256 of each tensor
ENGINE = """
import pickle, sys
from dataclasses import replace
from tests.gpu.test_transports import digest
for transfer in pickle.loads(bytes.fromhex(sys.argv[1])):
    transfer = replace(transfer, device=sys.argv[2])
    with transfer.reporting_failure():
        received = dict(pair for bucket in transfer for pair in bucket)
    assert all(str(tensor.device) == sys.argv[2] for tensor in received.values())
    found = {name: digest(tensor) for name, tensor in received.items()}
    print(transfer.version, sorted(found.items()), flush=True)
"""


def digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def weights(device: torch.device, version: int) -> list[tuple[str, torch.Tensor]]:
    """Two buffers of 64 MiB hold the first tensor in part; the others share one."""
    shapes = {"large": (24_000, 2_000), "matrix": (1_000, 512), "vector": (37,), "scalar": ()}
    draw = torch.Generator().manual_seed(version)
    return [(name, torch.randn(shape, generator=draw).bfloat16().to(device)) for name, shape in shapes.items()]


@pytest.mark.parametrize("transport", [Ipc, Nccl])
def test_another_process_receives_the_bytes_that_were_sent(device, transport):
    if transport is Nccl and device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL does not connect two processes on one GPU")
    here = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    there = device if device == "cpu" else "cuda:1" if transport is Nccl else "cuda:0"
    sender = transport.sender(here, 1, TIMEOUT_S)
    sent = [weights(here, version) for version in range(VERSIONS)]
    names = frozenset(name for name, _ in sent[0])
    transfers = [Transfer(transport, v, names, (sender.offer,), 1, TIMEOUT_S) for v in range(VERSIONS)]
    command = [sys.executable, "-c", ENGINE, pickle.dumps(transfers).hex(), there]
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as engine,
        ThreadPoolExecutor(1) as beside,
    ):
        sending = beside.submit(lambda: [sender.send(version, tensors) for version, tensors in enumerate(sent)])
        try:
            out, errors = engine.communicate(timeout=3 * TIMEOUT_S)
        finally:
            engine.kill()
        assert engine.returncode == 0, errors[-2000:]
        sending.result(TIMEOUT_S)
    expected = [sorted((name, digest(tensor)) for name, tensor in tensors) for tensors in sent]
    assert out.splitlines() == [f"{version} {sums}" for version, sums in enumerate(expected)]
    assert expected[0] != expected[1]
