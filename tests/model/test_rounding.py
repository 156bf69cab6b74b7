"""Rounding does not decide whether a family passes, and what is no rounding still fails."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ptf.model import verify
from ptf.model.families import MODULES, family_of
from ptf.model.parallel_parity import MESHES, _Expected, _groups, _judged, _step
from ptf.model.reference import exact_reference, quiet, random_reference
from ptf.model.rounding import Double, Margins, difference
from ptf.model.verify import DRAWS, MEMBER, Case, Reference, _Inputs


@pytest.mark.parametrize(
    ("scores", "k", "margin"),
    [
        ([3.0, 2.0, 2.0, 1.0], 2, 0.0),  # the second or the third
        ([3.0, 2.0, 2.0, 1.0], 1, 1 / 3),
        ([3.0, 2.0, 2.0, 1.0], 3, 1 / 3),  # both
        ([3.0, 2.0, 2.0, 1.0], 4, float("inf")),  # all
        ([-4.0, -1.0, -1.5, float("-inf")], 1, 0.5 / 4),
        ([1.0, 1.0, float("-inf"), float("-inf")], 2, float("inf")),
    ],
)
def test_the_margin_of_a_choice(scores: list[float], k: int, margin: float) -> None:
    with Margins() as margins:
        torch.topk(torch.tensor([[9.0, 5.0, 1.0, -3.0], scores]), k, dim=-1, sorted=False)
    assert margins.smallest == pytest.approx(min(margin, 4 / 9 if k < 4 else float("inf")))


def test_the_smallest_margin_counts() -> None:
    with Margins() as margins:
        torch.tensor([1.0, 0.5, 0.0]).topk(1)
        torch.tensor([1.0, 0.75, 0.0]).topk(1)
        torch.tensor([1.0, 0.25, 0.0]).topk(1)
    assert margins.smallest == 0.25


def tied(draw: int) -> Any:
    """Return a reference in which the last token of this draw has two experts with the same score, one of which is
    chosen: the bias of one is set so."""
    config = family_of({"model_type": "glm4_moe"}).random_config(random.Random("tied"))
    config |= {"num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 4, "num_experts_per_tok": 2}
    model = random_reference(config | {"n_group": 1, "topk_group": 1}, 0)
    gate: Any = model.model.layers[0].mlp.gate
    seen: list[Tensor] = []
    hook = gate.register_forward_hook(lambda module, args, out: seen.append(out.sigmoid().flatten(0, -2)[-1]))
    with torch.no_grad():
        model.eval()(input_ids=_Inputs(config["vocab_size"]).drawn(draw).documents[-1][None])
    hook.remove()
    bias = gate.e_score_correction_bias
    second, third = (seen[0] + bias).argsort(descending=True)[1:3].tolist()
    bias[third] += (seen[0] + bias)[second] - (seen[0] + bias)[third]
    return model


def compared(model: Any, directory: Path, change: Any = None) -> Case:
    quiet()
    model.save_pretrained(directory)
    return Reference(directory, member=True).compare(change)


@pytest.mark.parametrize("draw", [0, 1])
def test_tokens_with_a_tie_are_drawn_again(draw: int, tmp_path: Path) -> None:
    """A tie in another draw is not looked at."""
    case = compared(tied(draw), tmp_path)
    assert case.passed
    assert len(case.notes) == (draw == 0)
    assert all("chooses experts by a margin" in note for note in case.notes)


@pytest.mark.parametrize("draw", [0, 1])
def test_a_wrong_router_is_not_drawn_away(draw: int, tmp_path: Path) -> None:
    """In ours, two experts of every token change places; and in a second model the choice is made without the bias."""

    def swap(ours: Any) -> None:
        weight = ours.layers[0].moe.router.weight.data
        weight[:2] = weight[:2].flip(0)

    def drop(ours: Any) -> None:
        ours.layers[0].moe.correction_bias.data.zero_()

    for change in (swap, drop):
        case = compared(tied(draw), tmp_path, change)
        assert not case.passed
        assert len(case.notes) == (draw == 0)
        assert case.findings[-1].ours > 1e-3


@pytest.mark.parametrize(
    ("theirs", "ours", "verdict"),
    [(0.0, 0.0, "pass"), (1.5e-5, 0.0, "pass"), (0.0, 1.5e-5, "fail"), (3e-5, 0.0, "cannot judge")],
)
def test_an_error_is_judged_by_that_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: float, ours: float, verdict: str
) -> None:
    """transformers' logits are wrong by this in fp32, and right in fp64; ours are wrong by that."""
    right = verify.reference

    def inexact(directory: Path) -> Any:
        model = right(directory)
        model.get_output_embeddings().register_forward_hook(lambda module, args, out: out * (1 + theirs))
        return model

    def scale(model: Any) -> None:
        model.norm.weight.data *= 1 + ours

    monkeypatch.setattr(verify, "reference", inexact)
    model = random_reference(family_of({"model_type": "llama"}).random_config(random.Random("inexact")), 0)
    case = compared(model, tmp_path, scale)
    assert case.findings[-1].verdict == verdict
    # the draws do not depend on ours
    assert len(case.notes) == (DRAWS if verdict == "cannot judge" else 0)


