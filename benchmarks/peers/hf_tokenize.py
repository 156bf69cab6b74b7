"""Tokenizing chats as SFT trainers do it, `Dataset.map` over `apply_chat_template`: `python hf_tokenize.py ROWS.jsonl
TOKENIZER PROCESSES SCRATCH` prints one JSON line."""

import json
import os
import sys
import time
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a process
from datasets import load_dataset
from transformers import AutoTokenizer


def encode(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    return {"input_ids": tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"]}


def main() -> None:
    path, directory, processes, scratch = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    rows = load_dataset("json", data_files=path, split="train", cache_dir=scratch)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    began, cpu = time.perf_counter(), sum(os.times()[:4])
    done = rows.map(
        encode,
        fn_kwargs={"tokenizer": tokenizer},
        remove_columns=rows.column_names,
        num_proc=processes if processes > 1 else None,
    )
    spent, cpu = time.perf_counter() - began, sum(os.times()[:4]) - cpu
    print(json.dumps({"rows": len(done), "tokens": sum(map(len, done["input_ids"])), "cpu_s": cpu, "wall_s": spent}))


if __name__ == "__main__":
    main()
