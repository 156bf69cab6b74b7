"""Verification of a model family on two processes: FSDP and tensor parallelism against transformers' model.

Two ranks compute the loss of packed documents and its gradients, take one step, and save the model. transformers takes
the same step in one process; what the ranks saved, loaded by transformers, must compute the same logits. So a parameter
that the sharding plan treats wrongly shows as a gradient or as logits, with the tensor's name. The exact result is
transformers' in fp64, and the ranks' error is judged by transformers' own in fp32 (`verify.judged`).
"""

import copy
import faulthandler
import logging
import multiprocessing
import random
import signal
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException

from ptf.config.sections.compute import MeshSizes
from ptf.errors import UserError
from ptf.meshes import Meshes
from ptf.model import bridge, verify
from ptf.model.chunked import cross_entropy
from ptf.model.families import family_of
from ptf.model.model_files import read_config
from ptf.model.model_writer import save_hf
from ptf.model.reference import corrected, exact_reference, quiet, random_reference, reference
from ptf.model.rounding import Double
from ptf.model.sharding import PLAN, parallelize
from ptf.model.tensor_parallel import ParallelStyle, raise_if_indivisible

RANKS = 2
MESHES = {"FSDP": (RANKS, 1), "tensor parallel": (1, RANKS)}  # shard, tensor
BALANCE = 0.1  # weight of the load-balancing loss
STEP = 0.02  # the largest change of a weight
# signals of a process that did something wrong: not those that others send it, also where memory is short
CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}


@dataclass(frozen=True, slots=True)
class _Expected:
    """What transformers computes in one process: the loss, its gradients by name, and the size of the step."""

    loss: float
    gradients: dict[str, Tensor]
    rate: float
    balance: float  # weight of the load-balancing loss; 0 where transformers has none


def verify_parallel(
    model_type: str, configs: int = 1, seed: int = 0, plan: Mapping[str, ParallelStyle] = PLAN
) -> list[verify.Case]:
    """Compare `configs` random members of a family, which two ranks divide, on each mesh.

    `plan` replaces the sharding plan (to test that a mistake is caught).
    """
    quiet()
    with tempfile.TemporaryDirectory() as base:
        members = []
        for number in range(configs):
            config = divisible(model_type, f"{seed}/{number}")
            member = Path(base) / str(number)
            model = random_reference(config, seed * 1000 + number)
            model.save_pretrained(member)
            for name, mesh in MESHES.items():
                after = copy.deepcopy(model)
                stepped = _step(after, _groups(mesh))
                members.append((member, name, stepped, corrected(after)))
        jobs = [(str(member), name, stepped.rate, stepped.balance) for member, name, stepped, _ in members]
        out = run_ranks(partial(_rank, jobs=jobs, plan=dict(plan)), RANKS, Path(base), [__name__])
        return [
            _judged(name, member, _found(out, number), stepped, after, out / f"saved-{number}")
            for number, (member, name, stepped, after) in enumerate(members)
        ]


def run_ranks(rank: Callable[[int, Path], None], size: int, base: Path, preload: Sequence[str]) -> Path:
    """Call `rank(number, directory)` in `size` processes, and return the directory, a new one in `base`.

    They are forked from a server that has imported `preload`, and end without tearing the interpreter down: gloo's
    threads may still hold tensors then, of which PyTorch knows that it can end a process (its pull request 179291).
    PyTorch 2.13 has ended a rank by SIGSEGV and by SIGABRT amid its collectives too, seldom and not repeatably. So
    ranks of which one crashed run once more, with a warning; nothing else is tried twice.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([*preload])

    again = False
    while True:
        directory = Path(tempfile.mkdtemp(dir=base, prefix="ranks-"))
        ranks: Any = mp.start_processes(rank, (directory,), nprocs=size, join=False, start_method="forkserver")
        try:
            while not ranks.join():
                pass
            return directory
        except ProcessException:
            crashes = sorted(CRASHES & {-process.exitcode for process in ranks.processes})
            if again or not crashes:
                raise
            again = True
            warnings.warn(f"a rank was ended by {signal.Signals(crashes[0]).name}: all run once more", stacklevel=2)
        finally:
            for file in ranks.error_files:  # temporary files in which ranks say what they raised
                Path(file).unlink(missing_ok=True)


def divisible(model_type: str, key: str) -> dict[str, Any]:
    """Return a random config.json of a family that two ranks divide."""
    family = family_of({"model_type": model_type})
    for attempt in range(1000):
        config = family.random_config(random.Random(f"parallel/{model_type}/{key}/{attempt}"))
        try:
            raise_if_indivisible(family.config(config), RANKS)
        except UserError:
            continue
        return config
    raise UserError(f"{model_type}: none of 1,000 random configs is divided by {RANKS} ranks")


def _documents(vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, positions, segments, targets and weights of the packed documents, [sequences, SEQ_LEN]."""
    positions, segments = verify.packed()
    tokens = torch.randint(0, vocab, segments.shape, generator=torch.Generator().manual_seed(0)) * (segments >= 0)
    targets = tokens.roll(-1, 1)
    weights = ((segments == segments.roll(-1, 1)) & (segments >= 0)).float()
    weights[:, -1] = 0
    return tokens, positions, segments, targets, weights


def _groups(mesh: tuple[int, int]) -> list[slice]:
    """Return the sequences that each data-parallel rank computes."""
    return [slice(rank, None, mesh[0]) for rank in range(mesh[0])]


