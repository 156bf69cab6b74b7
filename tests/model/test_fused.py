"""Kernels of other packages: when they are chosen, and that ptf calls them rightly. The packages are stand-ins in plain
PyTorch (stand_ins.py); tests/gpu/test_fused.py compares the real ones."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ptf.compute.world import World
from ptf.errors import UserError
from ptf.meshes import Meshes
from ptf.model.chunked import cross_entropy
from ptf.model.config import DecoderConfig, Layer, Rope
from ptf.model.decoder import Decoder
from ptf.model.kernels import attention, fused
from ptf.model.kernels.attention import PerDocument
from ptf.model.kernels.choice import Kernels
from ptf.model.kernels.delta_rule import Chunks, chunked
from ptf.model.kernels.elementwise import clamped, gated, gelu_tanh
from ptf.model.kernels.fused import Flash, Flash4, Package, packages_of, varlen_of
from ptf.model.layers import LayerFactory
from ptf.model.recompute import Recompute
from ptf.model.sharding import parallelize
from ptf.train import trainer
from tests.model import stand_ins
from tests.model.test_attention import config_of, model_from
from tests.tiny import packed

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
BOTH = {"flash_attn": "2.8.4", "liger_kernel": "0.8.2"}
ROWS = [[10, 20, 18], [30, 1], [1] * 7]
WIDTH = 48


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.installed(monkeypatch)
    monkeypatch.setattr(fused, "installed", BOTH.get)
    monkeypatch.setattr(fused, "capability", lambda device: (8, 0))


class Asked:
    """What an `Attend` asks a layer for."""

    sinks = None

    def __init__(self, window: int | None) -> None:
        self.window, self.scale = window, 0.3


def results(attend: Any, window: int | None, real: Tensor, heads: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """The output at real tokens, and the gradients of queries, keys and values."""
    g = torch.Generator().manual_seed(0)
    shape = real.shape
    q, k, v = (torch.randn(*shape, n, 8, generator=g, dtype=dtype).requires_grad_() for n in (*heads, heads[1]))
    out = attend(Asked(window), q, k, v)
    upstream = torch.randn(out.shape, generator=g, dtype=dtype)
    (torch.where(real[..., None, None], out, 0) * upstream).sum().backward()
    return [torch.where(real[..., None, None], out, 0).detach(), *(t.grad for t in (q, k, v) if t.grad is not None)]


def difference(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference, as a share of each tensor's largest value. A tensor of zeros up to rounding (the gradient
    of a query that sees a single key) has no scale of its own, and is measured by the largest of all."""
    assert len(one) == len(other) == 4
    most = [float(b.abs().max()) for b in other]
    rounding = 8 * torch.finfo(other[0].dtype).eps * max(most)
    scales = [own if own > rounding else max(most) for own in most]
    return max(float((a - b).abs().max()) / scale for a, b, scale in zip(one, other, scales, strict=True))


