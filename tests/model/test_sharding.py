"""Sharding changes nothing but rounding: 2 and 4 ranks train as one does."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ptf.compute.world import World
from ptf.config.sections.compute import MeshSizes
from ptf.config.sections.model import ModelConfig
from ptf.errors import UserError
from ptf.model import bridge
from ptf.model.chunked import cross_entropy
from ptf.model.decoder import Decoder
from ptf.model.families import MODULES, family_of
from ptf.model.recompute import Recompute
from ptf.model.sharding import PLAN, SEQUENCE, WHOLE
from ptf.model.tensor_parallel import raise_if_indivisible, style_of
from ptf.train.trainer import load_model
from tests.model.parallel import Case, Trained, checkpoint, difference, on_ranks, train
from tests.tiny import packed

FAMILIES = ("qwen3", "qwen3_moe", "gpt_oss", "qwen2_moe", "glm4_moe", "deepseek_v3")
BOUND = 1e-6
STEPS = 5
KINDS = [(family, lora) for family in FAMILIES for lora in (False, True)]
MESHES = {
    2: [MeshSizes(shard=2), MeshSizes(tensor=2), MeshSizes(context=2)],
    4: [
        MeshSizes(shard=2, tensor=2),
        MeshSizes(context=4),
        MeshSizes(shard=2, context=2),
        MeshSizes(replicate=2, context=2),
        MeshSizes(context=2, tensor=2),
    ],
}
WRONG = {"layers.*.attn.[qk]_norm": WHOLE, "layers.*.mlp_norm": WHOLE}  # as if every rank knew the whole gradient


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    return {family: checkpoint(tmp_path_factory.mktemp("models") / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def alone(models) -> dict[tuple[str, bool], Trained]:
    return {(family, lora): train(Case(models[family], lora=lora, steps=STEPS)) for family, lora in KINDS}


@pytest.mark.long
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.cluster)])
def test_steps_are_those_of_one_rank(models, alone, tmp_path, size) -> None:
    """20 of them are `make bench-sharding`."""
    cases = {(*kind, mesh): Case(models[kind[0]], mesh, kind[1], STEPS) for kind in KINDS for mesh in MESHES[size]}
    found = dict(zip(cases, on_ranks(size, list(cases.values()), tmp_path / "ranks"), strict=True))
    apart = {case: difference(alone[case[:2]], one) for case, one in found.items()}
    for case, (loss, gradients) in apart.items():
        print(*case, f"loss {loss:.1e} gradients {gradients:.1e}")
    assert {case: gap for case, gap in apart.items() if not all(one <= BOUND for one in gap)} == {}


@pytest.mark.long
def test_steps_beside_packed_experts_are_those_of_one_rank(tmp_path) -> None:
    wide = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    directory = checkpoint(tmp_path / "model", "qwen3_moe", **wide)
    case = Case(directory, lora=True, packed=True, steps=STEPS)
    alone = train(case)
    (found,) = on_ranks(2, [replace(case, mesh=MeshSizes(shard=2))], tmp_path / "ranks")
    assert all(one <= BOUND for one in difference(alone, found))
    assert max(difference(train(replace(case, packed=False)), found)) > 1e-3, "negative control: not rounded"


@pytest.mark.cluster
def test_other_ways_to_cut_and_a_wrong_plan(models, tmp_path) -> None:
    """Two steps each: activations made again, copies, bf16, and the negative control."""
    plain = Case(models["gpt_oss"], steps=2)
    cases = [
        replace(plain, mesh=MeshSizes(tensor=2), recomputed="block"),
        replace(plain, mesh=MeshSizes(tensor=2), recomputed="selective"),
        replace(plain, mesh=MeshSizes(shard=2), recomputed="block"),
        replace(plain, mesh=MeshSizes(replicate=2)),
        replace(plain, mesh=MeshSizes(tensor=2), plan=WRONG),
        # without experts, to which rounding may send other tokens
        replace(plain, mesh=MeshSizes(tensor=2), precision="bf16", directory=models["qwen3"]),
    ]
    *found, rounded = on_ranks(2, cases, tmp_path / "ranks")
    *right, wrong = [difference(train(plain), one) for one in found]
    half = difference(train(replace(plain, directory=models["qwen3"])), rounded)
    assert all(one <= BOUND for gap in right for one in gap)
    assert 1e-5 < half[0] < 1e-2
    assert 1e-3 < half[1] < 1e-1
    assert wrong[0] <= 1e-3  # the loss does not tell
    assert wrong[1] > 1e-2


@pytest.mark.parametrize("recomputed", ["block", "selective"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_made_again_is_the_same_and_less_is_kept(models, family, recomputed) -> None:
    kept = 0

    def count(t: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += t.nbytes
        return t

    found = {}
    for how in ("none", recomputed):
        kept = 0
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            found[how] = train(Case(models[family], steps=1, recomputed=how)), kept
    (plain, all_of_it), (again, some) = found.values()
    assert difference(plain, again)[1] == 0
    assert some < all_of_it


@pytest.mark.parametrize("model_type", MODULES)
def test_the_plan_knows_every_parameter(model_type) -> None:
    for number in range(4):
        family = family_of({"model_type": model_type})
        with torch.device("meta"):
            model = Decoder(family.config(family.random_config(random.Random(f"plan/{number}"))))
        lost = [
            n
            for n, m in model.named_modules()
            if any(True for _ in m.parameters(recurse=False)) and style_of(n, PLAN) is None
        ]
        assert lost == []


def test_a_pattern_takes_one_word_for_a_star() -> None:
    assert style_of("layers.3.attn_norm", PLAN) is SEQUENCE
    assert style_of("layers.3.attn.attn_norm", PLAN) is None
    assert style_of("layers.3", PLAN) is None


@pytest.mark.parametrize(
    ("ranks", "message"),
    [(3, r"3 does not divide.*4 attention heads, 2 key-value heads.*set it to one of 1, 2"), (4, "2 key-value heads")],
)
def test_a_group_that_does_not_divide_the_heads_is_refused(models, ranks, message) -> None:
    with pytest.raises(UserError, match=message):
        raise_if_indivisible(bridge.decoder_config(Path(models["gpt_oss"])), ranks)


@pytest.mark.cluster
def test_compiled_parts_compute_the_same(models) -> None:
    batches = [packed([[9, 4]], 13), packed([[20, 7, 1]], 28)]
    gradients = []
    ways: tuple[tuple[bool, Recompute], ...] = ((False, "none"), (True, "none"), (True, "selective"))
    for compiled, recomputed in ways:
        how: dict[str, Any] = {"precision": "fp32", "compiled": compiled, "recomputed": recomputed}
        model = load_model(Path(models["qwen3"]), World(), ModelConfig(path=models["qwen3"]), seed=0, **how)
        for b in batches:
            head_fn = partial(cross_entropy, targets=b.targets, weights=b.loss_weights)
            model(b.tokens, b.positions, b.segments, head_fn).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    plain, *others = gradients
    # 0 would be the same kernels: nothing was compiled
    assert all(0 < (other - plain).norm() / plain.norm() < 5e-6 for other in others)
