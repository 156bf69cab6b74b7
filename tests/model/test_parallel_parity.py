"""Every family computes on two ranks what transformers computes in one process, and a wrong plan is caught."""

import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException

from ptf.model import parallel_parity
from ptf.model.families import MODULES
from ptf.model.parallel_parity import run_ranks, verify_parallel
from ptf.model.sharding import COLWISE, PLAN, SEQUENCE, WHOLE
from ptf.model.tensor_parallel import ParallelStyle, ParamSharding, normalise_width
from ptf.model.verify import Case
from tests.model.ranks import IMPORTED

Plan = Mapping[str, ParallelStyle]


def without(entry: str) -> Plan:
    return {name: style for name, style in PLAN.items() if name != entry}


# a plan, and the mesh on which it shows; FSDP needs none
WRONG: dict[str, tuple[str, Plan]] = {
    "an entry is missing": ("olmo2", without("layers.*.attn.[qk]_width_norm")),
    "a norm of a slice of the width": ("olmo2", {**PLAN, "layers.*.attn.[qk]_width_norm": COLWISE}),
    "the weight of the norm is whole": (
        "olmo2",
        {**PLAN, "layers.*.attn.[qk]_width_norm": ParallelStyle({"weight": ParamSharding()}, forward=normalise_width)},
    ),
    "gradients of a norm are not summed": ("qwen3", {**PLAN, "layers.*.attn.[qk]_norm": WHOLE}),
    "biases of the output count on each rank": (
        "seed_oss",
        {
            **PLAN,
            "layers.*.attn.o_proj": ParallelStyle({"weight": ParamSharding(1), "bias": ParamSharding(partial=True)}),
        },
    ),
    "gradients of the router are not summed": ("qwen3_moe", {**PLAN, "layers.*.moe.router": WHOLE}),
    "the balance loss counts on each rank": (
        "qwen3_moe",
        {**PLAN, "layers.*.moe": ParallelStyle(sequence_parallel=True)},
    ),
}


def of(cases: list[Case], mesh: str) -> list[Case]:
    return [case for case in cases if case.mesh == mesh]


@pytest.mark.long
@pytest.mark.parametrize("model_type", MODULES)
def test_two_ranks_compute_what_transformers_does(model_type: str) -> None:
    cases = verify_parallel(model_type)
    assert [case.mesh for case in cases] == ["FSDP", "tensor parallel"]
    assert [case for case in cases if not case.passed] == []


@pytest.mark.long
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_plan_is_caught(mistake: str) -> None:
    model_type, plan = WRONG[mistake]
    cases = verify_parallel(model_type, configs=2, plan=plan)
    assert of(cases, "FSDP")[0].passed
    caught = [case for case in of(cases, "tensor parallel") if not case.passed]
    assert caught
    if mistake == "an entry is missing":
        assert any("q_width_norm" in problem for problem in caught[0].problems)
    if mistake == "the weight of the norm is whole":
        assert caught[0].problems[0].startswith("RuntimeError: The size of tensor")


@pytest.mark.long
def test_gradients_of_the_ranks_that_are_wrong_by_little_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    found = parallel_parity._found

    def scaled(*args: Any) -> dict[str, Any]:
        one = found(*args)
        return {**one, "gradients": {name: g * (1 + 1.5e-5) for name, g in one["gradients"].items()}}

    monkeypatch.setattr(parallel_parity, "_found", scaled)
    cases = verify_parallel("qwen3_moe")
    assert [[f.verdict for f in case.findings] for case in cases] == [["pass", "fail", "pass"]] * 2


@pytest.mark.long
def test_ranks_are_not_blamed_for_errors_of_transformers_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    step, computed = parallel_parity._step, []

    def inexact(hf: Any, *args: Any) -> Any:
        right = step(hf, *args)
        computed.append(hf.dtype)
        if hf.dtype != torch.float32:
            return right
        hf.get_output_embeddings().register_forward_hook(lambda module, args, out: out * (1 + 1.5e-5))
        return replace(right, gradients={name: g * (1 + 1.5e-5) for name, g in right.gradients.items()})

    monkeypatch.setattr(parallel_parity, "_step", inexact)
    cases = verify_parallel("qwen3_moe")
    assert computed == [torch.float32, torch.float32, torch.float64, torch.float64]
    assert all(case.passed and case.findings[1].theirs > 1e-5 for case in cases)


def test_the_plans_differ() -> None:
    assert all(plan != PLAN for _, plan in WRONG.values())
    assert PLAN["layers.*.attn.[qk]_norm"] is SEQUENCE


def _ending(rank: int, directory: Path, attempts: int, by: signal.Signals, raises: bool = False) -> None:
    """Rank 1 of the first `attempts` runs is ended by a signal; rank 0 may raise, as one that loses the other."""
    (directory / str(rank)).touch()
    if len([*directory.parent.iterdir()]) > attempts:
        return
    if rank:
        os.kill(os.getpid(), by)
    if raises:
        raise RuntimeError("Connection closed by peer")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The ranks that are started; all have ended before they are looked at. No file stays."""
    found, start = list[Any](), mp.start_processes

    def started(*args: Any, **keywords: Any) -> Any:
        found.append(start(*args, **keywords))
        for process in found[-1].processes:
            process.join(60)
        return found[-1]

    monkeypatch.setattr(parallel_parity.mp, "start_processes", started)
    yield found
    assert [file for ranks in found for file in ranks.error_files if Path(file).exists()] == []


@pytest.mark.parametrize("raises", [False, True])
def test_ranks_of_which_one_crashed_run_once_more_and_say_so(tmp_path, runs, raises):
    with pytest.warns(UserWarning, match="a rank was ended by SIGSEGV: all run once more"):
        directory = run_ranks(partial(_ending, attempts=1, by=signal.SIGSEGV, raises=raises), 2, tmp_path, IMPORTED)
    assert len(runs) == 2
    assert sorted(path.name for path in directory.iterdir()) == ["0", "1"]


def test_ranks_that_crash_twice_or_that_others_end_are_not_run_again(tmp_path, runs):
    with pytest.warns(UserWarning, match="once more"), pytest.raises(mp.ProcessExitedException, match="SIGABRT"):
        run_ranks(partial(_ending, attempts=2, by=signal.SIGABRT), 2, tmp_path, IMPORTED)
    assert len(runs) == 2
    with pytest.raises(ProcessException, match=r"closed by peer|SIGKILL"):  # of the rank whose sentinel is read first
        run_ranks(partial(_ending, attempts=9, by=signal.SIGKILL, raises=True), 2, tmp_path, IMPORTED)
    assert len(runs) == 3
