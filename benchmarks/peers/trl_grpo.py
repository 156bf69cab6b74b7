"""TRL's GRPO step, timed: the peer of benchmarks/grpo_step.py, run by the Python of an environment of its own
(requirements-peers.txt).

Reads one JSON object from the command line: model directory (with its tokenizer), prompts, group, new tokens, steps,
warm-up, dtype, learning rate; prints one JSON line. No answer ends early,
so that every step has as many tokens as the other's.
"""

import json
import sys
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, logging
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """CPU-seconds at the end of each step."""

    def __init__(self) -> None:
        self.ends, self.logs = [], []

    def on_step_end(self, args, state, control, **more) -> None:
        self.ends.append(time.process_time())

    def on_log(self, args, state, control, logs=None, **more) -> None:
        self.logs.append(logs)


def main() -> None:
    given = json.loads(sys.argv[1])
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(given["seed"])
    answers = given["prompts"] * given["group"]
    dtype = torch.bfloat16 if given["dtype"] == "bf16" and given["weights"] == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=dtype, attn_implementation="sdpa")
    clock, seen = Clock(), []

    def reward(completions, completion_ids, **more):
        seen.append([len(ids) for ids in completion_ids])
        return [float(sum(ids) % 7) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as out:
        args = GRPOConfig(
            output_dir=out,
            max_steps=given["steps"] + given["warmup"],
            per_device_train_batch_size=given["answers"],
            gradient_accumulation_steps=answers // given["answers"],
            num_generations=given["group"],
            max_completion_length=given["tokens"],
            generation_kwargs={"min_new_tokens": given["tokens"]},
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
            processing_class=AutoTokenizer.from_pretrained(given["model"]),
            callbacks=[clock],
        )
        trainer.train()
    steps = [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)][-given["steps"] :]
    print(json.dumps({"cpu_s": steps, "tokens": [sum(one) for one in seen][-given["steps"] :]}))


if __name__ == "__main__":
    main()
