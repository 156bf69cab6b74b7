"""Rollouts in flight on the virtual clock: ages, batches, and the same tokens however long anything takes."""

import asyncio
import contextlib
import gc
import json
import random
import time
from pathlib import Path

import numpy as np
import pytest

from ptf.config.sections.rollout import RolloutConfig
from ptf.data.trajectory import Generation, NoResult, Prompt, Reward, Trajectory
from ptf.errors import UserError
from ptf.rl.engines.protocol import Request, Sampling
from ptf.rl.flight_ledger import FlightLedger
from ptf.rl.in_flight import InFlight
from ptf.rl.in_flight_group import InFlightGroup
from tests.tiny import read_jsonl, write_jsonl

STEPS = 12


def clock(k: int, wall: bool = False, **changes) -> RolloutConfig:
    usual = {
        "clock": "wall" if wall else "virtual",
        "prompts_per_step": 4,
        "group_size": 2,
        "max_staleness": k,
        "slice_tokens": 5,
        "in_flight": 4 + 2 * k,
        "generation_batches": 2,
    }
    return RolloutConfig(**usual | changes)


def flight_of(config: RolloutConfig, engine, play, timeout_s: float = 10.0, ledger: Path | None = None) -> InFlight:
    prompts = (Prompt(np.array([1], np.int32), {}, "a", i) for i in range(10**6))
    slices = config.update_slices or 0
    return InFlight(config, slices, prompts.__next__, engine, play, timeout_s, FlightLedger(ledger))


class Engine:
    """Samples a response whose length and tokens its seed determines, under the version of the weights."""

    def __init__(self) -> None:
        self.version, self.served = 0, list[list[tuple[int, int, int]]]()

    def __call__(self, batches: list[list[Request]], version: int) -> list[list[Generation]]:
        self.served += [[(r.seed, r.offset, len(r.context)) for r in batch] for batch in batches]
        return [[self.part(request) for request in batch] for batch in batches]

    def part(self, request: Request) -> Generation:
        rng = np.random.default_rng(request.seed)
        ids = rng.integers(10, 99, 1 + int(rng.lognormal(1.5, 1.0)), np.int32)
        mine = ids[request.offset : request.offset + request.sampling.max_new_tokens]
        whole = request.offset + len(mine) == len(ids)
        logprobs, versions = np.full(len(mine), -0.5, np.float32), np.full(len(mine), self.version, np.int32)
        return Generation(request.context, mine, logprobs, versions, whole)


def player(turns: int = 1, pause: bool = False, most: int = 40):
    """An episode of some requests; with `pause`, it waits for a while of random length before each."""

    async def play(prompt: Prompt, version: int, i: int, ask) -> Trajectory:
        found = []
        for turn in range(turns):
            if pause:
                await asyncio.sleep(random.random() * 0.004)
            seed = prompt.index * 1000 + i * 10 + turn
            request = Request(np.array([1, 2, turn], np.int32), Sampling(most, 1.0, (9,)), seed)
            found.append(await ask(request))
        return Trajectory(prompt, tuple(found), "", Reward(0.0))

    return play


def run(config: RolloutConfig, play, steps: int = STEPS, ledger: Path | None = None, updating=lambda: False):
    """Return, of each step, the taken groups and their ages; and what the engine was asked."""
    engine = Engine()
    flight = flight_of(config, engine, play, ledger=ledger)
    taken: list[list[InFlightGroup]] = []
    try:
        for step in range(steps):
            engine.version = step
            taken.append(flight.take_groups(step))
            flight.beside_update(step, updating)
    finally:
        flight.close()
    return taken, engine.served


