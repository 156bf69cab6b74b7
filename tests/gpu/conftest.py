"""These tests need a GPU and nothing beyond torch, transformers, safetensors, pyarrow, fsspec and pydantic:
`make test-gpu`."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))
