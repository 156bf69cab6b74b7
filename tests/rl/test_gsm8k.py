"""GSM8K through the whole loop: a real tokenizer, math-verify's rewards, a small model from random weights.
The mechanics, not learning."""

import json
import shutil

import pytest
import yaml

from ptf.compute.tracking import read_metrics
from ptf.config import loads
from ptf.data.tokenizer import Tokenizer
from ptf.run import run
from tests.tiny import SIZES, read_jsonl


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["minimind", "qwen3"])
def test_twenty_steps_of_gsm8k(name, shared, tmp_path):
    pytest.importorskip("math_verify")
    model = tmp_path / "model"
    shutil.copytree(shared / "tokenizers" / name, model)
    tokenizer = Tokenizer.load(str(model))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **SIZES,
        "vocab_size": tokenizer.vocab_size,
        "max_position_embeddings": 1024,
    }
    (model / "config.json").write_text(
        json.dumps({**config, "tie_word_embeddings": True, "torch_dtype": "float32", "hidden_act": "silu"})
    )
    prompts = {"path": str(shared / "gsm8k" / "train.jsonl"), "kind": "prompt", "columns": {"prompt": "question"}}
    job = {
        "recipe": "grpo",
        "output": str(tmp_path / "runs"),
        "model": {"path": str(model), "init": "random"},
        "seed": 3,
        "data": {"sources": {"gsm8k": prompts}, "seq_len": 512, "too_long": "drop"},
        "algo": {"num_minibatches": 2, "kl_coef": 0.01},
        "rollout": {
            "engine": "native",
            "prompts_per_step": 4,
            "group_size": 4,
            "max_new_tokens": 24,
            "reward": {"use": "tests.rl.plugs:numbers_said"},
        },
        "train": {"steps": 20, "lr": 1e-3, "precision": "fp32", "validate_every": 20},
        "evaluate": {
            "sources": {"test": {**prompts, "path": str(shared / "gsm8k" / "test_first819.jsonl")}},
            "limit": 8,
            "max_new_tokens": 24,
        },
        "compute": {"launcher": "local", "device": "cpu"},
        "checkpoint": {"every": 10},
        "track": {"tensorboard": False, "samples_every": 5, "sample_prompts": 4},
    }
    made = run(loads(yaml.safe_dump(job)), "a")
    rows = read_metrics(made / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert all(
        row["no_result_share"] == 0 and row["logprob_diff_max"] <= 1e-5 and row["canary_logprob_diff_max"] <= 1e-5
        for row in rows
    )
    assert rows[-1]["no_result_share/test"] == 0
    samples = read_jsonl(made / "samples.jsonl")
    assert len(samples) == 5 * 4 * 4
    assert all(
        sample["row"]["answer"].rpartition("####")[2].strip() and len(sample["tokens"]) <= 24 for sample in samples
    )