def told(taken):
    def said(group):
        return [(g.sampled_ids.tolist(), g.versions.tolist()) for t in group.trajectories for g in t.generations]

    return [[(group.number, said(group)) for group in of] for of in taken]


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("update", "environment"), [(0, 0), (1, 0), (2, 0), (0, 1), (1, 2)])
def test_every_group_is_trained_once_and_at_most_k_versions_old(k, full, update, environment):
    slices = {"update_slices": update, "environment_slices": environment}
    taken, _ = run(clock(k, in_flight=4 * (1 + k) if full else 4 + 2 * k, **slices), player(), 30)
    assert all(len(of) == 4 for of in taken)
    numbers = [group.number for of in taken for group in of]
    assert len(set(numbers)) == len(numbers) == 120
    assert max(numbers) < 120 + 4 * (1 + k), "no group waits for ever while later ones are taken"
    found = [step - group.admitted for step, of in enumerate(taken) for group in of]
    assert 0 <= min(found) <= max(found) <= k
    assert max(found) > 0
    several = [
        len(set(g.versions.tolist())) for of in taken for group in of for t in group.trajectories for g in t.generations
    ]
    assert max(several) > 1, "responses go on under newer weights"


def test_nothing_depends_on_how_long_an_episode_thinks():
    first = run(clock(2), player(2))
    assert told(first[0]) == told(run(clock(2), player(2, pause=True))[0])
    assert first[1] == run(clock(2), player(2, pause=True))[1], "nor do the batches that the engine computes"
    assert told(first[0]) != told(run(clock(2, slice_tokens=6), player(2))[0])  # negative control


@pytest.mark.parametrize("slices", [{"environment_slices": 1}, {"update_slices": 1}, {"update_slices": 2}])
def test_slices_beside_an_update_and_for_environments_belong_to_the_clock(slices):
    first = run(clock(2, **slices), player(2))
    slow = run(clock(2, **slices), player(2, pause=True))
    assert (told(first[0]), first[1]) == (told(slow[0]), slow[1])
    assert first[1] != run(clock(2), player(2))[1]  # negative control


def test_an_environment_has_its_slices_for_an_answer():
    """Of two turns, the second is first computed `environment_slices` slices after the one that follows the first."""
    begun = {}
    for slices in (0, 3):
        asked: list[dict[int, int]] = []

        def serve(batches, version, asked=asked):
            asked.append({r.seed: r.offset for batch in batches for r in batch})
            return Engine()(batches, version)

        flight = flight_of(clock(2, environment_slices=slices), serve, player(2))
        for _ in range(24):
            flight.advance(0)
        flight.close()
        last = {seed: n for n, of in enumerate(asked) for seed in of if seed % 10 == 0}
        first = {seed: n for n, of in reversed(list(enumerate(asked))) for seed in of if seed % 10 == 1}
        begun[slices] = {first[seed + 1] - n for seed, n in last.items() if seed + 1 in first}
    assert begun == {0: {1}, 3: {4}}


def test_slices_run_while_an_environment_thinks():
    """The engine is not kept by an environment that is slow but in time."""
    thinking = asyncio.Event()

    async def play(prompt, version, i, ask):
        response = await ask(Request(np.array([1, 2], np.int32), Sampling(40, 1.0, (9,)), prompt.index * 10))
        if prompt.index == 0 and i == 0:
            await thinking.wait()
        return Trajectory(prompt, (response,), "", Reward(0.0))

    engine = Engine()
    flight = flight_of(clock(8, environment_slices=20), engine, play)
    for number in range(30):
        if number == 19:
            thinking.set()
        flight.advance(0)
    flight.close()
    assert flight.groups[0].ended is not None


def sometimes() -> bool:
    """An update that goes on for some slices."""
    return random.random() < 0.6


@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_was_killed_goes_on_where_its_ledger_ends(seed, tmp_path):
    """The lines up to the kill, of which the last may be cut off, decide; later ones are decided anew."""
    ledger = tmp_path / "flight.jsonl"
    first = run(clock(2, wall=True), player(2, pause=True), ledger=ledger, updating=sometimes)
    data = ledger.read_bytes()
    kept = data[: random.Random(seed).randrange(len(data))]
    ledger.write_bytes(kept)
    again = run(clock(2, wall=True), player(2, pause=True), ledger=ledger, updating=sometimes)
    whole = kept[: kept.rfind(b"\n") + 1]
    assert ledger.read_bytes().startswith(whole)
    slices = sum(bool(json.loads(line).get("computed")) for line in whole.splitlines())
    assert first[1][:slices] == again[1][:slices], "a slice with requests computes one batch at least"
    assert all(len(of) == 4 for of in again[0])


