"""vLLM loads the adapter that a run leaves, beside the base model, and gives what the trained model does."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ptf.compute.world import World
from ptf.config.sections.model import LoraConfig, ModelConfig
from ptf.errors import UserError
from ptf.model import bridge
from ptf.model.decoder import Decoder
from ptf.model.layers import LayerFactory
from ptf.model.lora import Lora, adapter_names, adapters_off
from ptf.model.peft_format import PeftFormat, save
from ptf.rl.engine_settings import EngineSettings
from ptf.rl.engines.protocol import Request, Sampling, generate_all
from ptf.rl.engines.vllm_engine import engine_env, max_lora_rank
from ptf.rl.weights.stored import into_buckets
from ptf.rl.weights.verification import SyncError, manifest_of
from tests import tiny
from tests.child import run_python

TOKENS = torch.randint(0, 97, (30,), generator=torch.Generator().manual_seed(0)).tolist()


@torch.no_grad()
def logprobs(model: Decoder, ids: Sequence[int] = TOKENS) -> Tensor:
    tokens = torch.tensor([ids])
    logits = model(
        tokens, torch.arange(len(ids))[None], torch.zeros(1, len(ids), dtype=torch.long), lambda x, head: head.logits(x)
    )[0, :-1]
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1)


def serve(place: str) -> None:
    """In a process of its own: log-probs without and with the adapter, to `place/found.pt`."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=f"{place}/m",
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 27,
        max_model_len=128,
        skip_tokenizer_init=True,
        enable_lora=True,
        max_lora_rank=16,
        max_num_seqs=4,
        max_num_batched_tokens=256,
    )
    how = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = {}
    for name, adapter in {"base": None, "adapted": LoRARequest("trained", 1, f"{place}/adapter")}.items():
        (answer,) = llm.generate([{"prompt_token_ids": TOKENS}], how, lora_request=adapter, use_tqdm=False)
        found[name] = torch.tensor(
            [at[token].logprob for token, at in zip(TOKENS[1:], answer.prompt_logprobs[1:], strict=True)]
        )  # type: ignore[index]
    torch.save(found, f"{place}/found.pt")


def adapted(directory: Path, seed: int) -> tuple[Decoder, PeftFormat]:
    model = bridge.load(directory, factory=LayerFactory(lora=Lora(8, 16.0 * 8**0.5)))
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in sorted(adapter_names(model)):
            p = model.get_parameter(name)
            p += 0.03 * torch.randn(p.shape, generator=g)
    return model, model.peft()


def in_process(function: str, place: Path) -> None:
    code = f"from tests.rl.test_vllm_adapter import {function}; {function}({str(place)!r})"
    env = {**os.environ, **engine_env(place / "vllm"), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = run_python("-c", code, env=env, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.cluster
def test_vllm_reads_the_adapter(tmp_path):
    model, form = adapted(directory := tiny.checkpoint(tmp_path / "m"), 1)
    save(form.tensors(), form.config(str(directory)), tmp_path / "adapter", writes=True)
    in_process("serve", tmp_path)
    found = torch.load(tmp_path / "found.pt")
    assert float((found["adapted"] - logprobs(model)).abs().max()) < 1e-4
    with adapters_off(model):
        base = logprobs(model)
    assert float((found["base"] - base).abs().max()) < 1e-4
    assert float((found["adapted"] - base).abs().max()) > 1e-2, "negative control: the adapter does something"


def sync(place: str) -> None:
    """In a process of its own: two adapters one after the other, sent to our engine;
    greedy answers and prompt log-probs with each, to `place/found.pt`."""
    engine = EngineSettings(
        kind="vllm",
        directory=f"{place}/m",
        version=-1,
        seed=0,
        precision="fp32",
        max_length=128,
        model=ModelConfig(path=f"{place}/m", lora=LoraConfig(rank=16)),
        adapter=True,
        cpu_kv_cache_gib=0.125,
    ).start(World())
    found = []
    for version in range(2):
        model, form = adapted(Path(place) / "m", version)
        buckets = list(into_buckets(form.tensors(), {}))
        manifest = dataclasses.replace(manifest_of(buckets, version), adapter=form.config(f"{place}/m"))
        with contextlib.suppress(SyncError):
            engine.load_weights([buckets[0][1:]], manifest)
            raise AssertionError("part of an adapter was taken")
        assert engine.load_weights(buckets, manifest).version == version == engine.version
        (generation,) = generate_all(engine, [Request(np.array(TOKENS, np.int32), Sampling(8, 1.0, ()), 3)], 60)
        said = np.concatenate([generation.context, generation.sampled_ids])
        judged = logprobs(model, said.tolist())[len(TOKENS) - 1 :].numpy()
        found.append(
            {
                "prompt_logprobs": engine.prompt_logprobs([np.array(TOKENS)])[0],
                "ours": logprobs(model).numpy(),
                "drawn": generation.logprobs,
                "judged": judged,
            }
        )
    torch.save(found, f"{place}/found.pt")


@pytest.mark.cluster
def test_adapters_are_sent_to_our_engine_one_after_the_other(tmp_path):
    tiny.checkpoint(tmp_path / "m")
    in_process("sync", tmp_path)
    first, second = torch.load(tmp_path / "found.pt", weights_only=False)
    for found in (first, second):
        assert np.abs(found["prompt_logprobs"] - found["ours"]).max() <= 1e-5
        assert np.abs(found["drawn"] - found["judged"]).max() <= 1e-5
    assert np.abs(first["ours"] - second["ours"]).max() > 1e-2, "negative control: they differ"


@pytest.mark.parametrize(
    ("rank", "more", "said"),
    [(8, {}, 8), (20, {}, 32), (513, {}, "rank 513"), (8, {"num_local_experts": 4}, "experts on a CPU")],
)
def test_room_for_an_adapter(tmp_path, rank, more, said):
    (tmp_path / "config.json").write_text(json.dumps(more))
    if isinstance(said, int):
        assert max_lora_rank(rank, tmp_path, "float32") == said
    else:
        with pytest.raises(UserError, match=said):
            max_lora_rank(rank, tmp_path, "float32")
