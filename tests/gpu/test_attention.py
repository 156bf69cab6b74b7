"""The GPU's attention and losses against the CPU's, on packed sequences."""

import pytest
import torch

from ptf.model import bridge
from ptf.model.attention import Attention
from ptf.model.chunked import cross_entropy, token_logprobs
from ptf.model.config import DecoderConfig, Layer, Rope
from ptf.model.kernels.attention import Flex, inside_documents
from ptf.model.layers import LayerFactory
from tests.tiny import checkpoint, packed

ROWS = [[100, 28, 1, 127], [256], [17, 200]]


def attention(window: int | None, sinks: bool) -> Attention:
    """What the backends ask a layer for: window, scale, sinks."""
    layers = (Layer(Rope(10_000.0), window),)
    config = DecoderConfig(97, 64, 4, 2, 32, 96, 1e-6, 256, True, layers, sinks=sinks)
    module = Attention(config, 0, LayerFactory(), "attn")
    if module.sinks is not None:
        module.sinks.data.normal_(0, 1, generator=torch.Generator().manual_seed(1))
    return module


def inputs() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(3, 256, heads, 32, generator=g) for heads in (4, 2, 2)]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_flex_equals_per_document(dtype, bound, window, sinks):
    batch, layer = packed(ROWS, 256), attention(window, sinks)
    real = batch.segments >= 0
    upstream = torch.randn(3, 256, 4, 32, generator=torch.Generator().manual_seed(2)) * real[..., None, None]
    results = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        layer.to(device)
        layer.zero_grad()
        q, k, v = (t.to(device, kind).requires_grad_() for t in inputs())
        attend = inside_documents(batch.segments.to(device), batch.positions.to(device))
        assert isinstance(attend, Flex) == (device == "cuda")
        out = attend(layer, q, k, v)
        (out.float() * upstream.to(device)).sum().backward()
        grads = [t.grad for t in (q, k, v)] + ([layer.sinks.grad] if layer.sinks is not None else [])
        results.append(
            [(out * real.to(device)[..., None, None]).detach().float().cpu(), *(g.float().cpu().clone() for g in grads)]
        )
    for expected, got in zip(*results, strict=True):
        assert (got - expected).abs().max() <= bound * expected.abs().max()


def losses(directory, device: torch.device, dtype: torch.dtype):
    model = bridge.load(directory, device)
    model.to(dtype)
    batch = packed(ROWS, 256).to(device)
    loss = model(
        batch.tokens,
        batch.positions,
        batch.segments,
        lambda x, h: cross_entropy(x, h, batch.targets, batch.loss_weights),
    )
    loss.backward()
    logprobs, *_ = model(
        batch.tokens,
        batch.positions,
        batch.segments,
        lambda x, h: token_logprobs(x, h, batch.targets, batch.loss_weights),
    )
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


def test_attention_is_compiled_once_for_sequences_of_one_shape():
    from torch._dynamo.testing import CompileCounter  # noqa: F401  (its import enables the counters)
    from torch._dynamo.utils import counters

    layer = attention(None, False)
    q, k, v = (t.cuda() for t in inputs())

    def seen(batch):
        return Flex(batch.segments.cuda(), batch.positions.cuda())

    seen(packed(ROWS, 256))(layer, q, k, v)
    counters.clear()
    for seed in range(5):
        seen(packed([[50 + seed, 100], [256 - seed], [9, 9, 9]], 256, seed))(layer, q, k, v)
    assert counters["stats"].get("unique_graphs", 0) == 0
