"""Which families vLLM is refused for: what was measured is what is refused, where it was measured."""

import importlib.util
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from benchmarks.vllm_families import DTYPES, LENGTHS, is_right, rows_of, small_config, written
from ptf import api, cli
from ptf.config import loads
from ptf.errors import UserError
from ptf.evaluate import measurement
from ptf.inspection.touch import raise_if_vllm_is_wrong
from ptf.model.families import MODULES, family_of
from ptf.rl.engines import vllm_support
from ptf.rl.engines.native import NativeEngine
from ptf.rl.engines.vllm_engine import engine_env
from ptf.rl.engines.vllm_support import MEASURED_ON, SHARES, WRONG, Build, hf_overrides, rotates_in_part, verdict_on
from ptf.rl.rollout_role import evaluation_engine, sampler_spec
from tests.child import run_python

LEDGER = Path(__file__).parents[3] / "benchmarks" / "results" / "vllm_families.jsonl"
HERE = Build(cpu=True, version=MEASURED_ON)
LATER = Build(cpu=True, version="9.9.9")
GPU = Build(cpu=False, version=MEASURED_ON)


def test_every_family_is_measured_and_what_is_wrong_is_refused():
    rows = rows_of(LEDGER)
    assert {kind for kind, _ in rows} == set(MODULES)
    assert set(WRONG) <= set(MODULES)
    for kind in MODULES:
        for dtype in DTYPES:
            row = rows[kind, dtype]
            assert row["vllm"] == MEASURED_ON
            assert is_right(dtype, row["found"]) == (dtype not in WRONG.get(kind, {})), (kind, dtype)


def test_a_family_that_does_not_load_is_said_not_to():
    for (kind, dtype), row in rows_of(LEDGER).items():
        if fault := WRONG.get(kind, {}).get(dtype):
            assert fault.loads == bool(row["found"].get("loads")), (kind, dtype)


@pytest.fixture
def here(monkeypatch):
    """`here(build)`: this vLLM is installed."""
    return lambda build: monkeypatch.setattr(vllm_support, "installed_build", lambda: build)