def _step(hf: Any, groups: Sequence[slice], rate: float | None = None) -> _Expected:
    """Take one step with transformers' model, document by document, and return it; `hf` is changed.

    Without a `rate` the step changes no weight by more than `STEP`.
    """
    hf.eval()
    hf.get_input_embeddings().padding_idx = None
    tokens, _, segments, targets, weights = _documents(hf.config.get_text_config().vocab_size)
    total, balanced = torch.zeros(()), False
    for group in groups:
        loss, documents = torch.zeros(()), []
        for number in segments[group].unique().tolist():
            if number < 0:
                continue
            here = segments[group] == number
            documents.append(tokens[group][here])
            logits = hf(input_ids=documents[-1][None]).logits[0]
            each = torch.nn.functional.cross_entropy(logits, targets[group][here], reduction="none")
            loss = loss + (each * weights[group][here]).sum()
        balance = verify.their_balance(hf, documents)
        balanced |= balance is not None
        total = total + loss + (0 if balance is None else BALANCE * balance * weights[group].sum())
    total = total / weights.sum()
    total.backward()
    if rate is None:
        rate = STEP / max(float(p.grad.abs().max()) for p in hf.parameters() if p.grad is not None)
    with torch.no_grad():
        gradients = verify.stored_gradients(copy.deepcopy(hf), [p.grad for p in hf.parameters()])
        for p in hf.parameters():
            if p.grad is not None:
                p.sub_(rate * p.grad)
    return _Expected(float(total.detach()), gradients, rate, BALANCE * balanced)


def _rank(
    rank: int, base: Path, jobs: Sequence[tuple[str, str, float, float]], plan: Mapping[str, ParallelStyle]
) -> None:
    """Compute every job as one of the ranks, and write what was found."""
    faulthandler.enable()  # a rank that dies says where
    torch.set_num_threads(1)
    # it logs hints about microseconds at an export
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{base}/store", RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(minutes=2),  # the other rank may have failed
    )
    for number, (member, name, rate, weight) in enumerate(jobs):
        try:
            found = _on_rank(Path(member), name, rate, weight, plan, base / f"saved-{number}")
        except (UserError, AssertionError) as error:  # a parameter that is not in the plan, or has no mapping
            found = {"problems": str(error).splitlines()}
        except Exception as error:  # whatever a wrong plan leads to: the other rank may fail otherwise, or wait
            found = {"problems": [f"{type(error).__name__}: {str(error).splitlines()[0]}"], "stopped": True}
        torch.save(found, base / f"found-{number}-{rank}.pt")
        if "stopped" in found:
            return
    dist.barrier()
    dist.destroy_process_group()


def _found(base: Path, number: int) -> dict[str, Any]:
    """Return what rank 0 found for a job, with the problems of both ranks."""
    files = [base / f"found-{number}-{rank}.pt" for rank in range(RANKS)]
    found = [torch.load(file, weights_only=True) for file in files if file.is_file()]
    problems = [*dict.fromkeys(problem for one in found for problem in one.get("problems", ()))]
    if len(found) < RANKS and not problems:
        problems = ["not computed: the ranks had stopped at another config"]
    return {**(found[0] if found else {}), "problems": problems}


def _on_rank(
    member: Path, name: str, rate: float, weight: float, plan: Mapping[str, ParallelStyle], saved: Path
) -> dict[str, Any]:
    """Take the step on this rank's part of the model and of the data, and save the model; `weight` is that of the
    load-balancing loss."""
    shards, tensor = MESHES[name]
    meshes = Meshes.of("cpu", MeshSizes(shard=shards, tensor=tensor))
    model = bridge.build(member)
    parallelize(model, meshes, "fp32", plan=plan)
    model.give_weights(member, torch.device("cpu"))
    part = _groups((shards, tensor))[dist.get_rank() // tensor]
    *inputs, targets, weights = _documents(model.config.vocab)
    units = weights.sum()
    loss = model(*(t[part] for t in inputs), partial(cross_entropy, targets=targets[part], weights=weights[part]))
    if weight and (balance := model.load_balancing_loss()) is not None:
        loss = loss + weight * balance * weights[part].sum()
    (loss / units).backward()
    whole = loss.detach().clone()
    if shards > 1:
        dist.all_reduce(whole)
    by_name = {n: t.clone() for n, t in verify.own_gradients(model).items()}
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(rate * p.grad)
    save_hf(model.hf_tensors(), member, saved, writes=dist.get_rank() == 0, carried=model.carried(member))
    return {"loss": float(whole / units), "gradients": by_name}


def _judged(
    mesh: str, member: Path, found: Mapping[str, Any], stepped: _Expected, after: Any, saved: Path
) -> verify.Case:
    """Compare what the ranks found with transformers' step, and the logits of its model of what they saved with those
    of `after`, its model after the step."""
    config = read_config(member)
    if problems := found.get("problems"):
        return verify.Case(config, problems=tuple(problems), mesh=mesh)
    exact = exact_reference(member)
    with Double():
        right = _step(exact, _groups(MESHES[mesh]), stepped.rate)
        logits = _logits(exact)
    loss, loss_found = (abs(loss - right.loss) / abs(right.loss) for loss in (stepped.loss, found["loss"]))
    theirs, ours = (verify.gradient_errors(g, right.gradients) for g in (stepped.gradients, found["gradients"]))
    reloaded, ours_reloaded = (verify.logit_error(_logits(hf), logits) for hf in (after, reference(saved)))
    return verify.Case(
        config,
        (
            verify.judged("loss", loss, loss_found),
            verify.closest(verify.judged(f"gradient of {n}", theirs[n], ours[n]) for n in ours),
            verify.judged("logits of what was saved", reloaded, ours_reloaded),
        ),
        mesh=mesh,
    )


@torch.no_grad()
def _logits(hf: Any) -> list[Tensor]:
    tokens, _, segments, _, _ = _documents(hf.config.get_text_config().vocab_size)
    return [hf.eval()(input_ids=tokens[segments == n][None]).logits for n in range(len(verify.LENGTHS))]
