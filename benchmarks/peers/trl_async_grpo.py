"""TRL's asynchronous GRPO trainer on a CPU: the peer of benchmarks/async_peer.py, run by the Python of an environment
of its own (requirements-peers.txt).

Reads a file with one JSON object: model directory (with its tokenizer), prompts and answers, group, most new tokens,
steps, learning rate, staleness, address of vLLM's server, directory, file of the metrics. Writes a JSON line a step.

Four parts of TRL 1.16 cannot run here, and have stand-ins. Its transport of weights is NCCL: here a file that vLLM's
worker reads (`weight_transfer`, which TRL has for that). Its attention is a FlashAttention 3 kernel for CUDA: here
torch's, for the same segments, under the same name of transformers' registry. It asks CUDA for the name of the device,
to look up its peak: here there is no peak. And its rollout worker asks for a vLLM in the trainer's own environment,
although it speaks HTTP with a server: here that check alone is left out.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoTokenizer, TrainerCallback, logging
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, async_rollout_worker
from trl.experimental.async_grpo.packing import TREE_ATTENTION
from trl.experimental.async_grpo.vllm_client import VLLMClient

# a message of nothing but text, for a template that TRL does not know
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|><|assistant|>",
    "fields": {"content": {"close": "<|im_end|>", "content": "text"}},
}


class Reward:
    """A reward of the ids of each completion, whose text is what ptf's rewards get."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer, self.kind, self.__name__ = tokenizer, name, name

    def __call__(self, completion_ids: list[list[int]], answer: list[str], **more: Any) -> list[float]:
        end = self.tokenizer.eos_token_id
        texts = [self.tokenizer.decode(ids[:-1] if ids[-1:] == [end] else ids) for ids in completion_ids]
        if self.kind == "length":  # differs within a group and costs nothing
            return [(len(text) % 7) / 7 for text in texts]
        return [sum(a == b for a, b in zip(t, r, strict=False)) / len(r) for t, r in zip(texts, answer, strict=True)]


class FileTransfer:
    """Weights to vLLM's server by way of a file, between the pause and the resumption that TRL asks for."""

    def __init__(self, url: str, path: Path) -> None:
        self.client, self.url, self.path = VLLMClient(url), url, path

    def init_weight_transfer(self) -> None:
        self.client.wait_for_server_ready()

    def pause(self) -> None:
        self.client.pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        save_file({name: tensor.contiguous().clone() for name, tensor in iterator}, self.path)
        call = {"method": "load_from", "args": [str(self.path)]}
        requests.post(f"{self.url}/collective_rpc", json=call, timeout=60).raise_for_status()

    def resume(self) -> None:
        self.client.resume()

    def destroy(self) -> None:
        pass


def segments(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from each segment to the path that it ends."""
    rows, paths = tree_cu_seqlens_q.diff().tolist(), tree_cu_seqlens_k.diff().tolist()
    parts = zip(
        query.split(rows, 2),
        key[:, :, tree_kv_index].split(paths, 2),
        value[:, :, tree_kv_index].split(paths, 2),
        strict=True,
    )
    found = []
    for q, k, v in parts:
        n, m = q.shape[2], k.shape[2]
        seen = torch.ones(n, m, dtype=torch.bool).tril(m - n)  # the last query is the last key
        found.append(scaled_dot_product_attention(q, k, v, seen, scale=scaling, enable_gqa=True))
    return torch.cat(found, 2).transpose(1, 2), None


class Log(TrainerCallback):
    """A JSON line a step: the time, the tokens that the server has sampled so far, and what TRL logs."""

    def __init__(self, path: str, url: str) -> None:
        self.path, self.url = path, url

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if "loss" in logs:
            counters = requests.get(f"{self.url}/metrics", timeout=60).text.splitlines()
            sampled = sum(
                float(line.split()[-1]) for line in counters if line.startswith("vllm:generation_tokens_total")
            )
            row = {"step": state.global_step, "time": time.time(), "sampled": sampled, **logs}
            with open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(given["model"], padding_side="left")
    tokenizer.response_template = RESPONSE
    async_rollout_worker.is_vllm_available = lambda: True
    async_grpo_trainer.get_peak_flops_per_device = lambda *given: None
    args = AsyncGRPOConfig(
        output_dir=given["directory"],
        max_steps=given["steps"],
        per_device_train_batch_size=given["prompts_per_step"] * given["group"],
        gradient_accumulation_steps=1,
        num_generations=given["group"],
        max_completion_length=given["tokens"],
        temperature=1.0,
        token_budget=-1,
        max_staleness=given["staleness"],
        vllm_server_base_url=given["url"],
        seed=given["seed"],
        bf16=False,
        use_cpu=True,
        learning_rate=given["lr"],
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta2=given["beta2"],
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = AsyncGRPOTrainer(
        model=given["model"],
        reward_funcs=Reward(tokenizer, given["reward"]),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": given["prompts"], "answer": given["answers"]}),
        processing_class=tokenizer,
        callbacks=[Log(given["metrics"], given["url"])],
        weight_transfer=FileTransfer(given["url"], Path(given["directory"]) / "weights.safetensors"),
    )
    AttentionInterface.register(TREE_ATTENTION, segments)
    trainer.train()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