packings = st.lists(st.lists(st.integers(1, 12), max_size=5), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(
    packings,
    st.integers(0, 5),
    st.none() | st.integers(1, 14),
    st.sampled_from([(4, 2), (3, 3), (6, 1)]),
    st.sampled_from([Flash, Flash4]),
)
def test_flash_is_attention_per_document(rows, room, window, heads, kind) -> None:
    batch = packed(rows, max(1, max(map(sum, rows)) + room))
    real = batch.segments >= 0
    if not real.any():
        return
    mine = results(kind(batch.segments, batch.positions, batch.varlen), window, real, heads, torch.float64)
    ours = results(PerDocument(batch.segments, batch.positions), window, real, heads, torch.float64)
    assert difference(mine, ours) <= 1e-12
    assert not any(t.isnan().any() for t in mine)  # not at padding, either


@settings(deadline=None)
@given(packings, st.integers(0, 5))
def test_a_batch_knows_the_varlen_that_its_tensors_have(rows, room) -> None:
    batch = packed(rows, max(1, max(map(sum, rows)) + room))
    found = varlen_of(batch.segments, batch.positions)
    assert torch.equal(found[0], batch.varlen[0])
    assert found[0].dtype == batch.varlen[0].dtype == torch.int32
    assert found[1:] == batch.varlen[1:] == (found[0].diff().max(), False)


def shifted(function: Callable[..., Tensor], **faults: Callable[[Any], Any]) -> Callable[..., Tensor]:
    """A call with an argument changed."""
    return lambda *inputs, **named: function(*inputs, **{k: faults.get(k, lambda x: x)(v) for k, v in named.items()})


def away(kind: type[Flash]) -> float:
    """How far attention by a package is from attention per document, in a window."""
    batch = packed(ROWS[:2], 30 + 18)
    places, real = (batch.segments, batch.positions), batch.segments >= 0
    found = results(kind(*places, batch.varlen), 5, real, (4, 2), torch.float64)
    return difference(found, results(PerDocument(*places), 5, real, (4, 2), torch.float64))


def later(bounds: Tensor) -> Tensor:
    return torch.cat((bounds[:1], bounds[1:-1] + 1, bounds[-1:]))


@pytest.mark.parametrize(
    "faults",
    [
        {"window_size": lambda size: (size[0] + 1, size[1])},
        {"window_size": lambda size: (size[0] - 1, size[1])},
        {"window_size": lambda size: (-1, -1)},
        {"cu_seqlens_q": later, "cu_seqlens_k": later},
        {"max_seqlen_q": lambda n: n - 1},
        {"softmax_scale": lambda scale: None},
        {"causal": lambda causal: False, "window_size": lambda size: (size[0], -1)},
    ],
    ids=["window + 1", "window - 1", "no window", "documents", "longest", "scale", "not causal"],
)
def test_a_wrong_call_is_seen(faults, monkeypatch: pytest.MonkeyPatch) -> None:
    assert away(Flash) <= 1e-12
    function = shifted(stand_ins.flash_attn_varlen_func, **faults)
    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_varlen_func", function)
    assert not away(Flash) <= 1e-3  # or NaN


def test_a_wrong_window_of_flash_attn_4_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert away(Flash4) <= 1e-12
    function = shifted(stand_ins.flash_attn_4_varlen_func, window_size=lambda size: (size[0] + 1, size[1]))
    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_varlen_func", function)
    assert not away(Flash4) <= 1e-3


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_documents_that_share_a_prefix_keep_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_compiled_flex", lambda: attention._flex)
    monkeypatch.delitem(sys.modules, "flash_attn")
    segments = torch.tensor([[0] * 6 + [1] * 4 + [-1] * 2])
    positions = torch.tensor([[*range(6), *range(3, 7), 0, 0]])
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 12, n, 16, generator=g) for n in (4, 2, 2))
    with torch.no_grad():
        mine, ours = (kind(segments, positions)(Asked(None), q, k, v) for kind in (Flash, PerDocument))
    assert (mine - ours)[segments >= 0].abs().max() <= 1e-5


def made_with(model_type: str, packages: Iterable[Package]) -> Decoder:
    return model_from(config_of(model_type), Kernels.of(CUDA, "bf16", fused=list(packages)))


def attention_of(model: Decoder) -> type:
    """What computes the model's attention of a batch."""
    batch = packed(ROWS, WIDTH)
    return type(model.attention(batch.segments, batch.positions, batch.varlen))


def gradients(model: Decoder) -> tuple[float, dict[str, Tensor]]:
    batch = packed(ROWS, WIDTH)
    vocab = model.config.vocab
    head_fn = partial(cross_entropy, targets=batch.targets % vocab, weights=batch.loss_weights)
    model.zero_grad()
    loss = model(batch.tokens % vocab, batch.positions, batch.segments, head_fn, varlen=batch.varlen)
    loss.backward()
    return float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def far(one: tuple[float, dict[str, Tensor]], other: tuple[float, dict[str, Tensor]]) -> float:
    """The relative difference of two gradients."""
    assert one[1].keys() == other[1].keys()
    away = torch.cat([(one[1][name] - grad).flatten() for name, grad in other[1].items()]).norm()
    return float(away / torch.cat([grad.flatten() for grad in other[1].values()]).norm())


@pytest.mark.parametrize("recomputed", ["none", "block", "selective"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "qwen3_moe"])
def test_a_model_learns_the_same_with_the_packages(model_type: str, recomputed: Recompute) -> None:
    """Windows, both gates, experts; Liger's gates overwrite what they were given."""
    expected = gradients(made_with(model_type, []))
    model = parallelize(made_with(model_type, BOTH), Meshes(), "fp32", recomputed=recomputed)
    assert attention_of(model) is Flash
    found = gradients(model)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert far(found, expected) <= 1e-5


