"""The layers, checked on the syntax tree of every file: a violation names file:line and the rule.

An import counts where it stands: at module level, or lazily (inside a function, or under TYPE_CHECKING).
"""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

BASE = {"errors", "workspace", "varlen", "meshes"}  # what everybody may import
DATA = BASE | {"config", "storage", "data", "model"}
TRAIN = DATA | {"compute", "recipes"}
BY_MODULE = {"evaluate"}  # packages whose modules stand on different layers
MAY_IMPORT = {  # part of ptf → the parts it may import besides itself
    "": {"api", "config", "serving", "errors", "training_run"},  # for type checkers
    "artifact": BASE | {"config", "data"},
    "errors": set(),
    "varlen": set(),
    "meshes": {"config"},
    "workspace": {"errors"},
    "config": BASE,
    "storage": BASE,
    "data": BASE | {"config", "storage"},
    "model": BASE | {"config", "storage"},
    "compute": BASE | {"config", "storage"},
    "events": TRAIN | {"rl"},
    "tasks": BASE | {"config", "data", "rl", "events"},  # demo plugins: found by name, imported by nobody
    "recipes": DATA,
    "train": TRAIN,
    "rl": TRAIN | {"train", "events"},
    "evaluate": set(),
    "evaluate.gate": BASE | {"artifact", "config", "storage", "events", "recipes"},  # torch-free
    "evaluate.measurement": TRAIN | {"train", "rl", "artifact", "evaluate.gate", "events"},
    "run": TRAIN | {"train", "rl", "artifact", "evaluate.measurement"},
    "training_run": TRAIN | {"train", "artifact", "run", "evaluate.gate"},
    "evaluate.replay": TRAIN | {"rl", "run", "training_run"},
    "evaluate.evaluation": TRAIN | {"evaluate.gate", "evaluate.measurement", "artifact", "run", "training_run"},
    "publish": TRAIN | {"evaluate.gate", "evaluate.measurement", "train", "artifact", "run", "training_run"},
    "serving": TRAIN | {"train", "rl", "events"},
    "inspection": TRAIN | {"train", "rl", "run"},
    "episode_preview": TRAIN | {"train", "rl", "run", "inspection"},
    "api": BASE
    | {"compute", "config", "evaluate.gate", "inspection", "training_run", "evaluate.evaluation"}
    | {"publish", "serving", "episode_preview", "evaluate.replay"},
    "cli": TRAIN | {"", "api", "train", "rl", "run", "inspection", "serving", "episode_preview"},
}
STEPS_AT_MODULE_LEVEL = {"config", "storage", "errors", "artifact"}
FLOWS = {"artifact", "config", "errors", "workspace"}

PACKAGES = {
    "metaflow": ["flows/*"],
    "ray": [
        "ptf/compute/gang.py",
        "ptf/compute/ray_session.py",
        "ptf/compute/ray_jobs.py",
        "ptf/compute/ray_authentication.py",
        "ptf/rl/ray_cluster.py",
    ],
    "verl": ["ptf/compute/gang.py", "ptf/rl/ray_cluster.py"],
    "vllm": [
        "ptf/rl/engines/vllm_engine.py",
        "ptf/rl/engines/vllm_extension.py",
        "ptf/rl/engines/vllm_tries.py",
    ],
    "transformers": [
        "ptf/data/tokenizer.py",
        "ptf/data/tokenizer_files.py",
        "ptf/data/character_tokenizer.py",
        "ptf/data/event_tokenizer.py",
        "ptf/model/verify.py",
        "ptf/model/hf_adapters.py",
        "ptf/model/reference.py",
        "ptf/model/head.py",
        "ptf/model/hf_backend.py",
        "ptf/model/hf_language_model.py",
        "ptf/model/hf_weights.py",
    ],
    "pyarrow": [
        "ptf/data/sources/blocks.py",
        "ptf/data/sources/columnar.py",
        "ptf/data/sources/json_values.py",
        "ptf/data/sources/jsonl.py",
        "ptf/data/token_file.py",
    ],
    "fsspec": ["ptf/storage/store.py"],
    "httpx": ["ptf/storage/hub.py", "ptf/publish/publishing.py", "ptf/rl/rewards/server_reward.py"],
    "s3fs": ["ptf/storage/store.py"],
    "pydantic": ["ptf/config/*", "ptf/recipes/online.py", "ptf/recipes/*/config.py"],
    "gymnasium": ["ptf/rl/environments/gymnasium.py"],
    "textarena": ["ptf/rl/environments/textarena.py"],
    "reasoning_gym": ["ptf/rl/environments/reasoning_gym.py"],
    "mcp": ["ptf/rl/environments/mcp.py"],
    "rich": ["ptf/cli.py", "ptf/inspection/plan.py", "ptf/inspection/terminal.py", "ptf/episode_preview/terminal.py"],
}
ALGO_CONFIGS = [
    "ptf/recipes/online.py",
    "ptf/recipes/rules.py",
    "ptf/recipes/*/config.py",
]
TORCH_FREE = [
    "ptf/recipes/registry.py",
    *ALGO_CONFIGS,
    "ptf/config/*",
    "ptf/storage/*",
    "ptf/errors.py",
    "ptf/cli.py",
    "ptf/data/*",
]
TORCH_ANYWAY = ["ptf/data/batch.py"]
TORCH_ONLY_LAZILY = ["steps/*", "flows/*"]


