"""The GPU's attention and losses against the CPU's, on packed rows."""

import pytest
import torch

from ptf.model import bridge
from ptf.model.attention import Flex, PerDocument, backend
from ptf.model.chunked import cross_entropy, token_logprobs
from tests.tiny import checkpoint, packed

ROWS = [[100, 28, 1, 127], [256], [17, 200]]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_flex_equals_per_document(dtype, bound):
    batch = packed(ROWS, 256)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 256, heads, 32, generator=g) for heads in (4, 2, 2))
    expected = PerDocument(batch.segments)(0, q, k, v)
    got = Flex(batch.segments.cuda())(0, *(t.to("cuda", dtype) for t in (q, k, v))).float().cpu()
    real = batch.segments >= 0
    assert (got - expected)[real].abs().max() <= bound * expected[real].abs().max()


def test_the_backend_of_a_gpu_is_flex():
    assert backend(torch.device("cuda")) is Flex


def losses(directory, device: torch.device, dtype: torch.dtype):
    model, family = bridge.build(directory)
    bridge.materialize(model, device)
    bridge.load_hf(model, directory, family)
    model.to(dtype)
    batch = packed(ROWS, 256).to(device)
    loss = model(batch.tokens, batch.positions, batch.segments, lambda x, h: cross_entropy(x, h, batch.targets, batch.weights))
    loss.backward()
    logprobs, _ = model(batch.tokens, batch.positions, batch.segments, lambda x, h: token_logprobs(x, h, batch.targets, batch.weights))
    grads = {n: p.grad.float().cpu() for n, p in model.named_parameters()}
    return float(loss.detach()), logprobs.detach().float().cpu(), grads


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
def test_losses_and_gradients_equal_the_cpus(tmp_path, dtype, bound):
    directory = checkpoint(tmp_path / "m")
    loss, logprobs, grads = losses(directory, torch.device("cpu"), torch.float32)
    on_gpu = losses(directory, torch.device("cuda"), dtype)
    assert on_gpu[0] == pytest.approx(loss, rel=bound)
    assert (on_gpu[1] - logprobs).abs().max() <= bound * logprobs.abs().max()
    for name, grad in grads.items():
        assert (on_gpu[2][name] - grad).norm() <= bound * grad.norm(), name


def test_attention_is_compiled_once_for_rows_of_one_shape():
    from torch._dynamo.testing import CompileCounter  # noqa: F401  (its import enables the counters)
    from torch._dynamo.utils import counters

    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 256, heads, 32, generator=g).cuda() for heads in (4, 2, 2))
    Flex(packed(ROWS, 256).segments.cuda())(0, q, k, v)
    counters.clear()
    for seed in range(5):
        Flex(packed([[50 + seed, 100], [256 - seed], [9, 9, 9]], 256, seed).segments.cuda())(0, q, k, v)
    assert counters["stats"].get("unique_graphs", 0) == 0