@pytest.mark.parametrize(
    ("activate", "function"),
    [(F.silu, stand_ins.LigerSiLUMulFunction), (gelu_tanh, stand_ins.LigerGELUMulFunction)],
)
def test_the_gates_of_liger_are_those_of_ptf(activate, function) -> None:
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(9, 7, generator=g, dtype=torch.float64) for _ in range(2))
    assert (function.apply(a, b) - gated(activate, a, b)).abs().max() <= 1e-12


def test_the_clamped_gate_of_gpt_oss_and_its_sinks_are_kept() -> None:
    model = made_with("gpt_oss", BOTH)
    assert {layer.moe.experts.gate.func for layer in model.layers} == {clamped}
    assert attention_of(model) is PerDocument
    assert model.attention_name(CUDA) == "flex_attention (not flash_attn 2.8.4: it has no attention sinks)"


@pytest.mark.parametrize(
    ("setting", "device", "precision", "found"),
    [
        ("auto", CUDA, "bf16", BOTH),
        ("auto", CUDA, "fp32", {"liger_kernel": "0.8.2"}),
        ("auto", CPU, "bf16", {}),
        (["liger_kernel"], CUDA, "bf16", {"liger_kernel": "0.8.2"}),
        ([], CUDA, "bf16", {}),
        ([], CPU, "bf16", {}),
    ],
)
def test_what_is_chosen(setting, device, precision, found) -> None:
    assert packages_of(setting, device, precision) == found


@pytest.mark.parametrize(
    ("setting", "has", "found"),
    [
        ("auto", (9, 0), {}),
        ("auto", (8, 9), {"flash_attn": "2.8.4"}),
        (["flash_attn_4"], (9, 0), {"flash_attn_4": "4.0.0"}),
        (["flash_attn_4"], (10, 0), {"flash_attn_4": "4.0.0"}),
        (["flash_attn"], (9, 0), {"flash_attn": "2.8.4"}),
        (["flash_attn_4"], (8, 0), "flash_attn_4 cannot be used: it trains on GPUs of compute capability 9 to 11"),
        (["flash_attn_4"], (12, 0), "flash_attn_4 cannot be used: it trains on GPUs of compute capability 9 to 11"),
        (["flash_attn", "flash_attn_4"], (9, 0), "name one of them"),
    ],
)
def test_the_version_of_flash_attn(setting, has, found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "installed", {"flash_attn": "2.8.4", "flash_attn_4": "4.0.0"}.get)
    monkeypatch.setattr(fused, "capability", lambda device: has)
    if isinstance(found, str):
        with pytest.raises(UserError, match=found):
            packages_of(setting, CUDA, "bf16")
        return
    assert packages_of(setting, CUDA, "bf16") == found
    model = made_with("llama", found)
    assert (model.kernels.flash is Flash4) == ("flash_attn_4" in found)
    assert (model.kernels.flash is Flash) == ("flash_attn" in found)
    said = f"flash_attn {next(iter(found.values()))} (" if found else "flex_attention"
    assert model.attention_name(CUDA).startswith(said)


def test_what_is_not_installed_is_not_used_and_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "installed", {"liger_kernel": "0.8.2"}.get)
    assert packages_of("auto", CUDA, "bf16") == {"liger_kernel": "0.8.2"}
    with pytest.raises(UserError, match=r"flash_attn cannot be used: it is not installed \(pip install flash-attn\)"):
        packages_of(["flash_attn"], CUDA, "bf16")


@pytest.mark.parametrize(
    ("package", "device", "precision", "said"),
    [
        ("flash_attn", CPU, "bf16", "train.fused: flash_attn .* needs a GPU, .* on cpu"),
        ("liger_kernel", CPU, "bf16", "train.fused: liger_kernel .* needs a GPU, .* on cpu"),
        ("flash_attn", CUDA, "fp32", "train.fused: flash_attn .* 16 bits only, and train.precision is fp32"),
    ],
)
def test_what_cannot_be_used_is_refused_if_it_is_asked_for(package, device, precision, said) -> None:
    with pytest.raises(UserError, match=said):
        packages_of([package], device, precision)


def test_a_package_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(UserError, match=r"flash_attn 2\.8\.4 is installed and cannot be imported"):
        packages_of("auto", CUDA, "bf16")


def test_machines_with_other_packages_do_not_train_together(monkeypatch: pytest.MonkeyPatch) -> None:
    world, found = World(device=CUDA), Kernels(packages=BOTH)
    trainer.raise_if_other_packages(found, world)
    monkeypatch.setattr(World, "all_gather_object", lambda self, mine: [mine, {}])
    with pytest.raises(UserError, match="install the same on all"):
        trainer.raise_if_other_packages(found, world)


