"""`ptf serve` while 64 answers of 512 tokens are sampled: how long a health check and the first token of a new answer
take; and rankings and scores by themselves. The server, the 64 clients and what is measured are processes of their own
on the loopback interface; models are tiny and random. Writes results/serving.md.

    python benchmarks/serving.py [--seconds 20] [--answers 64] [--tokens 512]

Exits 1 if the median of a health check or of a first token is above 0.1 s under this load.
"""

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commands import ROOT, options
from flow_runs import results_page
from pages import head, table, write_page

AIM_S = 0.1
STARTS_WITHIN_S, ANSWER_WITHIN_S = 120.0, 120.0
MESSAGES = [{"role": "user", "content": "Tell me a long story."}]


def chatting(directory: Path) -> Path:
    """Write a tiny model that never ends an answer by itself: every token has a large first hidden value, by which the
    logits of the stop tokens are lowered."""
    from safetensors.torch import load_file, save_file

    from tests.data.templates import templated
    from tests.tiny import checkpoint

    tokenizer = templated("plain")
    checkpoint(directory, tied=False, vocab_size=tokenizer.vocab_size, max_position_embeddings=2048)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0] = 10.0
    for stop in tokenizer.stop_ids:
        tensors["lm_head.weight"][stop, 0] = -100.0
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(directory)
    return directory


def ranking(directory: Path) -> tuple[Path, str, list[str]]:
    """Write a catalogue of 1,000 items and a model of it; return the model, the catalogue and histories as texts."""
    from ptf.config.sections.model import ModelConfig, TokensConfig
    from ptf.events.prepare import generated
    from ptf.train.model_source import StartingModel

    made = directory / "made"
    generated(str(made), users=200, items=1000, kinds=10)
    tokens = TokensConfig(file=str(made / "tokens.jsonl"), init=str(made / "tokens.safetensors"))
    model = ModelConfig(path=str(made / "model"), init="random", tokens=tokens)
    start = StartingModel(model, made / "model", tokenizer_path=str(made / "model"), run=directory)
    place = start.extended(tokens).directory
    rows = [json.loads(line) for line in (made / "held_out.jsonl").read_text().splitlines()]
    return place, str(made / "catalogue.json"), [row["messages"][0]["content"] for row in rows]


