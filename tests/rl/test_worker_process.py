"""Many calls in one process: they overlap, each has its own time, and no call suffers from another."""

import asyncio
import contextlib
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ptf.config import Plugin
from ptf.data.trajectory import NoResult, Reward
from ptf.rl import worker_server
from ptf.rl.environments.protocol import EnvironmentFault, Environments
from ptf.rl.rewards.scoring import RewardWorkers
from ptf.rl.worker_server import Threads
from tests.waiting import until


def scored_by(name: str, **options: Any) -> contextlib.closing[RewardWorkers]:
    plugin = Plugin(use=f"tests.rl.overlapping:{name}")
    return contextlib.closing(RewardWorkers(plugin, **{"timeout_s": 40.0, "retries": 0, **options}))


def environments_of(name: str, **options: Any) -> contextlib.closing[Environments]:
    return contextlib.closing(
        Environments(Plugin(use=f"tests.rl.overlapping:{name}"), **{"timeout_s": 40.0, **options})
    )


def play(environments: Environments, rows: list[dict[str, Any]]) -> list[float | str]:
    """The reward of one step of an episode for each row, or why there is none."""

    async def one(row: dict[str, Any]) -> float | str:
        try:
            state, _, _ = await environments.reset(row, 0)
            result = await environments.step(state, "")
        except EnvironmentFault as error:
            return str(error)
        await environments.end(state)
        return result.reward

    async def all_of_them() -> list[float | str]:
        return await asyncio.gather(*map(one, rows))

    return asyncio.run(all_of_them())


def test_32_plain_calls_are_in_one_process_at_once() -> None:
    with scored_by("together") as rewards:
        assert rewards.score([({}, "")] * 32) == [Reward(1.0)] * 32


@pytest.mark.parametrize("name", ["Together", "TogetherAsync"])
def test_32_episodes_are_in_one_process_at_once(name: str) -> None:
    with environments_of(name) as environments:
        assert play(environments, [{}] * 32) == [1.0] * 32
        assert environments.retried == 0


