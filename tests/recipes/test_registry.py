"""Whether a recipe generates rollouts is said once, by its config class; a recipe without the flag is refused."""

import subprocess
import sys

import pytest

from ptf.config import ConfigError, Job, dump, loads
from ptf.config.recipes import RECIPES, algo_config, algo_config_of
from ptf.config.schema import online_recipes
from ptf.config.section import AlgoConfig
from ptf.errors import UserError
from ptf.recipes.registry import build
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
        assert build(job).config.online == algo_config_of(name).online == algo_config(job).online == (name in ONLINE)


def test_a_nucleus_is_refused_with_the_reason_of_the_recipe() -> None:
    config = dump(job_of("opd"))
    with pytest.raises(ConfigError, match="the teacher's nucleus") as caught:
        loads(config, ["rollout.top_p=0.9", "algo.num_minibatches=2"])
    assert "update_epochs" not in str(caught.value)  # and no advice that would not help


def test_the_flag_of_a_built_in_recipe_is_read_without_torch() -> None:
    code = (
        "import sys\nfrom ptf.config.schema import online_recipes\nonline_recipes()\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


class NoRecipe:
    """A class that inherits from no recipe."""

    def denominator(self, batch: object) -> None: ...


def test_what_is_no_recipe_or_not_online_is_told_what_to_write() -> None:
    text = (
        "{recipe: {use: 'NAME'}, model: {path: m}, data: {sources: {a: {path: a}}}, train: {steps: 1, lr: 1e-4}, "
        "rollout: {reward: {use: a:b}, max_new_tokens: 1}}"
    )
    with pytest.raises(ConfigError, match="NoRecipe is no recipe: write a class that inherits from"):
        build(loads(text.replace("NAME", "tests.recipes.test_registry:NoRecipe")))
    with pytest.raises(UserError, match="SFT does not train on rollouts: remove the section rollout"):
        build(loads(text.replace("NAME", "ptf.recipes.sft.recipe:SFT")))


def test_every_recipe_has_its_flow_and_its_keys():
    for name in RECIPES:
        assert (ROOT / "flows" / f"{name}_flow.py").exists()
        assert issubclass(algo_config_of(name), AlgoConfig)