def scoring(directory: Path) -> Path:
    """Write a tiny reward model with random weights."""
    import torch
    from safetensors.torch import load_file, save_file

    chatting(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "score"}}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["score.weight"] = torch.ones(1, config["hidden_size"])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[int]:
    """Run `ptf serve` and yield its port."""
    command = [sys.executable, "-u", "-m", "ptf.cli", "serve", *arguments, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        assert line.startswith("serving "), line
        yield int(line.rpartition(":")[2].partition("/")[0])
    finally:
        server.terminate()
        server.wait(60)


def request(method: str, path: str, body: Any = None) -> bytes:
    text = json.dumps(body).encode() if body is not None else b""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


async def asked(port: int, method: str, path: str, body: Any = None, until: bytes | None = None) -> float:
    """Return the seconds from connecting to the end of an answer, or until these bytes are in it."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(method, path, body))
    got = b""
    try:
        while part := await asyncio.wait_for(reader.read(1 << 16), ANSWER_WITHIN_S):
            got += part
            if until is not None and until in got:
                break
        took = time.perf_counter() - began
    finally:
        writer.close()
    assert got.startswith(b"HTTP/1.1 200"), got[:200]
    assert until is None or until in got, got[-200:]
    return took


async def load(port: int, answers: int, tokens: int) -> None:
    """Keep so many answers running; print a line when all of them have begun, and a line for each that ends."""
    begun = 0

    async def client(number: int) -> None:
        nonlocal begun
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = {"messages": MESSAGES, "max_tokens": tokens, "stream": True, "seed": number}
            writer.write(request("POST", "/v1/chat/completions", body))
            if await reader.read(1 << 10):
                begun += 1
            if begun == answers:
                print("begun", flush=True)
            pieces = 0
            while part := await reader.read(1 << 16):
                pieces += part.count(b"data: ")
            writer.close()
            print("ended", pieces, flush=True)

    await asyncio.gather(*map(client, range(answers)))


def quantiles(seconds: list[float]) -> tuple[float, float, float]:
    """Return the median, the 99th percentile and the largest."""
    ordered = sorted(seconds)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], ordered[-1]


async def probed(port: int, seconds: float) -> dict[str, list[float]]:
    """Return how long health checks and first tokens take, one after the other on new connections."""
    times: dict[str, list[float]] = {"health": [], "first token": []}
    first = {"messages": MESSAGES, "max_tokens": 1, "stream": True}
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        times["health"].append(await asked(port, "GET", "/health"))
        times["first token"].append(
            await asked(port, "POST", "/v1/chat/completions", first, until=b'"delta": {"content')
        )
        await asyncio.sleep(0.02)
    return times


def under_load(port: int, answers: int, tokens: int, seconds: float) -> tuple[dict[str, list[float]], int]:
    """Return the times while answers run, and how many of those ended."""
    command = [sys.executable, __file__, "--load", str(port), "--answers", str(answers), "--tokens", str(tokens)]
    clients = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert clients.stdout is not None
    try:
        while (line := clients.stdout.readline()) != "begun\n":
            assert line, "the clients have failed"
        times = asyncio.run(probed(port, seconds))
    finally:
        clients.kill()
        lines = clients.communicate()[0].splitlines()
    return times, sum(line.startswith("ended") for line in lines)


async def repeated(port: int, path: str, bodies: list[Any], at_once: int) -> list[float]:
    """Return how long requests take, so many of them at a time."""
    times, waiting = list[float](), iter(bodies)

    async def client() -> None:
        for body in waiting:
            times.append(await asked(port, "POST", path, body))

    await asyncio.gather(*(client() for _ in range(at_once)))
    return times


def measured(place: Path, answers: int, tokens: int, seconds: float) -> tuple[list[tuple[str, list[float]]], int]:
    """Return the times of each kind of request, and how many answers ended while they were measured."""
    rows = list[tuple[str, list[float]]]()
    with served(str(chatting(place / "chat"))) as port:
        asyncio.run(repeated(port, "/v1/chat/completions", [{"messages": MESSAGES, "max_tokens": 8}] * 4, 1))
        rows += [(f"{name}, nothing else running", t) for name, t in asyncio.run(probed(port, 3)).items()]
        times, ended = under_load(port, answers, tokens, seconds)
        rows += [(f"{name}, {answers} answers running", t) for name, t in times.items()]
    model, catalogue, histories = ranking(place)
    with served(str(model), "--catalogue", catalogue) as port:
        bodies = [{"histories": [histories[i % len(histories)]], "k": 10} for i in range(300)]
        for at_once in (1, 16):
            rows.append(
                (f"rank 1,000 items, {at_once} at a time", asyncio.run(repeated(port, "/v1/rank", bodies, at_once)))
            )
    with served(str(scoring(place / "scores"))) as port:
        bodies = [{"prompt": MESSAGES, "response": "word " * (i % 50 + 1)} for i in range(300)]
        for at_once in (1, 16):
            rows.append((f"score, {at_once} at a time", asyncio.run(repeated(port, "/v1/score", bodies, at_once))))
    return rows, ended


def main() -> int:
    args = options(
        __doc__, seconds=20.0, answers=64, tokens=512, load=(None, "be the clients of the server at this port")
    )
    if args.load:
        asyncio.run(load(args.load, args.answers, args.tokens))
    with tempfile.TemporaryDirectory() as directory:
        busy = os.getloadavg()[0]
        rows, ended = measured(Path(directory), args.answers, args.tokens, args.seconds)
    cells = [[name, len(seconds), *(f"{one:.3f}" for one in quantiles(seconds))] for name, seconds in rows]
    lines = table("request | number | median, s | 99th percentile, s | longest, s", cells)
    print(lines)
    about = head("`ptf serve` under load", f"; load average before: {busy:.1f}") + (
        f"{args.answers} clients stream answers of {args.tokens} tokens from the native engine without a pause; "
        "meanwhile, one client asks for\n`/health` and for the first token of a new answer, each on a new connection. "
        f"{ended} answers ended in that time.\nAim: a median of at most {AIM_S} s. Rankings and scores are asked one "
        "at a time and 16 at a time, of\nservers that do nothing else. Models have 2 layers.\n\n"
    )
    missed = [name for name, seconds in rows if "running" in name and statistics.median(seconds) > AIM_S]
    return write_page(results_page("serving.md"), about, [lines], missed)


if __name__ == "__main__":
    sys.exit(main())
