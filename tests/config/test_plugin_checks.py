"""What a config names by `use:` is imported and its arguments are compared, each fault at its line."""

import sys
from pathlib import Path

import pytest

from ptf.config.load import checked
from ptf.config.plugin import PLUGIN_PATH, on_path, plugin_path
from ptf.config.plugin_checks import problems
from ptf.config.tree import Problems, merge

PLUGINS = """
from dataclasses import dataclass
from ptf.config.section import AlgoConfig
from ptf.recipes.protocol import Recipe as Base
import collections  # what is imported is found by name too
class Keys(AlgoConfig):
    strength: float
    length: int = 0
class Recipe(Base):
    config: Keys
    def __post_init__(self): raise AssertionError("a check makes nothing")
@dataclass(frozen=True)
class NoEnvironment:
    def __init__(self, row=None, seed=0): pass
class Environment:
    def __init__(self, row=None, seed=0): pass
    def reset(self): pass
    def step(self, text): pass
def environment(row, seed): return Environment(row, seed)
def reward(row, text, *, scale=1.0): return 1.0
def anything(*args, **more): return 1.0
def one(row): return 1.0
def needs(row, text, *, column, scale=1.0): return 1.0
def sees(row, text, *, scale, episode): return 1.0
def sees_groups(row, text, *, scale, episodes): return 1.0
from ptf.rl.rewards import batched, scores_groups
@scores_groups
def of_group(row, texts, *, scale, episodes=()): return [1.0]
@scores_groups
def of_one(row, texts, *, scale, episode): return [1.0]
@batched(max_size=8)
class OfBatch:
    def __init__(self, *, scale): raise AssertionError("a check makes nothing")
    async def __call__(self, items): return [1.0]
@batched(max_size=8)
def of_pairs(row, text, *, scale): return [1.0]
class NotCalled:
    def __init__(self, scale): pass
number = 3
"""
CONFIG = """
recipe: {{use: "{module}:{recipe}", args: {args}}}
algo: {algo}
model: {{path: m}}
data:
  sources: {{a: {{path: a.jsonl, kind: prompt}}}}
rollout:
  {key}:
    use: "{reward}"
    args: {{{scale}: 2}}
train: {{steps: 3, lr: 1e-4}}
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv(PLUGIN_PATH, "")
    module = f"plugins_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{module}.py").write_text(PLUGINS)
    (tmp_path / f"{module}_broken.py").write_text("import nothing_of_this_name\n")

    def write(
        reward: str = "reward",
        scale: str = "scale",
        args: str = "{strength: 2}",
        algo: str = "{}",
        recipe: str = "Recipe",
        key: str = "reward",
    ) -> list[str]:
        use = reward if ":" in reward else f"{module}:{reward}"
        text = CONFIG.format(module=module, key=key, recipe=recipe, args=args, algo=algo, reward=use, scale=scale)
        (tmp_path / "job.yaml").write_text(text.replace("MODULE", module))
        tree = merge(tmp_path / "job.yaml")
        on_path([tmp_path / "job.yaml"])
        try:
            checked(tree, problems(tree.root))
        except Problems as error:
            return [f"{p.place.line} {p.key} {p.what}".replace(module, "MODULE") for p in error.problems]
        return []

    return write


def test_what_is_right_is_right(written):
    assert written() == []
    assert written("anything", "whatever") == []
    assert written(args="{}", algo="{strength: 1.0}") == []
    assert written("Environment", "seed", key="environment") == []
    assert written("environment", "seed", key="environment") == []  # what a function makes is not known here
    assert written("math:hypot", "x") == []  # a built-in says nothing of its parameters
    for reward in ("sees", "of_group", "OfBatch"):
        assert written(reward) == []
    assert written("ptf.rl.rewards:weighted", "parts: [{use: ptf.rl.rewards:exact, weight: 2}]} #") == []


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (
            {"scale": "scael"},
            "10 rollout.reward.args.scael MODULE:reward has no argument 'scael'  (did you mean scale?)",
        ),
        (
            {"reward": "rewrad"},
            "9 rollout.reward.use MODULE:rewrad: the module MODULE has no 'rewrad'  (did you mean reward?)",
        ),
        (
            {"reward": "nowhere.at.all:f"},
            "9 rollout.reward.use nowhere.at.all:f: no module 'nowhere' in the Python path: install it",
        ),
        ({"reward": "number"}, "9 rollout.reward.use MODULE:number is not callable: it is of type int"),
        (
            {"reward": "MODULE_broken:f"},
            "9 rollout.reward.use importing MODULE_broken:f failed: ModuleNotFoundError: No module named 'nothing",
        ),
        (
            {"args": "{strenght: 2}"},
            "2 recipe.args.strenght MODULE:Recipe has no key 'strenght'  (did you mean strength?)",
        ),
        ({"algo": "{lenght: 2}"}, "3 algo.lenght MODULE:Recipe has no key 'lenght'  (did you mean length?)"),
        ({"args": "{}"}, "3 algo.strength is missing: MODULE:Recipe needs it"),
        (
            {"reward": "one"},
            "9 rollout.reward.use MODULE:one cannot be called as a reward, (row, text, **args): too many positional",
        ),
        (
            {"reward": "needs"},
            "9 rollout.reward.use MODULE:needs cannot be called as a reward, (row, text, **args): missing a required "
            "argument: 'column'",
        ),
        (
            {"reward": "sees", "scale": "scale: 1, episode"},
            "9 rollout.reward.use MODULE:sees: `episode` is given by ptf, and is no argument of the config",
        ),
        (
            {"reward": "sees_groups"},
            "9 rollout.reward.use MODULE:sees_groups has a parameter `episodes`; a reward (row, text, **args) is given "
            "`episode`",
        ),
        (
            {"reward": "of_one"},
            "9 rollout.reward.use MODULE:of_one has a parameter `episode`; a reward (row, texts, **args) is given "
            "`episodes`",
        ),
        (
            {"reward": "of_pairs"},
            "9 rollout.reward.use MODULE:of_pairs cannot be called as a reward, (items, **args): missing a required "
            "argument: 'text'",
        ),
        (
            {"reward": "NotCalled"},
            "9 rollout.reward.use MODULE:NotCalled is a class whose instances cannot be called",
        ),
        (
            {"reward": "OfBatch", "scale": "scael"},
            "10 rollout.reward.args.scael MODULE:OfBatch has no argument 'scael'  (did you mean scale?)",
        ),
        (
            {"reward": "NoEnvironment", "key": "environment", "scale": "seed"},
            "9 rollout.environment.use MODULE:NoEnvironment has no method `reset` and no method `step`",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line(written, given: dict[str, str], found: str):
    assert any(line.startswith(found) for line in written(**given))


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (
            "parts: [{use: ptf.rl.rewards:exact, args: {colunm: a}, weight: 2}]",
            "10 rollout.reward.args.parts.0.args.colunm ptf.rl.rewards:exact has no argument 'colunm'",
        ),
        (
            "parts: [{use: ptf.rl.rewards:exact}, {use: MODULE:of_group, args: {scale: 1}}]",
            "9 rollout.reward.use ptf.rl.rewards:weighted: parts.1.use: MODULE:of_group scores several responses at "
            "once",
        ),
        (
            "parts: [{use: ptf.rl.rewards:exact}, {use: MODULE:one, weight: 2}]",
            "9 rollout.reward.use ptf.rl.rewards:weighted: parts.1: MODULE:one cannot be called as a reward",
        ),
        (
            "parts: [{use: MODULE_broken:f, weight: 2}]",
            "10 rollout.reward.args.parts.0.use importing MODULE_broken:f failed: ModuleNotFoundError",
        ),
    ],
)
def test_parts_of_a_sum_are_checked(written, args: str, found: str):
    assert any(line.startswith(found) for line in written("ptf.rl.rewards:weighted", f"{args}, more"))


@pytest.mark.parametrize(
    ("reward", "args", "found"),
    [
        ("http", "url: 'https://host/score', headers_from_env: {A: NOT_SET_HERE}, retries", None),
        ("http", "url: 'host', retries", "9 rollout.reward.use ptf.rl.rewards:http: url: 'host' is no address"),
        ("http", "retries", "9 rollout.reward.use ptf.rl.rewards:http cannot be called as a reward"),
        ("judge", "url: 'https://host/v1', model: m, prompt: '{response} {reference}', samples: 1, retries", None),
        (
            "judge",
            "url: 'https://host/v1', model: m, prompt: 'Is it right?', retries",
            "9 rollout.reward.use ptf.rl.rewards:judge: prompt: it must contain {response}",
        ),
    ],
)
def test_rewards_of_servers_are_checked_without_them(written, reward: str, args: str, found: str | None):
    lines = written(f"ptf.rl.rewards:{reward}", args)
    assert lines == [] if found is None else any(line.startswith(found) for line in lines)


def test_faults_of_plugins_and_of_keys_are_reported_together(written, tmp_path: Path):
    found = written(scale="scael", args="{strenght: 2, strength: 1}", algo="{}\ntrian: {}")
    assert [line.split(" ")[1] for line in found] == ["recipe.args.strenght", "trian", "rollout.reward.args.scael"]
    assert str(tmp_path) in plugin_path()  # for child processes
