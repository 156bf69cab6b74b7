"""Products by oneDNN against float64 and against MKL's, and which library a CPU takes."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from ptf.compute import provenance
from ptf.compute.world import World
from ptf.config.sections.model import ModelConfig
from ptf.errors import UserError
from ptf.model.chunked import cross_entropy
from ptf.model.kernels import matrix_product
from ptf.model.kernels.choice import TORCH
from ptf.model.kernels.matrix_product import LEAST, is_faster, linear, multiply, record
from ptf.train.trainer import load_model
from tests.tiny import checkpoint

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def rows(monkeypatch) -> list[int]:
    """Take oneDNN on every CPU, for products of any size; return a list that gets the rows of each product of it."""
    seen, compute = list[int](), matrix_product._product

    def noting(x, weight, bias=None):
        seen.append(x.numel() // x.shape[-1])
        return compute(x, weight, bias)

    monkeypatch.setattr(matrix_product, "_product", noting)
    monkeypatch.setattr(matrix_product, "is_faster", lambda: True)
    monkeypatch.setattr(matrix_product, "LEAST", 0)
    return seen


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@settings(deadline=None, max_examples=40)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    width=st.integers(1, 70),
    columns=st.integers(1, 70),
    bias=st.booleans(),
    layout=st.sampled_from(["whole", "part of a row", "transposed", "expanded gradient"]),
)
def test_values_and_gradients_are_those_of_float64(shape, width, columns, bias, layout):
    x = drawn(*shape, 2 * width)[..., width:] if layout == "part of a row" else drawn(*shape, width)
    x = drawn(width, *shape).movedim(0, -1) if layout == "transposed" else x
    upstream = drawn(1, columns).expand(*shape, columns) if layout == "expanded gradient" else drawn(*shape, columns)
    ours = [t.detach().requires_grad_() for t in (x, drawn(columns, width), *([drawn(columns)] if bias else []))]
    exact = [t.detach().double().requires_grad_() for t in ours]
    out, expected = linear(*ours), F.linear(*exact)
    out.backward(upstream)
    expected.backward(upstream.double())
    assert type(out.grad_fn).__name__ == "_LinearBackward", "oneDNN computed it"
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
    for mine, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_a_gradient_that_nobody_needs_is_not_computed(rows, needs):
    saved = []
    x, weight = (t.requires_grad_(need) for t, need in zip((drawn(9, 5), drawn(7, 5)), needs, strict=True))
    with saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        out = linear(x, weight)
    assert saved == [weight.shape if needs[0] else x.shape], "what the other gradient needs is not kept"
    out.sum().backward()
    assert (x.grad is not None, weight.grad is not None) == needs
    assert rows == [9, 9 if needs[0] else 5], "of two matrices, the one of fewer columns is copied"


@pytest.mark.parametrize(("n", "k", "m"), [(3, 5, 300), (300, 33, 7), (64, 1, 64)])
@pytest.mark.parametrize("add", [True, False])
def test_products_that_are_written_or_added_in_blocks_are_whole(rows, monkeypatch, n, k, m, add):
    monkeypatch.setattr(matrix_product, "BLOCK_BYTES", 4)
    for a, b in ((drawn(n, k), drawn(m, k).t()), (drawn(k, n).t(), drawn(k, m))):
        out = drawn(n, m) if add else torch.full((n, m), torch.nan)
        expected = a @ b + (out if add else 0)
        multiply(a, b, out, add=add)
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert len(rows) == 2 * -(-max(n, m) // 64)


def test_what_is_small_narrow_or_not_there_is_left_to_torch(rows, monkeypatch):
    x, weight = drawn(4, 8), drawn(8, 8)
    for kind in (torch.bfloat16, torch.float64):
        assert linear(x.to(kind), weight.to(kind)).dtype == kind
    assert linear(x.to("meta"), weight.to("meta")).shape == (4, 8)
    with torch._subclasses.FakeTensorMode() as mode:
        assert type(linear(mode.from_tensor(x), mode.from_tensor(weight))).__name__ == "FakeTensor"
    monkeypatch.setattr(matrix_product, "LEAST", LEAST)
    linear(x, weight)
    large = drawn(LEAST // 64, 8)
    TORCH.linear(large, weight)
    assert rows == []
    linear(large, weight)
    assert rows == [LEAST // 64]


@pytest.mark.parametrize("recomputed", ["none", "block", "selective"])
def test_a_models_gradients_are_those_of_torchs_products(rows, tmp_path, recomputed, monkeypatch):
    def gradients() -> dict[str, torch.Tensor]:
        place, tokens = checkpoint(tmp_path / "m"), torch.arange(48).view(2, 24) % 50
        model = load_model(
            place, World(), ModelConfig(path=str(place)), seed=0, precision="fp32", recomputed=recomputed
        )
        given = tokens, torch.arange(24).expand(2, 24), torch.zeros_like(tokens)
        model(*given, lambda x, head: cross_entropy(x, head, tokens, torch.ones(2, 24))).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    ours, calls = gradients(), len(rows)
    monkeypatch.setattr(matrix_product, "is_faster", lambda: False)
    theirs = gradients()
    assert 20 < calls == len(rows)
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], atol=1e-4, rtol=1e-3)


def test_onednn_is_taken_on_amds_cpus_with_avx512(tmp_path, monkeypatch):
    for number, (vendor, capability, there) in enumerate(
        [("AMD", "AVX512", True), ("AMD", "AVX2", True), ("Intel", "AVX512", True), ("AMD", "AVX512", False)]
    ):
        cpus = tmp_path / str(number)
        cpus.write_text(f"vendor_id\t: {'AuthenticAMD' if vendor == 'AMD' else 'GenuineIntel'}\n")
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda there=there: there)
        assert is_faster(cpus) is (number == 0)
    assert not is_faster(tmp_path / "none")


def test_a_run_does_not_continue_and_ranks_do_not_train_with_the_other_library(tmp_path, monkeypatch):
    def made() -> dict:
        place = checkpoint(tmp_path / "m")
        model = load_model(place, World(), ModelConfig(path=str(place)), seed=0, precision="fp32")
        return provenance.made_with(CPU, {}, "t", model.kernels.packages)

    with_it = made()
    with monkeypatch.context() as patch:
        patch.setattr(World, "all_gather_object", lambda self, mine: [mine, {}])
        with pytest.raises(UserError, match="use CPUs of one kind"):
            made()
    assert record(CPU, "bf16") == record(torch.device("cuda"), "fp32") == {}
    monkeypatch.setattr(matrix_product, "is_faster", lambda: False)
    with pytest.raises(UserError, match=r"oneDNN was v.*, is not used"):
        provenance.raise_if_different(with_it, made(), "step 3", False, False)
    provenance.raise_if_different(with_it, made(), "step 3", True, False)
