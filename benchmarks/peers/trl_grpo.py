"""TRL's GRPO step, timed: the peer of benchmarks/grpo_step.py, run by the Python of an environment of its own
(requirements-peers.txt).

Reads one JSON object from the command line: model directory (with its tokenizer), texts, lengths of each step's
responses, how many of them there are, are in a group and in a pass, steps, warm-up, dtype, learning rate; prints one
JSON line. Every response ends at its length, with the end-of-turn token.
"""

import json
import sys
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, TrainerCallback, logging
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """CPU-seconds at the end of each step."""

    def __init__(self) -> None:
        self.ends, self.logs = [], []

    def on_step_end(self, args, state, control, **more) -> None:
        self.ends.append(time.process_time())

    def on_log(self, args, state, control, logs=None, **more) -> None:
        self.logs.append(logs)


class Ends(LogitsProcessor):
    """Ends every response at its length."""

    def __init__(self, lengths: list[int], prompt: int, end: int) -> None:
        self.lengths, self.prompt, self.end = torch.tensor(lengths), prompt, end

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = input_ids.shape[1] - self.prompt + 1 >= self.lengths
        scores[:, self.end] = float("-inf")
        scores[last] = float("-inf")
        scores[last, self.end] = 0.0
        return scores


def limit(model, lengths: list[list[int]]) -> None:
    """Let each call of `generate` end its responses at the next step's lengths."""
    generate, of_steps = model.generate, iter(lengths)

    def limited(*more, **named):
        ends = Ends(next(of_steps), named["input_ids"].shape[1], model.config.eos_token_id)
        return generate(*more, **named, logits_processor=[ends])

    model.generate = limited


def main() -> None:
    given = json.loads(sys.argv[1])
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(given["seed"])
    dtype = torch.bfloat16 if given["dtype"] == "bf16" and given["weights"] == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=dtype, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    model.config.eos_token_id = tokenizer.eos_token_id
    limit(model, given["lengths"])
    clock, seen = Clock(), []

    def reward(completions, completion_ids, **more):
        seen.append([len(ids) for ids in completion_ids])
        return [float(sum(ids) % 7) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as out:
        args = GRPOConfig(
            output_dir=out,
            max_steps=given["steps"] + given["warmup"],
            per_device_train_batch_size=given["pass"],
            gradient_accumulation_steps=given["responses"] // given["pass"],
            num_generations=given["group"],
            max_completion_length=max(map(max, given["lengths"])),
            beta=0.0,
            temperature=1.0,
            bf16=given["dtype"] == "bf16",
            fp16=False,
            use_cpu=True,
            learning_rate=given["lr"],
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            gradient_checkpointing=False,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            weight_decay=0.0,
            max_grad_norm=1.0,
            shuffle_dataset=False,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": given["texts"]}),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    steps = [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)][-given["steps"] :]
    print(json.dumps({"cpu_s": steps, "tokens": [sum(one) for one in seen][-given["steps"] :]}))


if __name__ == "__main__":
    main()
