"""Work of ptf in training, of a size that is chosen: vocabulary, episodes, bytes of a checkpoint, rows of metrics.

Each function prepares its work in a directory and returns what does it, which may be called again and again.
"""

import asyncio
import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn

from benchmarks.growth_data import Run, tokenizer
from benchmarks.in_flight import Costs, Engine
from benchmarks.in_flight import Work as Responses
from ptf.compute import checkpoint
from ptf.compute.checkpoint import Checkpoints, load_tensors
from ptf.compute.saver import Saver
from ptf.compute.tracking import StepLines, Tracker, read_metrics
from ptf.compute.world import Meshes, World
from ptf.config import loads
from ptf.config.sections.checkpoint import CheckpointConfig
from ptf.config.sections.compute import MeshSizes
from ptf.config.sections.model import ModelConfig
from ptf.config.sections.rollout import RolloutConfig
from ptf.config.sections.track import TrackConfig
from ptf.config.sections.train import TrainConfig
from ptf.data.batch import Batch
from ptf.data.document import Document
from ptf.data.prefixes import pack_shared
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Generation, Group, Prompt, Reward, Trajectory
from ptf.model.chunked import token_logprobs
from ptf.model.head import Head
from ptf.model.sampling import LogitsProcessing
from ptf.recipes.grpo.recipe import GRPO
from ptf.recipes.sft.recipe import SFT
from ptf.rl.controller import Controller
from ptf.rl.engines.protocol import Request, Sampling
from ptf.rl.flight_ledger import FlightLedger
from ptf.rl.in_flight import InFlight
from ptf.rl.in_flight_group import restored_trajectory, trajectory_state
from ptf.rl.response_log import ResponseLog
from ptf.rl.rewards.scoring import Rewards, score_groups
from ptf.rl.rollouts import outcome_metrics
from ptf.run import write_job_file
from ptf.train.batch_sharding import deal
from ptf.train.trainer import Trainer, load_model
from ptf.training_run import Run as TrainingRun
from tests.recipes.of_keys import of_keys
from tests.tiny import SIZES, arithmetic, online

GROUP, TOKENS = 8, 64  # responses of a prompt, tokens of each


def trainer_of(directory: Path, vocabulary: int) -> Trainer:
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True, **SIZES}
    config |= {
        "vocab_size": vocabulary,
        "num_hidden_layers": 1,
        "max_position_embeddings": 1 << 16,
        "hidden_act": "silu",
    }
    (directory / "config.json").write_text(json.dumps(config))
    spec = ModelConfig(path=str(directory), init="random")
    model = load_model(directory, World(), spec, seed=0, precision="fp32")
    return Trainer(model, World(), TrainConfig(steps=1000, lr=1e-4))


def batch_of(lengths: list[int], vocabulary: int) -> Batch:
    rng = np.random.default_rng(0)
    units = [(Document(rng.integers(0, vocabulary, n).astype(np.int32), np.ones(n, np.float32), "a"),) for n in lengths]
    return Batch.of([units], sum(lengths))


def step_of_one_document(directory: Path, tokens: int) -> Run:
    """An optimizer step on one document, whose every token attends to those before it."""
    trainer, batch = trainer_of(directory, 97), batch_of([tokens], 97)
    return lambda: trainer.step([batch], of_keys(SFT), 0)


def step_of_documents(directory: Path, documents: int) -> Run:
    """An optimizer step on documents of 128 tokens."""
    trainer, batch = trainer_of(directory, 97), batch_of([128] * documents, 97)
    return lambda: trainer.step([batch], of_keys(SFT), 0)


def step_of_vocabulary(directory: Path, vocabulary: int) -> Run:
    """An optimizer step on 256 tokens: embedding, head, loss, clipping and AdamW."""
    trainer, batch = trainer_of(directory, vocabulary), batch_of([64] * 4, vocabulary)
    return lambda: trainer.step([batch], of_keys(SFT), 0)


