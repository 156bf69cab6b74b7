"""Training ids against serving ids: texts and chats through ptf's tokenizer and through vLLM's own entry points.
They must not differ in one id.

    python benchmarks/serving_ids.py [--texts 100000] [--chats 5100]

Texts are fuzzed: words, numbers, code, whitespace, many scripts, emoji, control characters and text that looks like
special tokens, under four real tokenizers. Chats are the real conversations of PTF_DATA and fuzzed ones, up to the turn
that the model would speak, with tools, under two of those tokenizers and their templates. Prints a JSON line for each
and writes results/serving_ids.md; exits 1 on a difference.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from flow_runs import ROOT, cpu

from tests.data.texts import fuzzed

RESULTS = ROOT / "benchmarks" / "results" / "serving_ids.md"
TOKENIZERS = ("qwen3", "gpt2", "phi3-mini", "minimind")
CHATTING = ("qwen3", "minimind", "phi3-mini")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32_768,
    "vocab_size": 152_000,
    "torch_dtype": "float32",
}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--chats", type=int, default=5_100)
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args()
    from ptf.data.tokenizer import Tokenizer
    from ptf.rl.engines.vllm_engine import engine_env

    shared, lines, differ = Path(os.environ.get("PTF_DATA") or ROOT.parent / "shared" / "data"), [], 0
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(engine_env(Path(scratch) / "vllm"))
        for name in TOKENIZERS:
            directory = Path(scratch) / name
            tokenizer = Tokenizer.load(str(shared / "tokenizers" / name))
            tokenizer.save(directory)
            (directory / "config.json").write_text(json.dumps(CONFIG))
            renderer = renderer_of(directory)
            found = {"texts": texts(tokenizer, renderer, asked.texts // len(TOKENIZERS), name)}
            if name in CHATTING:
                found["chats"] = chats(tokenizer, renderer, asked.chats // len(CHATTING), shared, name)
            for what, one in found.items():
                print(json.dumps({"tokenizer": name, "what": what, **one}), flush=True)
                differ += one["differ"]
                lines.append(f"| {name} | {what} | {one['compared']:,} | {one.get('refused', 0):,} | {one['differ']} |")
    import vllm

    asked.output.write_text(
        "# Training ids and serving ids\n\n"
        f"Command: `{' '.join(['python', 'benchmarks/serving_ids.py', *sys.argv[1:]])}`  \nHardware: {cpu()}  \nDate: "
        f"{time.strftime('%Y-%m-%d')}\n\n"
        f"Ids that ptf trains on, and those that vLLM {vllm.__version__} makes of the same text or chat at its own "
        "entry points (the renderer behind its\n"
        "server and its `LLM` class). *Refused*: conversations that the chat template itself refuses. "
        "vLLM takes a turn's reasoning as `reasoning` and hands\n"
        "it to templates as `reasoning_content` too; under the latter name alone it drops it, "
        "so it is sent under the former.\n\n"
        "| tokenizer | what | compared | refused | differ |\n|---|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