def config(**changes: Any) -> DecoderConfig:
    sizes = {"head_dim": 32, "moe": None, **changes}
    layers = (Layer(Rope(10_000.0), None),)
    return DecoderConfig(97, 64, 4, 2, sizes.pop("head_dim"), 96, 1e-6, 256, True, layers, **sizes)


def test_heads_that_are_too_large_keep_flex() -> None:
    assert Flash.obstacle(config(head_dim=256)) is None
    for kind in (Flash, Flash4):
        assert "256 dimensions at most" in str(kind.obstacle(config(head_dim=288)))
    assert Flash.obstacle(config(head_dim=192)) is None
    assert "128 dimensions at most" in str(Flash4.obstacle(config(head_dim=192)))
    assert Flash4.obstacle(config(head_dim=256)) is None
    windowed = replace(config(), layers=(Layer(Rope(10_000.0), 24),))
    assert Flash.obstacle(windowed) is None
    assert "windows" in str(Flash4.obstacle(windowed))


def test_the_first_lines_name_what_is_used() -> None:
    plain, both = Kernels.of(CPU, "fp32"), Kernels.of(CUDA, "bf16", compiled="auto", fused="auto")
    with torch.device("meta"):
        ours, theirs = (Decoder(config(), LayerFactory(kernels=kernels)) for kernels in (plain, both))
    assert ours.attention_name(CUDA) == "flex_attention"
    assert ours.attention_name(CPU) == "SDPA per document"
    assert theirs.attention_name(CUDA).startswith("flash_attn 2.8.4 (flex_attention for documents that share")
    assert both.compilation == "norms and rotary compiled, gates by liger_kernel 0.8.2"
    assert Kernels.of(CUDA, "bf16", compiled="auto").compilation == "norms, gates and rotary compiled"
    assert plain.compilation == "norms, gates and rotary not compiled"


@settings(deadline=None, max_examples=40)
@given(packings, st.integers(0, 5))
def test_flas_rule_is_ours(rows, room) -> None:
    batch = packed(rows, max(1, max(map(sum, rows)) + room))
    real = batch.segments.reshape(-1) >= 0
    if not real.any():
        return
    g, n = torch.Generator().manual_seed(0), batch.segments.numel()
    drawn = [torch.randn(n, 2, size, generator=g, dtype=torch.float64) for size in (5, 5, 3)]
    drawn += [-torch.rand(n, 2, generator=g, dtype=torch.float64), torch.rand(n, 2, generator=g, dtype=torch.float64)]
    drawn[1] = F.normalize(drawn[1], dim=-1)
    found = []
    for rule in (chunked, fused.fla_rule):
        values = [t.clone().requires_grad_() for t in drawn]
        out, states = rule(*values, Chunks.of(batch.segments, 4))
        loss = out[real].square().sum() + states.square().sum()
        found.append([out[real], states, *torch.autograd.grad(loss, values)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-10)


def test_documents_that_run_into_each_other_are_found_in_flas_rule() -> None:
    """A control: with one bound left out, the outputs differ."""
    batch = packed([[10, 20, 18]], 48)
    chunks = Chunks.of(batch.segments, 8)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(48, 2, size, generator=g) for size in (5, 5, 3))
    inputs = (q, F.normalize(k, dim=-1), v, torch.full((48, 2), -0.1), torch.full((48, 2), 0.5))
    wrong = replace(chunks, bounds=chunks.bounds[[0, 2, 3]], numbers=chunks.numbers[:2])
    assert torch.allclose(fused.fla_rule(*inputs, chunks)[0], chunked(*inputs, chunks)[0], atol=1e-5)
    assert not torch.allclose(fused.fla_rule(*inputs, wrong)[0], chunked(*inputs, chunks)[0], atol=1e-2)


def test_fla_serves_linear_attention_only(monkeypatch) -> None:
    monkeypatch.setattr(fused, "installed", {"fla": "0.4.0"}.get)
    with pytest.raises(UserError, match="16 bits only"):
        packages_of(["fla"], CUDA, "fp32")
    assert Kernels.of(CUDA, "bf16", fused="auto").delta_rule is fused.fla_rule
    assert made_with("llama", ["fla"]).attention_name(CUDA) == "flex_attention"