def nucleus_of_vocabulary(directory: Path, vocabulary: int) -> Run:
    """Log-probs of 32 sampled tokens and their gradients, with `rollout.top_p: 0.9`, for which log-probs are sorted."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, 32, generator=rng).requires_grad_()
    x, targets = torch.randn(1, 32, 32, generator=rng), torch.randint(vocabulary, (1, 32), generator=rng)
    processing = LogitsProcessing(top_p=0.9)

    def run() -> None:
        found = token_logprobs(x, Head(weight, vocabulary), targets, torch.ones(1, 32), processing)
        found.logprobs.sum().backward()
        weight.grad = None

    return run


def loading_of_vocabulary(directory: Path, vocabulary: int) -> Run:
    """Loading a tokenizer with so many tokens, and what ptf derives from it."""
    source = tokenizer()
    source.save(directory)
    stored = json.loads((directory / "tokenizer.json").read_text())
    names = stored["model"]["vocab"]
    names |= {f"w{i}": i for i in range(len(names), vocabulary)}
    (directory / "tokenizer.json").write_text(json.dumps(stored))

    def run() -> None:
        loaded = Tokenizer.load(str(directory))
        _ = loaded.stop_ids, loaded.cuts, loaded.fingerprint(), loaded.longest_token

    return run


def groups_of(episodes: int) -> list[Group]:
    """Return scored episodes of one response."""
    rng, groups = np.random.default_rng(0), list[Group]()
    for index in range(episodes // GROUP):
        prompt = Prompt(rng.integers(8, 4096, 24).astype(np.int32), {}, "a", index)
        group = list[Trajectory]()
        for _ in range(GROUP):
            n = int(rng.integers(8, 2 * TOKENS))
            one = Generation(
                prompt.tokens,
                rng.integers(8, 4096, n).astype(np.int32),
                -rng.random(n, np.float32),
                np.zeros(n, np.int32),
                True,
            )
            group.append(Trajectory(prompt, (one,), "", Reward(float(rng.integers(2)))))
        groups.append(tuple(group))
    return groups


def controller_of(directory: Path) -> Controller:
    """Return a controller without its roles, whose log-probs are zeros."""
    found: Any = object.__new__(Controller)
    job = loads(yaml.safe_dump(online(arithmetic(directory), directory, prompts_per_step=8)))
    found.job, found.recipe, found.step = job, of_keys(GRPO, num_minibatches=2), 0
    found.samples = ResponseLog(directory, TrackConfig(), tokenizer(), 0)
    return found


def step_of_controller(directory: Path, episodes: int) -> Run:
    """A step of GRPO without its models: scores, metrics, columns of log-probs, advantages, log, minibatches."""
    groups, controller, rollout = groups_of(episodes), controller_of(directory), RolloutConfig()
    role: Any = SimpleNamespace(call=lambda _, samples: [np.zeros(len(sample), np.float32) for sample in samples])

    def run() -> None:
        scored = score_groups(Rewards(), groups)
        outcome_metrics(scored, 0, rollout)
        columned, _ = controller.add_token_column(scored, role, "old_logprobs")
        units = controller.recipe.compute_advantages(columned)
        controller.samples.log(1, columned, units)
        controller.minibatches(units)

    return run


def packing_of_episodes(directory: Path, episodes: int) -> Run:
    """What the policy does with a step's episodes before its model: packing by shared prompts, dealing, laying out."""
    units, world = of_keys(GRPO).compute_advantages(groups_of(episodes)), World(0, Meshes(MeshSizes(shard=2)))
    return lambda: deal(pack_shared(units, 512), world, 8, 512)


def state_of_episodes(directory: Path, episodes: int) -> Run:
    """Episodes in flight in a checkpoint: written, read, restored."""
    groups, file = groups_of(episodes), str(directory / "state.pt")

    def run() -> None:
        checkpoint.save_host(file, {"episodes": [trajectory_state(t) for group in groups for t in group]})
        for state in checkpoint.load_host(file)["episodes"]:
            restored_trajectory(state, groups[0][0].prompt)

    return run


Play = Callable[[Prompt, int, int, Callable[[Request], Any]], Any]


