"""Products by oneDNN against float64 and against torch's own, and which library a CPU takes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from ptf.compute import provenance
from ptf.errors import UserError
from ptf.model import matrix_product
from ptf.model.cpu_kernels import library as cpu_kernels
from ptf.model.head import Head
from ptf.model.matrix_product import (
    LEAST,
    VARIABLE,
    add_product,
    has_fast_onednn,
    left_to_torch,
    library,
    linear,
    write_product,
)
from ptf.model.projection import Chunks, Projection
from tests.tiny import checkpoint

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def onednn(monkeypatch):
    """Take oneDNN on every CPU, and for products of any size."""
    monkeypatch.setenv(VARIABLE, "onednn")
    monkeypatch.setattr(matrix_product, "LEAST", 0)
    library.cache_clear()
    yield
    library.cache_clear()


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def noted_calls(monkeypatch) -> list[int]:
    """Return a list that gets the rows of each product of oneDNN."""
    rows, compute = [], matrix_product._product

    def noting(x, weight, bias=None):
        rows.append(x.numel() // x.shape[-1])
        return compute(x, weight, bias)

    monkeypatch.setattr(matrix_product, "_product", noting)
    return rows


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    width=st.integers(1, 70),
    columns=st.integers(1, 70),
    bias=st.booleans(),
    layout=st.sampled_from(["whole", "part of a row", "transposed", "expanded gradient"]),
)
def test_values_and_gradients_are_those_of_float64(rows, width, columns, bias, layout):
    x = drawn(*rows, width)
    if layout == "part of a row":
        x = drawn(*rows, 2 * width)[..., width:]
    elif layout == "transposed":
        x = drawn(width, *rows).movedim(0, -1)
    weight, offset = drawn(columns, width), drawn(columns) if bias else None
    upstream = drawn(1, columns).expand(*rows, columns) if layout == "expanded gradient" else drawn(*rows, columns)
    given_ = [t.detach().requires_grad_() for t in (x, weight, *([offset] if bias else []))]
    exact = [t.detach().double().requires_grad_() for t in given_]
    out, expected = linear(*given_), F.linear(*exact)
    out.backward(upstream)
    expected.backward(upstream.double())
    assert type(out.grad_fn).__name__ == "_LinearBackward", "oneDNN computed it"
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(given_, exact, strict=True):
        assert ours.grad.shape == ours.shape
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_a_gradient_that_nobody_needs_is_not_computed(monkeypatch, needs):
    calls, saved = noted_calls(monkeypatch), []
    x, weight = (t.requires_grad_(need) for t, need in zip((drawn(9, 5), drawn(7, 5)), needs, strict=True))
    with saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        out = linear(x, weight)
    assert saved == [weight.shape if needs[0] else x.shape], "what the other gradient needs is not kept"
    out.sum().backward()
    assert (x.grad is not None, weight.grad is not None) == needs
    assert calls == [9, 9 if needs[0] else 5], "of two matrices, the one of fewer columns is copied"


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 70), st.integers(1, 70))
def test_a_transposed_matrix_is_laid_out_with_the_same_bits(rows, columns):
    x = drawn(rows, columns)
    cpu_kernels.library()
    assert torch.equal(matrix_product._in_rows(x.t()), x.t())
    assert matrix_product._in_rows(x.t()).is_contiguous()


@pytest.mark.parametrize(("rows", "width", "columns"), [(3, 5, 7), (70, 33, 300), (1, 64, 64)])
def test_products_that_are_written_or_added_in_blocks_are_whole(monkeypatch, rows, width, columns):
    monkeypatch.setattr(matrix_product, "BLOCK_BYTES", 4 * 64 * rows)
    calls = noted_calls(monkeypatch)
    x, weight, out = drawn(rows, width), drawn(columns, width), drawn(rows, columns)
    assert write_product(x, weight, out) is out
    torch.testing.assert_close(out, x @ weight.t(), atol=1e-4, rtol=1e-4)
    grad, total = drawn(rows, columns), drawn(columns, width)
    expected = total + grad.t() @ x
    add_product(total, grad, x)
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)
    assert len(calls) >= 2


def test_what_is_small_narrow_distributed_or_not_there_is_left_to_torch(monkeypatch):
    calls = noted_calls(monkeypatch)
    x, weight = drawn(4, 8), drawn(8, 8)
    for kind in (torch.bfloat16, torch.float64):
        assert linear(x.to(kind), weight.to(kind)).dtype == kind
    assert linear(x.to("meta"), weight.to("meta")).shape == (4, 8)
    with torch._subclasses.FakeTensorMode() as mode:
        assert type(linear(mode.from_tensor(x), mode.from_tensor(weight))).__name__ == "FakeTensor"
    monkeypatch.setattr(matrix_product, "LEAST", LEAST)
    linear(x, weight)
    with left_to_torch():
        linear(drawn(LEAST // 64, 8), weight)
    assert calls == []
    linear(drawn(LEAST // 64, 8), weight)
    assert calls == [LEAST // 64]


def test_a_slice_of_a_transposed_weight_is_not_left_to_the_slow_kernel(monkeypatch):
    """oneDNN has no fast kernel for a weight whose rows and columns are both apart."""
    asked = []
    monkeypatch.setattr(matrix_product, "OPERATOR", lambda x, weight, *_: asked.append(weight.is_contiguous()))
    weight = drawn(30, 20)
    for one in (weight, weight.t(), weight[:7], weight.t()[:7]):
        matrix_product._product(drawn(4, one.shape[1]), one)
    assert asked == [True, False, True, True]


def test_ranks_with_different_libraries_are_refused(monkeypatch):
    from ptf.compute.world import World
    from ptf.train.trainer import products

    assert "oneDNN" in products(World(), "fp32")
    monkeypatch.setattr(World, "all_gather_object", lambda self, value: [value, {}])
    with pytest.raises(UserError, match="PTF_MATRIX_PRODUCTS=torch"):
        products(World(), "fp32")


def test_a_head_in_chunks_gives_the_gradients_of_torchs_products(monkeypatch):
    def gradients() -> list[torch.Tensor]:
        head = Head(drawn(90, 16), 90)
        x, chunks = drawn(40, 16), Chunks(40, 24, 9)
        projection = Projection(x, head, chunks, needs=(True, True, False))
        for block in chunks:
            logprobs = projection.logprobs(block)
            projection.accumulate(block, logprobs.exp_(), torch.ones(block.stop - block.start))
        found = projection.gradients()
        assert found[0] is not None
        assert found[1] is not None
        return [found[0], found[1]]

    calls = noted_calls(monkeypatch)
    ours = gradients()
    assert len(calls) == 6
    monkeypatch.setattr(matrix_product, "LEAST", 1 << 40)
    for a, b in zip(ours, gradients(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("recomputed", ["none", "block", "selective"])
def test_a_models_gradients_are_those_of_torchs_products(tmp_path, monkeypatch, recomputed):
    from ptf.compute.world import World
    from ptf.config.sections.model import ModelConfig
    from ptf.model.chunked import cross_entropy
    from ptf.train.trainer import load_model

    place = checkpoint(tmp_path / "m")

    def gradients() -> tuple[float, dict[str, torch.Tensor]]:
        spec = ModelConfig(path=str(place))
        model, _ = load_model(place, World(), spec, seed=0, precision="fp32", recomputed=recomputed)
        tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 50, (2, 24)))
        positions = torch.arange(24).expand(2, 24)
        loss = model(
            tokens,
            positions,
            torch.zeros(2, 24, dtype=torch.long),
            lambda x, head: cross_entropy(x, head, tokens, torch.ones(2, 24)),
        )
        loss.backward()
        return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    calls = noted_calls(monkeypatch)
    loss, ours = gradients()
    assert len(calls) > 20
    monkeypatch.setattr(matrix_product, "LEAST", 1 << 40)
    calls.clear()
    other, theirs = gradients()
    assert calls == []
    assert loss == pytest.approx(other, rel=1e-5)
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], atol=1e-4, rtol=1e-3)


def test_flops_are_counted_as_torch_counts_its_own_products(monkeypatch):
    x, weight = drawn(6, 8).requires_grad_(), drawn(10, 8).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        linear(x, weight).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 6 * 8 * 10


@pytest.mark.parametrize(
    ("cpuinfo", "capability", "fast"),
    [
        ("vendor_id\t: AuthenticAMD\n", "AVX512", True),
        ("vendor_id\t: AuthenticAMD\n", "AVX2", False),
        ("vendor_id\t: GenuineIntel\n", "AVX512", False),
        (None, "AVX512", False),
    ],
)
def test_onednn_is_taken_on_amds_cpus_with_avx512(tmp_path, monkeypatch, cpuinfo, capability, fast):
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert has_fast_onednn(tmp_path / "cpuinfo") is fast
    monkeypatch.setattr(matrix_product, "has_fast_onednn", lambda: fast)
    monkeypatch.delenv(VARIABLE)
    library.cache_clear()
    assert library() == ("onednn" if fast else "torch")


def test_a_library_that_is_not_there_is_refused(monkeypatch):
    for value, message in (("mkl", "it may be torch or onednn"), ("onednn", "built without oneDNN")):
        monkeypatch.setenv(VARIABLE, value)
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        library.cache_clear()
        with pytest.raises(UserError, match=message):
            library()


def test_a_run_does_not_continue_with_the_other_library(monkeypatch):
    def made() -> dict:
        library.cache_clear()
        return provenance.made_with(CPU, {}, "t", matrix_product.record(CPU, "fp32"))

    with_it = made()
    monkeypatch.setenv(VARIABLE, "torch")
    without = made()
    assert "oneDNN" in with_it["packages"]
    assert "oneDNN" not in without["packages"]
    with pytest.raises(UserError, match=r"oneDNN was v.*, is not used"):
        provenance.raise_if_different(with_it, without, "step 3", False, False)
    provenance.raise_if_different(with_it, made(), "step 3", True, False)
    monkeypatch.setenv(VARIABLE, "onednn")
    library.cache_clear()
    assert matrix_product.record(CPU, "bf16") == matrix_product.record(torch.device("cuda"), "fp32") == {}
