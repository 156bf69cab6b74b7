"""Tokenizers with real chat templates, where PTF_DATA has them."""

import functools
import re
from pathlib import Path

from transformers import AutoTokenizer

from ptf.data.tokenizer import Tokenizer

ONE_SAMPLE = ("granite-3.3", "minimind", "mistral-nemo", "phi-3.5", "qwen2.5", "qwen3-coder", "qwen3-instruct-2507", "smollm3")
SPLIT = ("gpt-oss", "qwen3", "qwen3.5-think")  # they rewrite earlier turns
UNSERVED = ("deepseek-r1-distill-qwen", "qwq-32b")  # their generation prompt is not in the rendered turn
OWN = ("own/minimind", "own/phi3-mini")  # a tokenizer directory as it is, with the template that it brings
SPECIAL = re.compile(r"<\|[a-z_]+\|>|<｜[^｜'\"]+｜>|\[/?[A-Z_]{4,}\]|</?s>")


@functools.cache
def templated(shared: Path, name: str) -> Tokenizer:
    """The Qwen3 tokenizer with another model's template and that template's special tokens; or one of OWN."""
    if name in OWN:
        return Tokenizer.load(str(shared / "tokenizers" / name.removeprefix("own/")))
    hf = AutoTokenizer.from_pretrained(shared / "tokenizers/qwen3")
    hf.chat_template = (shared / f"templates/{name}.jinja").read_text()
    hf.add_tokens(markers(hf.chat_template), special_tokens=True)
    if name == "mistral-nemo":
        hf.bos_token, hf.eos_token = "<s>", "</s>"
    elif name == "deepseek-r1-distill-qwen":
        hf.bos_token, hf.eos_token = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    return Tokenizer(hf)


def markers(template: str) -> list[str]:
    """The special tokens that a template writes."""
    return sorted(set(SPECIAL.findall(template)) | {"<s>", "</s>"})
