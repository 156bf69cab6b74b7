"""From rows to a published model: write data, train on them, evaluate, publish, and ask the model.

    python examples/first_sft.py                                  # a small model from random weights, on a CPU
    python examples/first_sft.py --model Qwen/Qwen3-0.6B          # a model of the Hugging Face Hub, on a GPU

Replace `rows()` with your own data; everything below it stays as it is. `examples/first_sft.ipynb` is the same as a
notebook, and plots the run's curves.
"""

import argparse
import json
import sys
from pathlib import Path

import ptf
from ptf.tasks.tiny import write_model

CONFIG = """\
recipe: sft
output: {output}/runs
model: {{path: {model}, init: {init}}}
data:
  sources:
    sums: {{path: {output}/train.jsonl}}
  validation:
    held_out: {{path: {output}/held_out.jsonl}}
  seq_len: 128
train:
  {{steps: 300, lr: {lr}, global_batch_sequences: 8, micro_batch_sequences: 8, precision: {precision},
   validate_every: 100}}
evaluate:
  sources:
    questions: {{path: {output}/questions.jsonl, kind: prompt}}
  reward: {{use: "ptf.tasks.arithmetic:exact"}}
  samples_per_prompt: 1
  max_new_tokens: 8
"""


def rows() -> list[dict]:
    """Return conversations to learn from: one question and its response each."""
    return [
        {"messages": [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(a + b)}]}
        for a in range(1, 40)
        for b in range(1, 40)
    ]


def write_jsonl(path: Path, found: list[dict]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in found))


def write_data(directory: Path, conversations: list[dict]) -> None:
    """Write rows to train on, every tenth row to hold out, and the held-out questions with their reference answers."""
    held_out = conversations[::10]
    write_jsonl(directory / "train.jsonl", [row for row in conversations if row not in held_out])
    write_jsonl(directory / "held_out.jsonl", held_out)
    questions = [{"messages": row["messages"][:1], "answer": row["messages"][1]["content"]} for row in held_out]
    write_jsonl(directory / "questions.jsonl", questions)


def write_job(directory: Path, conversations: list[dict], model: str | None = None) -> Path:
    """Write the data and the config of the job into a directory and return the config's path. `model` is the directory
    or the Hugging Face id of a model to start from; None writes a small one, which starts from random weights."""
    directory.mkdir(parents=True, exist_ok=True)
    write_data(directory, conversations)
    if model:
        start = {"model": model, "init": "pretrained", "lr": 1e-5, "precision": "bf16"}
    else:
        write_model(directory / "model", "0123456789+=")
        start = {"model": directory / "model", "init": "random", "lr": 1e-3, "precision": "fp32"}
    config = directory / "job.yaml"
    config.write_text(CONFIG.format(output=directory, **start))
    return config


def main() -> None:
    """Run every stage and print what the published model answers."""
    parser = argparse.ArgumentParser(description="Fine-tune a model on rows and publish it.")
    parser.add_argument("--model", help="directory or Hugging Face id (default: a small one from random weights)")
    parser.add_argument("--output", default="runs/first_sft", help="where everything is written")
    parser.add_argument("--run-name", help="continue the run of this name, if there is one")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="override one key of the job")
    options = parser.parse_args()

    job = ptf.load(write_job(Path(options.output), rows(), options.model), overrides=options.set)
    print(ptf.check(job))
    run = ptf.train(job, options.run_name)
    metrics = ptf.evaluate(run)
    version = ptf.publish(run)

    print(f"right responses to held-out questions: {metrics['greedy_pass_rate/questions']:.0%}")
    chat = ptf.chat(version, max_new_tokens=8, temperature=0.0)
    for question in ("12+30=", "7+8="):
        print(question, chat.answer(question))
        chat.forget()


if __name__ == "__main__":
    try:
        main()
    except ptf.UserError as error:
        sys.exit(str(error))
