"""The pretend GPU itself: it takes GPU branches, checks devices and dtypes, and computes nothing."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.gpu_rehearsal.host_syncs import HostSyncs


def product(first: str, second: str) -> tuple[str, tuple[int, ...], str]:
    with FakeTensorMode():
        a = torch.empty(4, 8, device=first, dtype=torch.bfloat16)
        y = a @ torch.empty(8, 2, device=second, dtype=torch.bfloat16)
    return y.device.type, tuple(y.shape), str(y.dtype)


def test_a_product_of_fake_tensors_is_on_the_gpu(pretend_cuda):
    assert pretend_cuda(product, "cuda", "cuda") == ("cuda", (4, 2), "torch.bfloat16")


def test_tensors_of_two_devices_are_refused(pretend_cuda):
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
        pretend_cuda(product, "cuda", "cpu")


def syncs() -> dict[str, int]:
    with FakeTensorMode(), HostSyncs() as found:
        x = torch.ones(4, device="cuda")
        x += 1  # none
        float(x.sum())
        x.nonzero()
        x.cpu()
        torch.bincount(x.long(), minlength=8)
        torch.ones(4).nonzero_static(size=4)  # on the CPU: none
    return dict(+found.counts)


def test_host_syncs_are_counted_by_their_operation(pretend_cuda):
    expected = {"_local_scalar_dense": 1, "nonzero": 1, "copy to the CPU": 1, "bincount": 1}
    assert pretend_cuda(syncs) == expected