class Import(NamedTuple):
    module: str  # dotted, absolute; for `from a import b` both a and a.b
    line: int
    lazy: bool


def imports(tree: ast.Module, package: str) -> Iterator[Import]:
    """Every import of a file, which lies in `package`."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, lazy)
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            yield from walk(
                child, lazy or typing_only or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            )

    yield from walk(tree, False)


def broken_rule(file: str, found: Import) -> str | None:
    """The rule that an import in `file` (relative, with slashes) breaks."""
    top, _, rest = found.module.partition(".")

    def is_in(patterns):
        return any(fnmatch(file, pattern) for pattern in patterns)

    if top in PACKAGES and not is_in(PACKAGES[top]):
        return f"{top} may appear only in {', '.join(PACKAGES[top])}"
    if top == "torch" and is_in(TORCH_FREE) and not is_in(TORCH_ANYWAY):
        return "torch may not appear here"
    if top == "torch" and is_in(TORCH_ONLY_LAZILY) and not found.lazy:
        return "torch may not be imported at module level here"
    home, part = file.split("/")[0], part_of(rest.split("."))
    if top == "flows":
        return None if home == "flows" else "nothing imports flows"
    if top == "steps" and home == "ptf":
        return "ptf may not import steps"
    if top != "ptf":
        return None
    if home == "steps":
        return (
            None
            if found.lazy or part in STEPS_AT_MODULE_LEVEL
            else f"ptf.{part} may be imported only inside functions in steps"
        )
    if home == "flows":
        return None if part in FLOWS else f"flows may import steps and ptf.config, not ptf.{part}"
    if home == "ptf" and is_in(ALGO_CONFIGS) and not found.lazy:
        knows = found.module.startswith("ptf.config.section.") or is_algo_config(found.module)
        return None if knows else "keys of algorithms know ptf.config.section and each other alone"
    own = part_of(list(Path(file).with_suffix("").parts[1:])).removesuffix("__init__").removesuffix(".")
    return None if part == own or part in MAY_IMPORT.get(own, set()) else f"ptf.{own} may not import ptf.{part}"


def part_of(names: list[str]) -> str:
    """The part of ptf that a module below it belongs to, by the names of its path."""
    return ".".join(names[: 2 if names[:1] and names[0] in BY_MODULE else 1])


def is_algo_config(module: str) -> bool:
    parent = module.rpartition(".")[0].replace(".", "/")
    return any(fnmatch(f"{parent}.py", pattern) for pattern in ALGO_CONFIGS)


def violations(root: Path) -> list[str]:
    found = []
    for file in sorted(path for top in ("ptf", "steps", "flows") for path in (root / top).rglob("*.py")):
        name = file.relative_to(root).as_posix()
        for one in imports(ast.parse(file.read_text()), ".".join(name.split("/")[:-1])):
            if rule := broken_rule(name, one):
                found.append(f"{name}:{one.line}  {one.module}: {rule}")
    return list(dict.fromkeys(found))


def test_layers():
    assert violations(ROOT) == []


def test_every_part_has_a_place_in_the_layers():
    parts = {
        path.name.removesuffix(".py").replace("__init__", "")
        for path in (ROOT / "ptf").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert parts <= MAY_IMPORT.keys()


@pytest.mark.parametrize(
    ("file", "text", "violation"),
    [
        (
            "ptf/data/a.py",
            "import os\nfrom ptf.model.decoder import Decoder",
            "ptf/data/a.py:2  ptf.model.decoder.Decoder: ptf.data may not import ptf.model",
        ),
        ("ptf/data/a.py", "from ptf import model", "ptf/data/a.py:1  ptf.model: ptf.data may not import ptf.model"),
        (
            "ptf/data/a.py",
            "from ..compute import world",
            "ptf/data/a.py:1  ptf.compute.world: ptf.data may not import ptf.compute",
        ),
        ("ptf/data/a.py", "def f():\n    import torch", "ptf/data/a.py:2  torch: torch may not appear here"),
        (
            "ptf/recipes/a/config.py",
            "from ptf.config.schema import Job",
            "ptf/recipes/a/config.py:1  ptf.config.schema.Job: keys of algorithms know ptf.config.section",
        ),
        (
            "ptf/config/a.py",
            "from ptf.recipes.registry import build",
            "ptf/config/a.py:1  ptf.recipes.registry.build: ptf.config may not import ptf.recipes",
        ),
        (
            "ptf/recipes/a.py",
            "import ptf.compute.world",
            "ptf/recipes/a.py:1  ptf.compute.world: ptf.recipes may not import ptf.compute",
        ),
        (
            "ptf/train/a.py",
            "def f():\n    import ptf.rl.online_run",
            "ptf/train/a.py:2  ptf.rl.online_run: ptf.train may not import ptf.rl",
        ),
        ("ptf/rl/a.py", "from ptf.tasks import demo", "ptf/rl/a.py:1  ptf.tasks.demo: ptf.rl may not import ptf.tasks"),
        (
            "ptf/tasks/a.py",
            "from ptf import storage",
            "ptf/tasks/a.py:1  ptf.storage: ptf.tasks may not import ptf.storage",
        ),
        (
            "ptf/evaluate/measurement.py",
            "from ptf.run import run",
            "ptf/evaluate/measurement.py:1  ptf.run.run: ptf.evaluate.measurement may not import ptf.run",
        ),
        ("ptf/train/a.py", "import ray.util", "ptf/train/a.py:1  ray.util: ray may appear only in "),
        (
            "ptf/rl/a.py",
            "try:\n    from vllm import LLM\nexcept ImportError: ...",
            "ptf/rl/a.py:2  vllm.LLM: vllm may appear only in ptf/rl/engines/vllm_engine.py, ",
        ),
        ("ptf/train/a.py", "import steps.stages", "ptf/train/a.py:1  steps.stages: ptf may not import steps"),
        ("steps/a.py", "import torch", "steps/a.py:1  torch: torch may not be imported at module level here"),
        (
            "steps/a.py",
            "from ptf.evaluate.measurement import measure_run",
            "steps/a.py:1  ptf.evaluate.measurement.measure_run: "
            "ptf.evaluate.measurement may be imported only inside functions in steps",
        ),
        ("steps/a.py", "import metaflow", "steps/a.py:1  metaflow: metaflow may appear only in flows/*"),
        (
            "flows/a.py",
            "def f():\n    from ptf.run import run",
            "flows/a.py:2  ptf.run.run: flows may import steps and ptf.config, not ptf.run",
        ),
    ],
)
def test_a_planted_violation_is_caught(tmp_path, file, text, violation):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    found = violations(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(violation)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("ptf/data/batch.py", "import torch"),
        (
            "ptf/data/sources/blocks.py",
            (
                "import pyarrow.parquet\nfrom ptf.storage import open_read\nfrom . import sample\n"
                "from ptf.errors import UserError"
            ),
        ),
        ("ptf/rl/a.py", "from ptf.train import trainer\nfrom ptf.data.batch import Batch"),
        (
            "steps/a.py",
            (
                "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\ndef f():\n    import ptf.run, "
                "torch\nfrom ptf.artifact import Artifact"
            ),
        ),
        (
            "flows/a.py",
            (
                "import metaflow\nfrom ptf.config import load\nfrom flows.base import Flow\ndef f():\n"
                "    import steps.stages"
            ),
        ),
    ],
)
def test_what_is_allowed_is_not_caught(tmp_path, file, text):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    assert violations(tmp_path) == []