def test_a_call_that_hangs_ends_with_its_own_time_and_the_others_are_made_once(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    texts = ["hang", *map(str, range(20))]
    with scored_by("noted", timeout_s=2.0) as rewards:
        outcomes = rewards.score([({"calls": str(calls)}, text) for text in texts])
        assert outcomes[0] == NoResult("took longer than 2 s")
        assert len({outcome for outcome in outcomes[1:]}) == 1, "of one process"
        assert Counter(calls.read_text().split()) == dict.fromkeys(texts, 1)
        process = rewards.workers[0].process
        assert process is not None
        until(lambda: process.poll() is not None, 30)  # nothing is in it but the thread that never came back
        (again,) = rewards.score([({"calls": str(calls)}, "x")])
        assert isinstance(again, Reward)
        assert again != outcomes[1]


def test_of_calls_in_a_process_that_dies_the_one_at_fault_alone_has_no_result(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    texts = ["a", "b", "die", "c", "d"]
    with scored_by("noted", timeout_s=5.0) as rewards:
        outcomes = rewards.score([({"calls": str(calls)}, text) for text in texts])
    assert [isinstance(outcome, Reward) for outcome in outcomes] == [True, True, False, True, True]
    assert outcomes[2] == NoResult("the reward's process died")
    assert max(Counter(calls.read_text().split()).values()) == 2, "each at most once more"


@pytest.mark.long
def test_a_call_that_takes_too_long_beside_others_is_made_again_alone() -> None:
    """None of them is at fault: each computes for a tenth of its time."""
    with scored_by("waits_then_computes", timeout_s=1.5) as rewards:
        assert rewards.score([({}, "")] * 24) == [Reward(1.0)] * 24


def test_an_error_that_a_future_does_not_take_is_named_at_once() -> None:
    with scored_by("stops") as rewards:
        assert rewards.score([({}, "")] * 3) == [NoResult("RuntimeError: StopIteration: ")] * 3


def test_no_call_waits_for_a_process_that_was_closed() -> None:
    with scored_by("stops") as rewards:
        rewards.score([({}, "")])
    with pytest.raises(RuntimeError, match="was closed"):
        rewards.score([({}, "")])


def test_thousands_of_cheap_calls_of_two_processes() -> None:
    """In order, and each once: a number is the answer's own."""
    plugin = Plugin(use="ptf.rl.rewards:brevity", args={"longest": 10_001, "margin": 10_000})
    with contextlib.closing(RewardWorkers(plugin, processes=2)) as rewards:
        found = rewards.score([({}, "a" * n) for n in range(1, 5001)])
    assert found == [Reward((1 - n) / 10_000) if n > 1 else Reward(0.0) for n in range(1, 5001)]


def test_an_environment_lost_between_two_questions_of_its_replay_is_replayed_again() -> None:
    with environments_of("Counting") as environments:

        async def run() -> list[float]:
            state, _, _ = await environments.reset({}, 0)
            for _ in range(3):
                await environments.step(state, "x")
            process, ask, killed = environments.processes[0], environments.processes[0].ask, [0]

            def killing(question: Any, **options: Any) -> Any:
                if question[0] == "step" and killed[0] < 3:  # in the replay, and before it
                    killed[0] += 1
                    running = process.process
                    assert running is not None
                    os.kill(running.pid, signal.SIGKILL)
                    running.wait(10)
                return ask(question, **options)

            process.ask = killing  # type: ignore[method-assign]
            return [(await environments.step(state, "x")).reward]

        assert asyncio.run(run()) == [4.0]
        assert environments.retried == 0


@pytest.mark.long
def test_a_coroutine_that_hangs_or_blocks_the_loop_has_no_result_and_the_others_do() -> None:
    for fault in ("hang", "block"):
        rows = [{"parties": 3}, {"fault": fault}, {"parties": 3}, {"parties": 3}]
        with environments_of("TogetherAsync", timeout_s=1.0, retries=0) as environments:
            found = play(environments, [{"parties": 1}, *rows[1:2]] if fault == "block" else rows)
        assert found.count(1.0) == len(found) - 1
        assert found[1] == "took longer than 1 s"


def test_a_plain_reward_that_needs_the_main_thread_is_told_how_to_get_it() -> None:
    with scored_by("with_alarm") as rewards:
        (outcome,) = rewards.score([({}, "")])
    assert isinstance(outcome, NoResult)
    assert "give the function the attribute `max_concurrent_calls = 1`" in outcome.reason


def test_calls_in_threads_begin_while_the_processor_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many in each interval; while two of them compute, one more when all have ended."""
    now, computing = 0.0, 1
    monkeypatch.setattr(worker_server.time, "monotonic", lambda: now)
    monkeypatch.setattr(Threads, "_computing", lambda self, seconds: computing)

    async def run() -> tuple[list[int], list[int]]:
        nonlocal now, computing
        loop = asyncio.get_running_loop()
        threads, counts = Threads(64, 10.0), []
        threads.waiting.extend(loop.create_future() for _ in range(40))
        for _ in range(6):
            threads._admit()
            counts.append(threads.running)
            now += 0.01
        busy, in_work = Threads(64, 10.0), []
        computing = 2
        busy.waiting.extend(loop.create_future() for _ in range(40))
        for _ in range(3):
            busy._admit()
            in_work.append(busy.running)
            now += 0.01
        busy.running -= 1
        busy._admit()
        return counts, [*in_work, busy.running, len(busy.waiting)]

    counts, in_work = asyncio.run(run())
    assert counts == [1, 2, 4, 8, 16, 32]
    assert in_work == [1, 1, 1, 1, 38]


def test_a_process_ends_when_its_rewards_are_closed(tmp_path: Path) -> None:
    with scored_by("noted") as rewards:
        (outcome,) = rewards.score([({"calls": str(tmp_path / "calls")}, "x")])
        pid = int(outcome.value) if isinstance(outcome, Reward) else 0
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("name", ["Closes", "ClosesLater"])
def test_an_environment_is_closed_once_after_its_episode_or_before_it_is_replayed(name: str, tmp_path: Path) -> None:
    file = tmp_path / "closed"
    rows = [{"file": str(file), "name": fault, "fault": fault} for fault in ("none", "raise", "close")]
    with environments_of(name, retries=1) as environments:
        assert play(environments, rows) == [0.0, "OSError: broken", 0.0]
        until(lambda: len(file.read_text().split() if file.exists() else []) >= 4, 20)
        assert sorted(file.read_text().split()) == ["close", "none", "raise", "raise"]
        assert play(environments, rows[:1]) == [0.0]  # in the same process


def test_a_close_that_hangs_costs_no_other_episode_anything(tmp_path: Path) -> None:
    row = {"file": str(tmp_path / "closed"), "name": "a"}
    with environments_of("Closes", timeout_s=1.0) as environments:
        assert play(environments, [{**row, "fault": "hang"}]) == [0.0]
        assert play(environments, [row] * 4) == [0.0] * 4
