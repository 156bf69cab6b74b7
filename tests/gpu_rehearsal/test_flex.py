"""FlexAttention on a GPU: its block masks are made without waiting for the device."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ptf.model.kernels.attention import Flex, inside_documents
from tests.gpu_rehearsal.host_syncs import HostSyncs


def made() -> tuple[dict[str, int], list[tuple[int, ...]], str]:
    """The host syncs of two masks, the shapes of one's tables, and their device."""
    with FakeTensorMode(), HostSyncs() as found:
        segments, positions = (torch.zeros(2, 65_536, dtype=torch.int64, device="cuda") for _ in range(2))
        attend = inside_documents(segments, positions)
        assert isinstance(attend, Flex)
        attend.mask(None)
        mask = attend.mask(4096)
        assert attend.mask(4096) is mask
    tables = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices]
    return dict(found.counts), [tuple(t.shape) for t in tables], mask.kv_indices.device.type


def test_block_masks_of_64k_tokens_need_tables_only(pretend_cuda):
    syncs, shapes, device = pretend_cuda(made)
    assert syncs == {}
    assert shapes == [(2, 1, 512), *[(2, 1, 512, 512)] * 4]
    assert device == "cuda"
