"""vLLM loads the adapter that a run leaves, beside the base model, and gives what the trained model does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ptf.model import bridge
from ptf.model.decoder import Decoder
from ptf.model.layers import Parts
from ptf.model.lora import Lora, adapter_names, adapters_off
from ptf.model.peft_format import PeftFormat, save
from ptf.rl.vllm_engine import engine_env
from tests import tiny

TOKENS = torch.randint(0, 97, (30,), generator=torch.Generator().manual_seed(0)).tolist()


@torch.no_grad()
def logprobs(model: Decoder) -> Tensor:
    tokens = torch.tensor([TOKENS])
    logits = model(tokens, torch.arange(30)[None], torch.zeros(1, 30, dtype=torch.long), lambda x, head: head.logits(x))[0, :-1]
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1)


def serve(place: str) -> None:
    """In a process of its own: log-probs without and with the adapter, to `place/found.pt`."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=f"{place}/m", dtype="float32", enforce_eager=True, kv_cache_memory_bytes=1 << 27, max_model_len=128, skip_tokenizer_init=True,
        enable_lora=True, max_lora_rank=16, max_num_seqs=4, max_num_batched_tokens=256,
    )  # fmt: skip
    how = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = {}
    for name, adapter in {"base": None, "adapted": LoRARequest("trained", 1, f"{place}/adapter")}.items():
        (answer,) = llm.generate([{"prompt_token_ids": TOKENS}], how, lora_request=adapter, use_tqdm=False)
        found[name] = torch.tensor([at[token].logprob for token, at in zip(TOKENS[1:], answer.prompt_logprobs[1:], strict=True)])  # type: ignore[index]
    torch.save(found, f"{place}/found.pt")


@pytest.mark.cluster
def test_vllm_reads_the_adapter(tmp_path):
    directory = tiny.checkpoint(tmp_path / "m")
    model, family = bridge.build(directory, parts=Parts(lora=Lora(8, 16.0, rslora=True)))
    bridge.materialize(model, torch.device("cpu"))
    bridge.load_hf(model, directory, family)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in sorted(adapter_names(model)):
            p = model.get_parameter(name)
            p += 0.03 * torch.randn(p.shape, generator=g)
    form = PeftFormat(model, family)
    save(form.tensors(), form.config(str(directory)), tmp_path / "adapter", writes=True)
    code = f"from tests.rl.test_vllm_adapter import serve; serve({str(tmp_path)!r})"
    env = {**os.environ, **engine_env(tmp_path / "vllm"), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "found.pt")
    assert float((found["adapted"] - logprobs(model)).abs().max()) < 1e-4
    with adapters_off(model):
        base = logprobs(model)
    assert float((found["base"] - base).abs().max()) < 1e-4
    assert float((found["adapted"] - base).abs().max()) > 1e-2, "negative control: the adapter does something"