class Stepped:
    """A model, and what transformers in fp32 finds of its step: as the reference, and in place of two ranks."""

    def __init__(self, base: Path) -> None:
        quiet()
        self.family = family_of({"model_type": "llama"})
        self.member, self.base = base / "member", base
        self.after = random_reference(self.family.random_config(random.Random("ranks")), 0)
        self.after.save_pretrained(self.member)
        self.stepped = _step(self.after, _groups(MESHES["FSDP"]))

    def judged(
        self,
        theirs: Callable[[_Expected, Any], _Expected] = lambda step, after: step,
        ours: Callable[[_Expected, Any], _Expected] = lambda step, after: step,
    ) -> Case:
        """Judge `ours`, a change of what was found and saved, beside `theirs`, a change of the reference in fp32."""
        after, saved = copy.deepcopy(self.after), copy.deepcopy(self.after)
        stepped, found = theirs(self.stepped, after), ours(self.stepped, saved)
        saved.save_pretrained(self.base / "saved")
        wrote = {"loss": found.loss, "gradients": found.gradients}
        return _judged("FSDP", self.member, wrote, stepped, after, self.base / "saved")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Stepped:
    return Stepped(tmp_path_factory.mktemp("ranks"))


def wrong_gradients(step: _Expected, after: Any, error: float) -> _Expected:
    return replace(step, gradients={name: g * (1 + error) for name, g in step.gradients.items()})


def wrong_gradient(step: _Expected, after: Any, error: float) -> _Expected:
    """One tensor's is wrong."""
    name = max(step.gradients, key=lambda name: float(step.gradients[name].abs().max()))
    return replace(step, gradients=step.gradients | {name: step.gradients[name] * (1 + error)})


def missing_contribution(step: _Expected, after: Any, error: float) -> _Expected:
    """A contribution to one entry of one gradient is missing."""
    name = max(step.gradients, key=lambda name: float(step.gradients[name].abs().max()))
    gradient = step.gradients[name].clone()
    gradient.view(-1)[0] -= error * gradient.abs().max()
    return replace(step, gradients=step.gradients | {name: gradient})


def wrong_loss(step: _Expected, after: Any, error: float) -> _Expected:
    return replace(step, loss=step.loss * (1 + error))


def wrong_weights(step: _Expected, after: Any, error: float) -> _Expected:
    """The logits of the model after the step are wrong."""
    after.model.norm.weight.data *= 1 + error
    return step


WRONG = [wrong_gradients, wrong_gradient, missing_contribution, wrong_loss, wrong_weights]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    ("theirs", "ours", "verdict"), [(1.5e-5, 0.0, "pass"), (0.0, 1.5e-5, "fail"), (3e-5, 0.0, "cannot judge")]
)
def test_two_ranks_are_judged_by_the_error_of_transformers(
    two_ranks: Stepped, wrong: Any, theirs: float, ours: float, verdict: str
) -> None:
    case = two_ranks.judged(
        theirs=lambda step, after: wrong(step, after, theirs) if theirs else step,
        ours=lambda step, after: wrong(step, after, ours) if ours else step,
    )
    assert {f.verdict for f in case.findings} == {"pass", verdict}
    assert case.passed is (verdict == "pass")


@pytest.mark.long
@pytest.mark.parametrize("model_type", MODULES)
def test_every_family_is_computed_in_fp64(model_type: str, tmp_path: Path) -> None:
    quiet()
    model = random_reference(family_of({"model_type": model_type}).random_config(random.Random("double")), 0).eval()
    model.save_pretrained(tmp_path)
    double = exact_reference(tmp_path).eval()
    types: set[torch.dtype] = set()

    def seen(module: Any, args: Any, out: Any) -> None:
        types.update(t.dtype for t in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(t))

    for module in double.modules():
        module.register_forward_hook(seen)
    tokens = _Inputs(model.config.get_text_config().vocab_size).drawn(0).documents[3][None]
    with torch.no_grad(), Double():
        exact = double(input_ids=tokens).logits
    with torch.no_grad():
        error = (model(input_ids=tokens).logits - exact).abs().max() / exact.abs().max()
    assert {t for t in types if t.is_floating_point} == {torch.float64}
    assert 0 < error <= MEMBER


def test_a_difference_that_is_no_number_is_within_no_bound() -> None:
    assert difference([-3.8, -26.0], [-3.0, -26.1]) == pytest.approx(0.8)
    assert not difference([float("nan"), 0.0], [0.0, 0.0]) <= 0.2
