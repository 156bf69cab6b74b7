"""Training ids against serving ids: texts and chats through ptf's tokenizer and through vLLM's own entry points.
They must not differ in one id.

    python benchmarks/serving_ids.py [--texts 100000] [--chats 5100]

Texts are fuzzed: words, numbers, code, whitespace, many scripts, emoji, control characters and text that looks like
special tokens, under four real tokenizers. Chats are the real conversations of PTF_DATA and fuzzed ones, up to the turn
that the model would speak, with tools, under two of those tokenizers and their templates. Prints a JSON line for each
and writes results/serving_ids.md; exits 1 on a difference.
"""

import json
import os
import random
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from commands import options
from flow_runs import results_page
from pages import head, table, write_page
from published_shapes import qwen3

from tests.conftest import SHARED
from tests.data.texts import fuzzed

TOKENIZERS = ("qwen3", "gpt2", "phi3-mini", "minimind")
CHATTING = ("qwen3", "minimind", "phi3-mini")
CONFIG = qwen3(64, 1, 2, 64) | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 152_000}
THEIRS = {"reasoning_content": "reasoning"}  # of a message sent to vLLM, which hands templates both names


def renderer_of(directory: Path) -> Any:
    """What vLLM's server and its LLM class turn prompts and chats into ids with."""
    from vllm import EngineArgs
    from vllm.renderers.registry import renderer_from_config

    return renderer_from_config(
        EngineArgs(model=str(directory), max_model_len=32_768, load_format="dummy").create_engine_config()
    )


def ids_of(inputs: Any) -> list[int]:
    return list(inputs["prompt_token_ids"])


def texts(tokenizer: Any, renderer: Any, count: int, seed: str) -> dict[str, Any]:
    rng, differ = random.Random(seed), []
    for _ in range(count):
        text = fuzzed(rng)
        ours, theirs = tokenizer.begin(text), ids_of(renderer.render_cmpl([{"prompt": text}])[0])
        if ours != theirs:
            differ.append(text)
    return {"compared": count, "differ": len(differ), "first": differ[:3]}


def chats(tokenizer: Any, renderer: Any, count: int, shared: Path, seed: str) -> dict[str, Any]:
    from vllm.renderers import ChatParams

    from ptf.data.chat import clean
    from ptf.errors import UserError
    from tests.data.conversations import fuzzed as made
    from tests.data.conversations import real
    from tests.data.templates import markers

    rng, differ, refused, compared = random.Random(seed), [], 0, 0
    half = [c for c in real(shared)]
    rng.shuffle(half)
    for conversation in [
        *islice(half, count // 2),
        *(made(rng, markers(tokenizer.hf.chat_template)) for _ in range(count - count // 2)),
    ]:
        messages = clean(conversation.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            continue
        try:
            ours = tokenizer.render(messages, True, conversation.tools)
        except UserError:
            refused += 1
            continue
        asked = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tools": conversation.tools})
        compared += 1
        served = [{THEIRS.get(key, key): value for key, value in message.items()} for message in messages]
        if ours != ids_of(renderer.render_chat([served], asked)[1][0]):
            differ.append(json.dumps(messages)[:200])
    return {"compared": compared, "refused": refused, "differ": len(differ), "first": differ[:3]}


ABOUT = """\
Ids that ptf trains on, and those that vLLM {version} makes of the same text or chat at its own entry points (the
renderer behind its server and its `LLM` class). *Refused*: conversations that the chat template itself refuses. vLLM
takes a turn's reasoning as `reasoning` and hands it to templates as `reasoning_content` too; under the latter name
alone it drops it, so it is sent under the former.

"""


def main() -> int:
    asked = options(__doc__, texts=100_000, chats=5_100)
    from ptf.data.tokenizer import Tokenizer
    from ptf.rl.engines.vllm_engine import engine_env

    rows, differ = [], []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(engine_env(Path(scratch) / "vllm"))
        for name in TOKENIZERS:
            directory = Path(scratch) / name
            tokenizer = Tokenizer.load(str(SHARED / "tokenizers" / name))
            tokenizer.save(directory)
            (directory / "config.json").write_text(json.dumps(CONFIG))
            renderer = renderer_of(directory)
            found = {"texts": texts(tokenizer, renderer, asked.texts // len(TOKENIZERS), name)}
            if name in CHATTING:
                found["chats"] = chats(tokenizer, renderer, asked.chats // len(CHATTING), SHARED, name)
            for what, one in found.items():
                print(json.dumps({"tokenizer": name, "what": what, **one}), flush=True)
                differ += [name] * bool(one["differ"])
                rows.append([name, what, f"{one['compared']:,}", f"{one.get('refused', 0):,}", one["differ"]])
    import vllm

    about = head("Training ids and serving ids") + ABOUT.format(version=vllm.__version__)
    lines = table("tokenizer | what | compared | refused | differ", rows)
    return write_page(results_page("serving_ids.md"), about, [lines], differ)


if __name__ == "__main__":
    sys.exit(main())