def test_an_episode_without_a_result_ends_so_again(tmp_path):
    """Also where its environment would answer now; the responses that it got are computed as before."""
    ledger, late = tmp_path / "flight.jsonl", [True]

    async def play(prompt, version, i, ask):
        found = []
        for turn in range(3):
            seed = prompt.index * 1000 + i * 10 + turn
            found.append(await ask(Request(np.array([1, turn], np.int32), Sampling(40, 1.0, (9,)), seed)))
            if late[0] and prompt.index % 3 == 0 and turn == 1:
                return Trajectory(prompt, tuple(found), "", NoResult("late"), counts={"calls": 2.0})
        return Trajectory(prompt, tuple(found), "", Reward(0.0))

    def outcomes(taken):
        return [[(t.outcome, len(t.generations), dict(t.counts)) for t in g.trajectories] for of in taken for g in of]

    first = run(clock(2), play, ledger=ledger)
    assert any(isinstance(one, NoResult) for of in outcomes(first[0]) for one, _, _ in of)
    late[0] = False
    again = run(clock(2), play, ledger=ledger)
    assert (told(first[0]), first[1], outcomes(first[0])) == (told(again[0]), again[1], outcomes(again[0]))
    assert outcomes(run(clock(2), play)[0]) != outcomes(first[0])  # negative control
    assert '"responses": 2' in ledger.read_text()


@pytest.mark.parametrize("wall", [False, True])
def test_an_episode_that_ends_before_its_recorded_responses_does_not_repeat(wall, tmp_path):
    """Played again after a resume, it must ask for the responses that it got and the one that is being generated."""
    turns = [2]

    async def play(prompt, version, i, ask):
        found = [
            await ask(Request(np.array([1, turn], np.int32), Sampling(40, 1.0, (9,)), prompt.index * 10 + turn))
            for turn in range(turns[0])
        ]
        return Trajectory(prompt, tuple(found), "", Reward(0.0))

    config, ledger = clock(2, wall=wall), tmp_path / "flight.jsonl"
    flight = flight_of(config, Engine(), play, ledger=ledger)
    flight.advance(0)
    state = flight.state_dict()
    flight.close()
    turns[0] = 0
    again = flight_of(config, Engine(), play, ledger=ledger)
    again.load_state_dict(state)
    with pytest.raises(UserError, match=r"after the resume|an episode ended or asked the policy otherwise"):
        again.advance(0)
    again.close()


def test_an_episode_that_gives_up_a_request_is_named():
    async def hasty(prompt, version, i, ask):
        request = Request(np.array([1, 2], np.int32), Sampling(400, 1.0, (9,)), 3)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await ask(request)
        return Trajectory(prompt, (), "", Reward(0.0))

    engine = Engine()

    def slow(batches, version):
        time.sleep(0.05)
        return engine(batches, version)

    flight = flight_of(clock(1, slice_tokens=1), slow, hasty)
    with pytest.raises(UserError, match="gave up a request"):
        flight.take_groups(0)
    flight.close()


def test_a_ledger_that_is_damaged_is_named(tmp_path):
    (tmp_path / "flight.jsonl").write_text('{"slice": 0, "computed"\n{"slice": 1, "ended": []}\n')
    with pytest.raises(UserError, match="line 1 is damaged"):
        FlightLedger(tmp_path / "flight.jsonl")
    (tmp_path / "flight.jsonl").write_text('{"slice": 1, "ended": []}\n{"no_result": [0, 1], "trajectory": {}}\n')
    with pytest.raises(UserError, match="line 2 is damaged"):
        FlightLedger(tmp_path / "flight.jsonl")


