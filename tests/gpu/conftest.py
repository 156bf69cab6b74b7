"""These tests need a GPU and nothing beyond torch, transformers, safetensors, pyarrow, fsspec, pydantic and pyyaml:
`make test-gpu`. With PTF_GPU_TESTS=cpu those that compare a device with the CPU compare the CPU with itself, so that
the tests themselves are tried where there is no GPU (tests/gpu_rehearsal/test_on_the_day.py)."""

import os

import pytest
import torch

ON_CPU = os.environ.get("PTF_GPU_TESTS") == "cpu"


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available() and not (ON_CPU and "device" in item.fixturenames):
                item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


@pytest.fixture
def device() -> str:
    """The device that is compared with the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"
