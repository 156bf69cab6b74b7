"""A plugin that inherits from a recipe of ptf is given, by a job, all that the recipe itself is given."""

from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from ptf.config import ConfigError, Job, loads
from ptf.config.load import model_paths, resolve
from ptf.config.plugin_checks import load_checked
from ptf.config.recipes import RECIPES
from ptf.errors import UserError
from ptf.evaluate.gate import defaults
from ptf.recipes.dpo.recipe import DPO
from ptf.recipes.grpo.config import GRPOConfig
from ptf.recipes.grpo.recipe import GRPO
from ptf.recipes.kd.recipe import KD
from ptf.recipes.opd.recipe import OPD
from ptf.recipes.ppo.recipe import PPO
from ptf.recipes.registry import build
from ptf.recipes.rm.recipe import RM
from ptf.recipes.sft.recipe import SFT

OwnSFT, OwnDPO, OwnKD, OwnRM, OwnPPO = (type(f"Own{of.__name__}", (of,), {}) for of in (SFT, DPO, KD, RM, PPO))


class OwnGRPOConfig(GRPOConfig):
    """A key of its own."""

    scale: float = 1.0


class OwnGRPO(GRPO):
    """GRPO as a plugin."""

    config: OwnGRPOConfig


class OwnOPD(OPD):
    """OPD as a plugin."""


class RedeclaredConfig(GRPOConfig):
    """Other defaults and another loss."""

    tis_cap: float | None = None
    clip_high: float = 0.28
    policy_loss: Literal["clip", "cispo", "mine"] = "mine"  # type: ignore[assignment]


class Redeclared(GRPO):
    """GRPO with keys that are declared anew."""

    config: RedeclaredConfig


ONLINE = ("grpo", "ppo", "opd")
ALGO: dict[str, dict[str, Any]] = {
    "dpo": {"loss_type": "ipo", "reference": "job:a.yaml"},
    "kd": {"teachers": {"t": {"path": "job:a.yaml", "weight": 2.0}}, "loss_type": "js"},
    "rm": {"loss_type": "binary"},
    "opd": {"teacher": "job:a.yaml"},
}


def text(recipe: str, like: str = "", precision: str = "bf16", staleness: int = 0, **algo: Any) -> str:
    """Return a job of a recipe's name, or of a class of this file, with the data of the recipe `like`."""
    online = (like or recipe) in ONLINE
    rollout = {"reward": {"use": "ptf.rl.rewards:exact"}, "max_new_tokens": 7, "max_staleness": staleness}
    values = {
        "recipe": recipe if recipe in RECIPES else {"use": f"{__name__}:{recipe}"},
        "model": {"path": "m"},
        "data": {
            "sources": {"a": {"path": "a", **({"kind": "prompt"} if online else {})}},
            "validation": {} if online else {"held": {"path": "b"}},
        },
        "algo": algo,
        "train": {"steps": 1, "lr": 1e-4, "precision": precision},
        **({"rollout": rollout} if online else {}),
    }
    return yaml.safe_dump(values)


def job(*args: Any, **kwargs: Any) -> Job:
    return loads(text(*args, **kwargs))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_subclass_is_built_as_the_recipe_is(name: str, precision: str) -> None:
    """The same keys give the same arguments, those that no key gives among them."""
    algo, own = ALGO.get(name, {}), f"Own{name.upper()}"
    built, plugged = build(job(name, precision=precision, **algo)), build(job(own, name, precision, **algo))
    assert type(plugged).__name__ == own
    assert plugged.context == built.context
    assert plugged.config.model_dump().items() >= built.config.model_dump().items()


def test_importance_sampling_is_truncated_in_bf16() -> None:
    assert build(job("OwnGRPO", "grpo")).tis_cap == 2.0  # type: ignore[attr-defined]
    assert build(job("OwnGRPO", "grpo", tis_cap="auto")).tis_cap == 2.0  # type: ignore[attr-defined]
    assert build(job("OwnGRPO", "grpo", "fp32")).tis_cap is None  # type: ignore[attr-defined]
    assert build(job("OwnGRPO", "grpo", tis_cap=None)).tis_cap is None  # type: ignore[attr-defined]


def test_a_default_that_the_subclass_declares_anew_is_its_own() -> None:
    built = build(job("Redeclared", "grpo"))
    assert isinstance(built.config, RedeclaredConfig)
    assert (built.config.tis_cap, built.config.clip_high, built.config.policy_loss) == (None, 0.28, "mine")
    assert build(job("Redeclared", "grpo", tis_cap=3.0)).tis_cap == 3.0  # type: ignore[attr-defined]


def test_with_staleness_a_recipe_without_a_cap_is_refused() -> None:
    assert build(job("OwnGRPO", "grpo", "fp32", 2)).tis_cap == 2.0  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"algo\.tis_cap.*must be corrected"):
        build(job("Redeclared", "grpo", staleness=2))
    assert build(job("Redeclared", "grpo", staleness=2, tis_cap=3.0)).tis_cap == 3.0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"algo\.tis_cap +with.*must be corrected"):
        job("OwnGRPO", "grpo", staleness=2, tis_cap=None)


@pytest.mark.parametrize(
    ("recipe", "like", "key"),
    [("OwnDPO", "dpo", "reference"), ("OwnKD", "kd", "teachers.t.path"), ("OwnOPD", "opd", "teacher")],
)
def test_models_of_a_subclass_are_found(recipe: str, like: str, key: str) -> None:
    plugged = job(recipe, like, **ALGO[like])
    assert model_paths(plugged)[f"algo.{key}"] == model_paths(job(like, **ALGO[like]))[f"algo.{key}"] == "job:a.yaml"
    [frozen] = build(resolve(plugged, models={"job:a.yaml": "there"})).frozen_models.values()
    assert frozen.path == "there"


def test_the_gate_compares_the_held_out_metric_of_the_recipe() -> None:
    assert list(defaults(job("OwnKD", "kd", **ALGO["kd"])))[-1] == ["kl/held"]
    assert list(defaults(job("OwnSFT", "sft")))[-1] == ["loss/held"]  # the control


def test_inherited_keys_are_checked_at_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text("OwnGRPO", "grpo", loss_aggregation="token_meen", clip_low=-1))
    with pytest.raises(ConfigError) as refused:
        load_checked(path)
    lines = str(refused.value).splitlines()
    assert len(lines) == 2, lines
    assert "algo.clip_low  must be greater than 0.0, got -1" in lines[0]
    assert "algo.loss_aggregation  expected one of token_mean" in lines[1]
    assert "did you mean token_mean" in lines[1]
    with pytest.raises(ConfigError, match=r"algo\.clip_low .*should be greater than 0"):
        build(job("OwnGRPO", "grpo", clip_low=-1))
    path.write_text(text("Redeclared", "grpo", policy_loss="mine", clip_high=0.3))
    load_checked(path)  # what a class declares anew has values of its own
