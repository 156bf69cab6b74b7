"""Calls of a reward and of an environment in one process: how long 32 of 0.25 s take together, and what one that hangs
costs the others. The judge is asked over HTTP: a server of its own process on the loopback interface, which waits for
0.25 s before each reply. Writes results/concurrency.md.

    python benchmarks/concurrency.py [--rounds 5] [--load 2]

`--load`: processes that compute beside it. Exits 1 if 32 calls take more than 0.6 s, or if one that hangs delays the
others by more than 0.1 s (medians).
"""

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.commands import options  # noqa: E402
from benchmarks.flow_runs import results_page  # noqa: E402
from benchmarks.pages import head, table, write_page  # noqa: E402
from ptf.config import Plugin  # noqa: E402
from ptf.rl.environments.protocol import EnvironmentFault, Environments, StepResult  # noqa: E402
from ptf.rl.rewards.calls import Response  # noqa: E402
from ptf.rl.rewards.scoring import RewardWorkers  # noqa: E402
from ptf.rl.worker_process import QueuedCall  # noqa: E402

CALLS, CALL_S, LIMIT_S = 32, 0.25, 3.0
AIM_S, DELAY_S = 0.6, 0.1
ENDLESS = {"hang": "waits without end", "spin": "computes without end"}


def plain(row: dict, text: str) -> float:
    """Take 0.25 s; `hang` sleeps, `spin` computes, until the process is ended."""
    while text == "spin":
        pass
    time.sleep(600 if text == "hang" else CALL_S)
    return 1.0


async def coroutine(row: dict, text: str) -> float:
    await asyncio.sleep(600 if text == "hang" else CALL_S)
    return 1.0


class Plain:
    """An environment of one step that takes 0.25 s."""

    def __init__(self, row: dict, seed: int) -> None:
        self.row = row

    def reset(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": "1"}]

    def step(self, text: str) -> StepResult:
        plain(self.row, text)
        return StepResult(reward=1.0, done=True)


class Coroutine(Plain):
    """The same with coroutine functions."""

    async def reset(self) -> list[dict[str, str]]:  # type: ignore[override]
        return super().reset()

    async def step(self, text: str) -> StepResult:  # type: ignore[override]
        await coroutine(self.row, text)
        return StepResult(reward=1.0, done=True)


Runner = tuple[Callable[[list[str]], list[float]], Callable[[], None]]


def of_rewards(name: str) -> Runner:
    """Return a function that makes calls and returns the seconds after which each ended, and one that closes."""
    return of_plugin(Plugin(use=f"benchmarks.concurrency:{name}"))


def of_plugin(plugin: Plugin) -> Runner:
    """Return the same for any reward."""
    workers = RewardWorkers(plugin, LIMIT_S, retries=0)

    def run(texts: list[str]) -> list[float]:
        began, ends = time.monotonic(), [0.0] * len(texts)
        calls = [QueuedCall((Response({"prompt": "?"}, text),)) for text in texts]
        for i, call in enumerate(calls):
            call.future.add_done_callback(lambda _, i=i: ends.__setitem__(i, time.monotonic() - began))
            workers.calls.put(call)
        replies = [call.future.result() for call in calls]
        assert [reply == [1.0] for reply in replies] == [text not in ENDLESS for text in texts], replies
        return ends

    return run, workers.close


def of_judge(name: str) -> Runner:
    """Return the same for a judge at a server, which is started and ended with it."""
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    args = {"url": f"http://127.0.0.1:{server.stdout.readline().strip()}/v1", "model": name, "prompt": "{response}"}
    run, close = of_plugin(Plugin(use="ptf.rl.rewards:judge", args=args))

    def end() -> None:
        close()
        server.kill()
        server.wait()

    return run, end


async def serve() -> None:
    """Answer chat completions with a score of 10 after 0.25 s, or never if the answer is `hang`; print the port."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                body = json.loads(await reader.readexactly(int(head.split("content-length:")[1].split()[0])))
                await asyncio.sleep(600 if "\nhang\n" in body["messages"][0]["content"] else CALL_S)
                # the form that it was told to write: the score, and what no response can write
                form = body["messages"][0]["content"].rpartition("\\boxed{SCORE, ")[2].partition("}")[0]
                message = {"role": "assistant", "content": f"\\boxed{{10, {form}}}"}
                reply = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(reply), reply))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def of_environments(name: str) -> Runner:
    """Return the same for steps of environments, whose resets are not counted."""
    environments = Environments(Plugin(use=f"benchmarks.concurrency:{name}"), timeout_s=LIMIT_S, retries=0)

    async def run(texts: list[str]) -> list[float]:
        states = [state for state, _, _ in await asyncio.gather(*(environments.reset({}, 0) for _ in texts))]
        began = time.monotonic()

        async def one(state: Any, text: str) -> float:
            with contextlib.suppress(EnvironmentFault):
                await environments.step(state, text)
            took = time.monotonic() - began
            await environments.end(state)
            return took

        return await asyncio.gather(*map(one, states, texts))

    return lambda texts: asyncio.run(run(texts)), environments.close


KINDS = {
    "reward, plain": (of_rewards, "plain"),
    "reward, `async def`": (of_rewards, "coroutine"),
    "reward, `judge` over HTTP": (of_judge, "judge"),
    "environment, plain": (of_environments, "Plain"),
    "environment, `async def`": (of_environments, "Coroutine"),
}


def measured(rounds: int) -> list[tuple[str, float, float, str, float]]:
    """Return, of each kind: the seconds of 32 calls, the most of a round, and the delay by one that hangs."""
    rows = []
    for name, (make, what) in KINDS.items():
        faults = ["hang", "spin"] if "plain" in name else ["hang"]
        times: dict[str, list[float]] = {key: [] for key in ("alone", *faults)}
        for _ in range(rounds):
            for fault in times:
                run, close = make(what)
                try:
                    run([""])  # starts the process
                    texts = [*([] if fault == "alone" else [fault]), *[""] * (CALLS - (fault != "alone"))]
                    ends = run(texts)
                    times[fault].append(max(ends if fault == "alone" else ends[1:]))
                finally:
                    close()
        alone = statistics.median(times["alone"])
        for fault in faults:
            delay = statistics.median(times[fault]) - alone
            rows.append((name, alone, max(times["alone"]), fault, delay))
            print(f"{name}: {alone:.3f} s (at most {max(times['alone']):.3f}); {fault}: {delay:+.3f} s", flush=True)
    return rows


def main() -> int:
    args = options(__doc__, rounds=5, load=0, serve=(False, "be the server of the judge"))
    if args.serve:
        asyncio.run(serve())
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.load)]
    try:
        rows = measured(args.rounds)
    finally:
        for process in load:
            process.kill()
            process.wait()
    cells = [
        [name, f"{alone:.3f}", f"{most:.3f}", ENDLESS[fault], f"{by:+.3f}"] for name, alone, most, fault, by in rows
    ]
    lines = table("calls | median of 32, s | longest round, s | one that | delays the others by, s", cells)
    hardware = f", {args.load} other processes that compute"
    about = head("Calls of rewards and environments in one process", hardware) + (
        f"{CALLS} calls that wait for {CALL_S} s, in one process (`rollout.reward_processes: 1`). Aims: at most "
        f"{AIM_S} s together; one\nthat never returns delays no other by more than {DELAY_S} s.\n\n"
    )
    missed = [f"{name}, {fault}" for name, alone, _, fault, delay in rows if alone > AIM_S or delay > DELAY_S]
    return write_page(results_page("concurrency.md"), about, [lines], missed)


if __name__ == "__main__":
    sys.exit(main())
