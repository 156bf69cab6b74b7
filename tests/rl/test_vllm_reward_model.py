"""vLLM's classifier, with its activation off, gives a reward model's scores."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ptf.compute.world import World
from ptf.config.sections.model import ModelConfig
from ptf.data.batch import Batch
from ptf.data.encode import encode_preference
from ptf.data.tokenizer import Tokenizer
from ptf.recipes.rm.recipe import RM
from ptf.rl.engines.vllm_engine import engine_env
from ptf.train.trainer import load_model
from tests.recipes.of_keys import of_keys
from tests.train.test_loop import train
from tests.train.test_preferences import preferences


def serve(model: str, asked: str, found: str) -> None:
    """In a process of its own."""
    from vllm import LLM
    from vllm.pooling_params import PoolingParams

    llm = LLM(
        model=model, runner="pooling", dtype="float32", enforce_eager=True, max_model_len=64, gpu_memory_utilization=0.1
    )
    prompts = [{"prompt_token_ids": ids} for ids in json.loads(Path(asked).read_text())]
    said = llm.classify(prompts, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    Path(found).write_text(json.dumps([one.outputs.probs for one in said]))


@pytest.mark.cluster
def test_vllm_gives_the_same_scores(tmp_path):
    run = train(preferences(tmp_path, "rm"), "run", train__steps=4)
    (pair,) = encode_preference({"prompt": "3+4=", "chosen": "7", "rejected": "81"}, Tokenizer.load(str(run / "model")))
    model = load_model(
        run / "model", World(), ModelConfig(path=str(run / "model")), seed=0, precision="fp32", head="scalar"
    )
    with torch.no_grad():
        ours = of_keys(RM).scores(model, Batch.of([[pair]], 64)).tolist()
    asked, found = tmp_path / "asked.json", tmp_path / "found.json"
    asked.write_text(json.dumps([sample.tokens.tolist() for sample in pair]))
    code = (
        f"from tests.rl.test_vllm_reward_model import serve; serve({str(run / 'model')!r}, {str(asked)!r}, "
        f"{str(found)!r})"
    )
    env = {**os.environ, **engine_env(tmp_path / "vllm"), "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=300)
    assert [score for (score,) in json.loads(found.read_text())] == pytest.approx(ours, abs=1e-5)