def job_file(place: Path, model_type: str, precision: str = "bf16", engine: str = "vllm", **config) -> Path:
    """The config of a job whose model is of a family, with everything else that a check looks at."""
    (place / "m").mkdir(exist_ok=True)
    (place / "m" / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    (place / "a.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    source = {"a": {"path": str(place / "a.jsonl"), "kind": "prompt"}}
    raw = {
        "recipe": "grpo",
        "model": {"path": str(place / "m")},
        "data": {"sources": source},
        "train": {"steps": 1, "lr": 1e-4, "precision": precision},
        "compute": {"launcher": "ray"},
        "rollout": {"reward": {"use": "ptf.rl.rewards:exact"}, "engine": engine},
        "evaluate": {"sources": source},
    }
    (place / "job.yaml").write_text(yaml.safe_dump(raw))
    return place / "job.yaml"


def checked(place: Path, capsys) -> tuple[int, str]:
    """The exit status of `ptf check`, and what it says."""
    status = cli.main(["check", str(place)])
    return status, " ".join(capsys.readouterr().err.split())


def test_check_refuses_what_is_wrong_with_one_message_and_a_way_out(tmp_path, here, capsys):
    here(HERE)
    status, said = checked(job_file(tmp_path, "qwen3_next", "fp32"), capsys)
    assert status == 2
    assert said == (
        "rollout.engine: vLLM does not serve qwen3_next in fp32 rightly: its kernel of linear attention computes in "
        f"bf16 alone (measured on vLLM {MEASURED_ON}); use rollout.engine: native"
    )
    job = loads((tmp_path / "job.yaml").read_text())
    with pytest.raises(UserError, match="qwen3_next in fp32"):
        api.check(job)
    with pytest.raises(UserError, match=r"use rollout\.engine: native"):
        sampler_spec(job, tmp_path / "m", "", tmp_path, None, engine="vllm", for_training=True, length=8)
    with pytest.raises(UserError, match=r"use evaluate\.engine: native"):
        sampler_spec(job, tmp_path / "m", "", tmp_path, None, engine="vllm", length=8)


@pytest.mark.parametrize(
    ("kind", "precision", "engine", "config"),
    [
        ("qwen3_next", "bf16", "vllm", {}),
        ("qwen3_next", "fp32", "native", {}),
        ("qwen3_moe", "fp32", "vllm", {}),
        ("gpt2", "fp32", "vllm", {}),  # of transformers: not in the table
    ],
)
def test_check_accepts_what_is_right(tmp_path, here, capsys, kind, precision, engine, config):
    here(HERE)
    raise_if_vllm_is_wrong(loads(job_file(tmp_path, kind, precision, engine, **config).read_text()))
    assert "native" not in capsys.readouterr().out


def test_a_setting_that_its_model_class_lacks_is_refused(tmp_path, here, capsys):
    here(GPU)
    status, said = checked(job_file(tmp_path, "qwen3_next", tie_word_embeddings=True), capsys)
    assert status == 2
    assert "tied to the embedding" in said


@pytest.mark.parametrize(
    ("kind", "config", "wrong"),
    [
        ("seed_oss", {"attention_bias": False}, True),
        ("seed_oss", {"attention_bias": True}, False),
        ("deepseek_v3", {"rope_interleave": False}, True),
        ("deepseek_v3", {}, False),
        ("gpt_oss", {"tie_word_embeddings": True}, True),
        *((kind, {"attention_bias": True}, True) for kind in ("qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text")),
        ("qwen3_5", {"text_config": {"attention_bias": True}}, True),
        ("qwen3_5", {"text_config": {}}, False),
    ],
)
def test_settings_are_refused_on_every_build(kind, config, wrong):
    for build in (GPU, None):
        assert bool(verdict_on({"model_type": kind, **config}, "bf16", build, synced=False)[0]) == wrong


def test_another_version_is_said_not_to_be_measured_unless_the_family_does_not_load(tmp_path, here, capsys):
    here(LATER)
    raise_if_vllm_is_wrong(loads(job_file(tmp_path, "qwen3_next", "fp32").read_text()))
    assert "9.9.9 is installed and was not tested" in capsys.readouterr().out
    status, said = checked(job_file(tmp_path, "qwen3_5_text"), capsys)
    assert status == 2
    assert "torchvision" in said


def test_faults_of_the_cpu_build_are_not_those_of_another():
    for build in (GPU, None):
        assert not verdict_on({"model_type": "qwen3_5_text"}, "bf16", build, synced=True)[0]
        assert verdict_on({"model_type": "gpt_oss"}, "bf16", build, synced=True)[0]
        assert not verdict_on({"model_type": "gpt_oss"}, "bf16", build, synced=False)[0]


def test_auto_is_native_where_vllm_is_wrong(tmp_path):
    job = loads(job_file(tmp_path, "qwen3_next").read_text())
    assert evaluation_engine(job, True, True) == "vllm"  # control
    assert evaluation_engine(job, True, True, wrong=True) == "native"


def test_an_evaluation_says_why_it_is_native(tmp_path, here, monkeypatch, capsys):
    monkeypatch.setattr(measurement, "pick_device", lambda device: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(measurement, "installed_build", lambda: GPU)
    job = loads(job_file(tmp_path, "qwen3_next", tie_word_embeddings=True).read_text())
    assert measurement._engine_here(job, tmp_path / "m") == "native"
    assert "engine=native (vLLM does not serve qwen3_next in bf16 rightly" in capsys.readouterr().out


def test_overrides_say_what_vllm_reads_otherwise():
    router = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    assert hf_overrides({"model_type": "deepseek_v3"}) == router
    assert hf_overrides({"model_type": "deepseek_v3", **router}) == {}
    lite = {"model_type": "glm4_moe_lite", **router}
    assert hf_overrides({**lite, "mlp_layer_types": ["dense", "sparse"]}) == {"first_k_dense_replace": 1}
    assert hf_overrides({**lite, "mlp_layer_types": ["sparse", "sparse"]}) == {"first_k_dense_replace": 0}
    assert hf_overrides({**lite, "mlp_layer_types": ["sparse", "dense"]}) == {}  # which it refuses
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0}
    nested = hf_overrides({"model_type": "olmo3", "rope_parameters": yarn})["rope_parameters"]
    assert nested == {"full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
    assert hf_overrides({"model_type": "olmo3", "rope_parameters": nested}) == {}
    assert hf_overrides({"model_type": "llama", "rope_parameters": yarn}) == {}
    for given in ({"attention_factor": 1.0}, {"mscale": 1.0, "mscale_all_dim": 1.0}):
        found = hf_overrides({"model_type": "llama", "rope_parameters": {**yarn, **given}})["rope_parameters"]
        assert found["attn_factor"] * (0.1 * math.log(8) + 1) == pytest.approx(1.0)
    grown = {**yarn, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 32}
    scaling = {"beta": 0.1, "original_max_position_embeddings": 32}
    assert hf_overrides({"model_type": "ministral3", "rope_parameters": grown}) == {"llama_4_scaling": scaling}


def test_a_part_of_a_head_is_rotated():
    assert rotates_in_part({"rope_parameters": {"partial_rotary_factor": 0.75}})
    assert rotates_in_part({"text_config": {"partial_rotary_factor": 0.25}})
    assert rotates_in_part({"kv_lora_rank": 32})
    assert not rotates_in_part({"rope_parameters": {"rope_type": "default"}})
    for kind, share in SHARES.items():  # which the config.json need not name
        assert rotates_in_part({"model_type": kind})
        assert not rotates_in_part({"model_type": kind, "rope_parameters": {"partial_rotary_factor": 1.0}}), share


READS = """
import json, sys
from vllm.config import ModelConfig
from vllm.transformers_utils.config import get_config
from ptf.rl.engines.vllm_support import config_of, hf_overrides

for directory in sys.argv[2:]:
    given = hf_overrides(config_of(directory)) if sys.argv[1] == "told" else {}
    whole = {key: value for key, value in given.items() if not isinstance(value, dict)}
    config = get_config(directory, trust_remote_code=False, hf_overrides_kw=whole)
    # as ModelConfig does; making one would import the model, which needs torchvision
    parts = {key: value for key, value in given.items() if isinstance(value, dict)}
    ModelConfig._apply_dict_overrides(object.__new__(ModelConfig), config, parts)
    print(json.dumps(config.get_text_config().rope_parameters["partial_rotary_factor"]))
"""


def shares_read(how: str, directories: list[Path], caches: Path) -> list[float]:
    """The shares of a head that vLLM's configs have of these directories, with ptf's overrides if it is `told`."""
    done = run_python("-c", READS, how, *map(str, directories), env={**os.environ, **engine_env(caches)}, check=True)
    return [float(line) for line in done.stdout.splitlines()]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_rotates_the_share_that_ptf_rotates(tmp_path, vllm_caches):
    directories, wanted = [], []
    for kind in (*SHARES, "phi3"):
        named = ((0.5, 0.5, None), (0.25, 0.25, None), (1.0, 1.0, 0.5), (0.75, None, 0.75))
        for share, inner, outer in (*named, (SHARES.get(kind, 1.0), None, None)):
            config = small_config(kind)
            text = config.get("text_config", config)
            text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
            text["rope_parameters"] |= {"partial_rotary_factor": inner} if inner else {}
            text |= {"partial_rotary_factor": outer} if outer else {}
            (place := tmp_path / f"{kind}-{len(directories)}").mkdir()
            (place / "config.json").write_text(json.dumps(config))
            rotated = {layer.rope.partial for layer in family_of(config).config(config).layers if layer.rope}
            assert rotated == {share}, kind
            directories.append(place)
            wanted.append(share)
    assert shares_read("told", directories, vllm_caches) == wanted
    assert shares_read("untold", directories, vllm_caches) != wanted  # control: it needs to be told


@pytest.mark.parametrize(("kind", "precision"), [("qwen3_next", torch.bfloat16), ("glm4_moe", torch.float32)])
def test_the_measured_member_shows_whether_its_share_is_overlooked(tmp_path, kind, precision):
    place = written(kind, 0, precision, tmp_path / "m")

    def logprobs(dtype: torch.dtype) -> np.ndarray:
        engine = NativeEngine(str(place), device=torch.device("cpu"), dtype=dtype, version=0)
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, engine.model.config.vocab, n).astype(np.int32) for n in LENGTHS]
        return np.concatenate(engine.prompt_logprobs(prompts))

    right, exact = logprobs(precision), logprobs(torch.float32)
    config = json.loads((place / "config.json").read_text())
    assert config["rope_parameters"].pop("partial_rotary_factor") != SHARES[kind]
    (place / "config.json").write_text(json.dumps({**config, "partial_rotary_factor": SHARES[kind]}))
    apart = np.abs(logprobs(precision) - right)
    row = {"same_bits": True, "back_bits": True, "rounding": float(np.abs(right - exact).mean())}
    name = "fp32" if precision == torch.float32 else "bf16"
    for difference, is_so in ((apart, False), (0 * apart, True)):
        found = [float(difference.max()), float(difference.mean()), 0.0]
        assert is_right(name, row | {key: found for key in ("equals", "same", "new", "back")}) == is_so


def test_overrides_say_how_much_of_a_head_is_rotated():
    for kind, share in SHARES.items():
        other = {"rope_parameters": {"partial_rotary_factor": 1.0}}
        assert hf_overrides({"model_type": kind, **other}) == {"partial_rotary_factor": 1.0}
        assert hf_overrides({"model_type": kind, "text_config": other}) == {"text_config": other}
        for config in ({}, {"partial_rotary_factor": 0.75}, {"rope_parameters": {"partial_rotary_factor": share}}):
            assert hf_overrides({"model_type": kind, **config}) == {}
    assert hf_overrides({"model_type": "phi3", "rope_parameters": {"partial_rotary_factor": 0.5}}) == {}