def flight_of(episodes: int, play: Play, responses: Responses) -> None:
    """Take the groups of three steps, as asynchronous rollouts do, from an engine that does nothing."""
    prompts, step = (Prompt(np.zeros(0, np.int32), {}, "a", i) for i in range(10**9)), episodes // GROUP
    config = RolloutConfig(
        prompts_per_step=step, group_size=GROUP, max_staleness=1, slice_tokens=256, in_flight=2 * step
    )
    flight = InFlight(config, 1, prompts.__next__, Engine(Costs(0, 0, 0), responses), play, 600.0, FlightLedger(None))
    for number in range(3):
        flight.take_groups(number)
        flight.beside_update(number, lambda: False)
    flight.close()


def flight_of_responses(directory: Path, episodes: int) -> Run:
    """The scheduler of asynchronous rollouts, with episodes of one response."""
    responses = Responses(episodes // GROUP, GROUP, mean=256, most=1024)

    async def play(prompt: Prompt, _: int, i: int, ask: Callable[[Request], Any]) -> Trajectory:
        request = Request(np.zeros(0, np.int32), Sampling(responses.most, 1.0, ()), prompt.index * GROUP + i)
        return Trajectory(prompt, (await ask(request),), "", Reward(0.0))

    return lambda: flight_of(episodes, play, responses)


def flight_of_environments(directory: Path, episodes: int) -> Run:
    """The same, with episodes of four turns whose environments answer at different times."""
    responses = Responses(episodes // GROUP, GROUP, mean=64, most=512)

    async def play(prompt: Prompt, _: int, i: int, ask: Callable[[Request], Any]) -> Trajectory:
        turns, seed = [], prompt.index * GROUP + i
        for turn in range(4):
            request = Request(np.zeros(turn, np.int32), Sampling(responses.most, 1.0, ()), seed)
            turns.append(await ask(request))
            await asyncio.sleep((seed * 37 % 101) * 1e-3)
        return Trajectory(prompt, tuple(turns), "", Reward(0.0))

    return lambda: flight_of(episodes, play, responses)


def checkpoint_of(directory: Path, model: nn.Module) -> Run:
    """Write a checkpoint with AdamW's state, verify it, and load it."""
    optimizer, world = torch.optim.AdamW(model.parameters(), fused=True), World()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    saves = Checkpoints(str(directory / "checkpoints"), CheckpointConfig(every=1, keep=1), steps=10)
    saver = Saver(saves, world, 600.0)

    def run() -> None:
        saver.save(1, model, optimizer, {"lanes": {}}, {})
        saver.wait()
        newest = saves.latest()
        assert newest is not None
        load_tensors(newest[1], model, optimizer, world)

    return run


def checkpoint_of_bytes(directory: Path, mib: int) -> Run:
    """So many MiB of weights, in four tensors."""
    return checkpoint_of(directory, nn.Sequential(*(nn.Linear(256, mib * 256, bias=False) for _ in range(4))))


def checkpoint_of_tensors(directory: Path, tensors: int) -> Run:
    """So many small tensors."""
    return checkpoint_of(directory, nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(tensors))))


def metrics_of(step: int) -> dict[str, float]:
    """Return the 20 metrics of a step."""
    return {f"metric_{i}": 1 / (step + i + 1) for i in range(20)}


def writing_metrics(directory: Path, rows: int) -> Run:
    """Writing the rows of a run, each of which is durable."""
    config = TrackConfig(tensorboard=False, print_every=10**9)

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            track = Tracker(directory, config, resumed=0, steps=10**6)
            for step in range(1, rows + 1):
                track.log(step, metrics_of(step))
            track.close()

    return run


def write_metrics(directory: Path, rows: int) -> Path:
    """Write the rows at once."""
    file = directory / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step, **metrics_of(step)}) + "\n" for step in range(1, rows + 1)))
    return file


def continuing_metrics(directory: Path, rows: int) -> Run:
    """Opening the file of a run that is continued, which drops rows that will be repeated, and reading it."""
    file = write_metrics(directory, rows)

    def run() -> None:
        StepLines(file, rows).close()
        read_metrics(file)

    return run


def reading_a_run(directory: Path, rows: int) -> Run:
    """A run as the commands read it (`ptf evaluate`, `publish`, …): its job, last metrics and checkpoints."""
    job = loads(yaml.safe_dump(arithmetic(directory)))
    run = directory / "runs" / "a"
    run.mkdir(parents=True)
    write_job_file(job, run)
    write_metrics(run, rows)
    return lambda: TrainingRun.at(run)
