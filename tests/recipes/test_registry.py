"""Whether a recipe generates rollouts is said once, by its config class; a class with another flag is refused."""

import subprocess
import sys
from typing import ClassVar

import pytest

from ptf.config import Job, loads
from ptf.config.schema import online_recipes
from ptf.config.section import AlgoConfig
from ptf.errors import UserError
from ptf.recipes.ppo.recipe import CriticRecipe
from ptf.recipes.registry import (
    RECIPES,
    RENAMED_METHODS,
    _raise_if_incomplete,
    algo_config_of,
    build,
    is_online,
    online_error,
)
from ptf.recipes.sft.recipe import SFT
from tests.conftest import ROOT

ONLINE = ("grpo", "ppo", "opd")


def job_of(recipe: str) -> Job:
    rollout = "rollout: {reward: {use: 'tests.rl.plugs:exact'}}, " if recipe in ONLINE else ""
    algo = {"opd": "algo: {teacher: t}, ", "kd": "algo: {teachers: {t: {path: t}}}, "}.get(recipe, "")
    kind = ", kind: prompt" if recipe in ONLINE else ""
    return loads(
        f"{{recipe: {recipe}, {algo}{rollout}model: {{path: m}}, data: {{sources: {{a: {{path: a{kind}}}}}}}, "
        "train: {steps: 1, lr: 1e-4}}"
    )


def test_every_recipe_has_the_flag_of_its_config() -> None:
    assert online_recipes() == ONLINE
    for name in RECIPES:
        job = job_of(name)
        assert build(job).online == algo_config_of(name).online == is_online(job) == (name in ONLINE)
    assert CriticRecipe.online


def test_the_flag_of_a_built_in_recipe_is_read_without_torch() -> None:
    code = (
        "import sys\nfrom ptf.config.schema import online_recipes\nonline_recipes()\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_recipe_that_differs_from_its_config_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SFT, "online", True)
    with pytest.raises(UserError, match="the recipe SFT has `online` True, and its config class has False"):
        build(job_of("sft"))


class WithOldFlag(SFT):
    """A recipe that says by an earlier name that it is online; `online` is inherited."""

    on_policy: ClassVar[bool] = True


class WithOwnParameter(SFT):
    """A recipe with a parameter of that name, which says something else."""

    def __init__(self, on_policy: bool = True) -> None:
        super().__init__()

    on_policy = True


class WithoutFlag:
    """A recipe that says nothing."""

    def denominator(self, batch: object) -> None: ...


def test_a_plugin_that_says_it_by_another_name_is_told_the_name() -> None:
    text = (
        "{recipe: {use: 'tests.recipes.test_registry:NAME'}, model: {path: m}, "
        "data: {sources: {a: {path: a}}}, train: {steps: 1, lr: 1e-4}}"
    )
    with pytest.raises(UserError, match="WithOldFlag has `on_policy`, which is now `online`: set `online` to True"):
        build(loads(text.replace("NAME", "WithOldFlag")))
    with pytest.raises(UserError, match="WithoutFlag has no `online`"):
        build(loads(text.replace("NAME", "WithoutFlag")))
    assert not is_online(loads(text.replace("NAME", "WithOwnParameter")))  # the control
    assert online_error(SFT) is None


def test_a_config_class_that_says_it_by_another_name_is_told_the_name() -> None:
    with pytest.raises(UserError, match="Old: `on_policy` is now `online`; rename it"):
        type("Old", (AlgoConfig,), {"on_policy": True, "__annotations__": {"on_policy": ClassVar[bool]}})
    with pytest.raises(UserError, match="Old: `on_policy` is now `online`; rename it"):
        type("Old", (AlgoConfig,), {"on_policy": True, "__annotations__": {"on_policy": bool}})
    assert type("New", (AlgoConfig,), {"online": True, "__annotations__": {"online": ClassVar[bool]}}).online  # control


@pytest.mark.parametrize("old", ["annotations", "annotated_by", "minibatches"])
def test_a_recipe_with_a_former_name_of_a_method_is_refused_with_the_new_one(old):
    """It would be a recipe that precomputes nothing, or that makes one optimizer step, without a word."""
    made = type("Mine", (), {old: 2, "denominator": None, "online": False})()
    job = loads("recipe: sft\nmodel: {path: m}\ndata: {sources: {a: {path: a}}}\ntrain: {steps: 1, lr: 1.0}\n")
    with pytest.raises(UserError, match=f"Mine has `{old}`, which is not read: rename it `{RENAMED_METHODS[old]}`"):
        _raise_if_incomplete(made, job)


def test_a_recipe_with_a_length_penalty_of_the_other_sign_is_refused():
    made = type("Mine", (), {"length_penalty": 2, "denominator": None, "online": False})()
    job = loads("recipe: sft\nmodel: {path: m}\ndata: {sources: {a: {path: a}}}\ntrain: {steps: 1, lr: 1.0}\n")
    with pytest.raises(
        UserError, match=r"Mine has `length_penalty`, .*: define `overlong_penalty`, which is subtracted"
    ):
        _raise_if_incomplete(made, job)


def test_every_recipe_has_its_flow_and_its_keys():
    assert list(RECIPES) == ["sft", "dpo", "kd", "rm", "grpo", "ppo", "opd"]
    for name, entry in RECIPES.items():
        assert (ROOT / "flows" / f"{name}_flow.py").exists()
        assert entry.package == f"ptf.recipes.{name}"
        assert issubclass(algo_config_of(name), AlgoConfig)
