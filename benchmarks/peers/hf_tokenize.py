"""Tokenizing chats as SFT trainers do it, `load_dataset` of a file and `Dataset.map` over `apply_chat_template`:
`python hf_tokenize.py ROWS.jsonl TOKENIZER PROCESSES SCRATCH` prints one JSON line, in which `map_cpu_s` leaves out
reading."""

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
    tokenizer = AutoTokenizer.from_pretrained(directory)
    began, cpu = time.perf_counter(), sum(os.times()[:4])
    rows = load_dataset("json", data_files=path, split="train", cache_dir=scratch)
    read = sum(os.times()[:4])
    done = rows.map(
        encode,
        fn_kwargs={"tokenizer": tokenizer},
        remove_columns=rows.column_names,
        num_proc=processes if processes > 1 else None,
    )
    spent, end = time.perf_counter() - began, sum(os.times()[:4])
    found = {"cpu_s": end - cpu, "map_cpu_s": end - read, "wall_s": spent}
    print(json.dumps({"rows": len(done), "tokens": sum(map(len, done["input_ids"])), **found}))


if __name__ == "__main__":
    main()