def test_a_ledger_of_another_run_is_refused(tmp_path):
    ledger = tmp_path / "flight.jsonl"
    run(clock(1, wall=True), player(1), steps=4, ledger=ledger)
    lines = read_jsonl(ledger)
    write_jsonl(ledger, [{**line, "version": 7} if "version" in line else line for line in lines])
    with pytest.raises(UserError, match="the ledger is of another run"):
        run(clock(1, wall=True), player(1), ledger=ledger)


def test_an_episode_has_one_request_at_a_time():
    async def both(prompt, version, i, ask):
        request = Request(np.array([1, 2], np.int32), Sampling(40, 1.0, (9,)), 3)
        await asyncio.gather(ask(request), ask(request))

    flight = flight_of(clock(1), Engine(), both)
    with pytest.raises(UserError, match="one at a time"):
        flight.take_groups(0)
    flight.close()


def test_a_response_is_continued_with_its_context_and_its_random_numbers():
    taken, served = run(clock(2), player())
    whole = Engine()
    for of in taken:
        for group in of:
            for i, t in enumerate(group.trajectories):
                (generation,) = t.generations
                seed = group.prompt.index * 1000 + i * 10
                alone = whole.part(Request(generation.context, Sampling(40, 1.0, (9,)), seed))
                assert generation.sampled_ids.tolist() == alone.sampled_ids.tolist()
                assert generation.finished == alone.finished
                assert np.all(np.diff(generation.versions) >= 0)
    assert all(context == 3 + offset for batch in served for _, offset, context in batch)
    assert any(offset for batch in served for _, offset, _ in batch)


def test_the_limit_of_a_response_is_not_that_of_a_slice():
    taken, _ = run(clock(1), player(most=7))
    lengths = [len(g.sampled_ids) for of in taken for group in of for t in group.trajectories for g in t.generations]
    assert max(lengths) == 7


def test_an_episode_that_never_asks_ends_the_run():
    async def hangs(prompt, version, i, ask):
        await asyncio.sleep(100)

    engine = Engine()
    flight = flight_of(clock(1), engine, hangs, 0.1)
    with pytest.raises(TimeoutError, match="12 episodes neither ended nor asked"):
        flight.take_groups(0)
    flight.close()


def test_a_fault_of_an_episode_is_raised_and_those_of_the_others_are_not_reported_later(caplog):
    """A report at a garbage collection formats tracebacks, which in Python 3.11 breaks a parse that it interrupts."""

    async def fails(prompt, version, i, ask):
        raise RuntimeError("a fault")

    flight = flight_of(clock(1), Engine(), fails)
    with pytest.raises(RuntimeError, match="a fault"):
        flight.take_groups(0)
    flight.close()
    del flight
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_what_is_in_flight_goes_on_from_its_state_and_refuses_other_requests():
    whole, first = (flight_of(clock(2), Engine(), player(2)) for _ in range(2))
    try:
        for flight in (whole, first):
            flight.advance(0)
            flight.advance(0)
        state = first.state_dict()
        assert any(member.get("started") for group in state["groups"] for member in group["members"])
        assert any(member.get("responses") for group in state["groups"] for member in group["members"])
        second = flight_of(clock(2), Engine(), player(2))
        second.next_prompt = first.next_prompt
        second.load_state_dict(state)
        ends = [told([flight.take_groups(0)]) for flight in (whole, second)]
        assert ends[0] == ends[1]
        other = flight_of(clock(2), Engine(), player(1, most=41))
        other.load_state_dict({**state, "groups": [moved(group) for group in state["groups"]]})
        with pytest.raises(UserError, match="sent another request to the policy than before"):
            other.take_groups(0)
    finally:
        for flight in (whole, first, second, other):
            flight.close()


def moved(group):
    """A group whose responses were to another context."""
    members = [
        {**member, "started": {**member["started"], "context": member["started"]["context"] + 1}}
        if member.get("started")
        else member
        for member in group["members"]
    ]
    return {**group, "members": members}
