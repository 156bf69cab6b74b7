"""Episodes with turns: exact ids, faults that are no rewards, and nobody waits for anybody."""

import asyncio
import contextlib
import os
import time
from concurrent.futures import Future
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from ptf.config import ConfigError, Plugin
from ptf.config.sections.rollout import RolloutConfig
from ptf.data.character_tokenizer import character_tokenizer
from ptf.data.chat import chat_samples
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Generation, NoResult, Prompt, Reward, Trajectory, group_into_documents, samples_of
from ptf.errors import UserError
from ptf.recipes.grpo.recipe import GRPO
from ptf.rl.engines.protocol import EngineFault, Sampling
from ptf.rl.environments.protocol import Environments, StepResult
from ptf.rl.environments.rollout import EnvironmentRollout
from ptf.rl.episodes import Episode, one_response, run_all, run_episodes
from ptf.rl.policy.policy import Limits
from ptf.rl.rollout_role import raise_if_wrong_environments
from ptf.rl.worker_messages import Interrupted
from tests.data.conversations import Conversation, real, said, schema
from tests.data.templates import templated
from tests.recipes.of_keys import of_keys


class Scripted:
    """An engine that says what it was told for each context; elsewhere, digits that depend on the seed.
    It never says one that ends a turn."""

    name, version = "scripted", 3

    def __init__(self, tokenizer, script=(), in_batches=False):
        self.tokenizer, self.script, self.in_batches, self.asked = tokenizer, dict(script), in_batches, []

    async def generate(self, request):
        self.asked.append(request)
        ids = self.script.get(request.context.tobytes())
        if ids is None:
            text = str(np.random.default_rng(request.seed).integers(1000))
            ids = np.array(
                [*self.tokenizer.encode(text), self.tokenizer.stop_ids[0]][: request.sampling.max_new_tokens], np.int32
            )
        logprobs, versions = -np.arange(1.0, len(ids) + 1, dtype=np.float32), np.full(len(ids), 3, np.int32)
        return Generation(request.context, ids, logprobs, versions, bool(ids[-1] in self.tokenizer.stop_ids))


@pytest.fixture
def tokenizer(tmp_path):
    return character_tokenizer("0123456789", tmp_path / "tokenizer")


@pytest.fixture
def environments(request):
    made = Environments(
        Plugin(use="tests.rl.environments:Echo", args=getattr(request, "param", {})), processes=2, timeout_s=1.5
    )
    yield made
    made.close()


def episodes(rows, tokenizer, environments, **limits):
    sampling = Sampling(limits.get("answer", 8), 1.0, tokenizer.stop_ids)
    how = Limits(sampling, limits.get("length", 200), limits.get("vocabulary"))
    play = EnvironmentRollout(environments, limits.get("turns", 8)) if environments else one_response
    return [
        Episode(
            Prompt(np.array([9], np.int32), row, "a", i), how, tokenizer, lambda turn, i=i: 100 * i + turn + 1, play
        )
        for i, row in enumerate(rows)
    ]


def played(rows, tokenizer, environments, in_batches=False, **limits):
    engine = Scripted(tokenizer, in_batches=in_batches)
    return asyncio.run(run_all(engine, episodes(rows, tokenizer, environments, **limits)))


def facts(t):
    return t.text, t.outcome, [(c.context.tolist(), c.sampled_ids.tolist()) for c in t.generations], t.complete


def spread(shared) -> list[Conversation]:
    """A few of each kind of recorded conversation with tools in which the two sides take turns."""

    def takes_turns(c):
        return all(a["role"] != "assistant" or b["role"] != "assistant" for a, b in pairwise(c.messages))

    return [
        c
        for source, n in (("tau", 6), ("sgd", 12))
        for c in islice((c for c in real(shared) if c.source == source and takes_turns(c)), n)
    ]


def turns_with_tools(n: int) -> Conversation:
    """n questions, each answered by a call and what is said of its result."""
    messages = []
    for i in range(n):
        call = {
            "id": f"call0000{i}",
            "type": "function",
            "function": {"name": "lookup", "arguments": {"place": f"Denver {i}"}},
        }
        messages += [said("user", f"How is it in Denver {i}?"), {**said("assistant", ""), "tool_calls": [call]}]
        messages += [{**said("tool", f"sunny {i}"), "tool_call_id": call["id"]}, said("assistant", f"It is sunny {i}.")]
    return Conversation("made", messages, [schema("lookup")])


@pytest.mark.long
def test_recorded_conversations_are_replayed_with_the_ids_that_are_trained():
    """Through environment and engine come the samples that the same conversation has as training data:
    tokens and masks."""
    for name in ("plain", "drops_thinking", "next_role_stop", "date", "two_stops"):
        split = replayed([turns_with_tools(n) for n in (1, 3)], templated(name))
        assert (split > 0) == (name == "drops_thinking")


@pytest.mark.long
def test_real_conversations_are_replayed_with_the_ids_that_are_trained(shared):
    for name in ("qwen3", "minimind"):
        split = replayed(spread(shared), Tokenizer.load(str(shared / "tokenizers" / name)))
        assert split == 0 or name == "qwen3"


def replayed(conversations: list[Conversation], tokenizer: Tokenizer) -> int:
    """How many were split into several samples."""
    split = 0
    with contextlib.closing(Environments(Plugin(use="tests.rl.environments:Replay"))) as environments:
        for c in conversations:
            wanted = chat_samples(c.messages, tokenizer, tools=c.tools)
            script = {}
            for sample in wanted:
                edges = np.flatnonzero(np.diff(sample.loss_weights != 0, prepend=False, append=False)).reshape(-1, 2)
                script |= {sample.tokens[:a].tobytes(): sample.tokens[a:b] for a, b in edges}
            how = Limits(Sampling(10**6, 1.0, tokenizer.stop_ids), 10**6)
            prompt = Prompt(np.zeros(0, np.int32), {"messages": c.messages, "tools": c.tools}, "a", 0)
            episode = Episode(prompt, how, tokenizer, lambda turn: 0, EnvironmentRollout(environments, 1000))
            (made,) = asyncio.run(run_all(Scripted(tokenizer, script), [episode]))
            assert made.outcome == Reward(1.0)
            assert made.complete
            found = samples_of(made)
            assert len(found) == len(wanted)
            for ours, theirs in zip(found, wanted, strict=True):
                assert ours.tokens.tolist() == theirs.tokens.tolist()
                assert ours.loss_weights.tolist() == theirs.loss_weights.tolist()
            split += len(found) > 1
    return split


def test_streams_follow_their_tokens_through_merges_and_cuts(tokenizer):
    """Three generations, of which the third begins anew: each sampled token is trained once, with its columns."""

    def generated(context, sampled, first):
        ids, logprobs = np.array(sampled, np.int32), np.arange(first, first + len(sampled), dtype=np.float32)
        return Generation(np.array(context, np.int32), ids, logprobs, np.zeros(len(sampled), np.int32), True)

    generations = generated([1, 2], [3, 4], 0), generated([1, 2, 3, 4, 5], [6], 2), generated([1, 9], [7, 8], 3)
    columns = {"old_logprobs": np.arange(5, dtype=np.float32) + 10}
    t = Trajectory(Prompt(np.array([1, 2]), {}, "a", 0), generations, "", Reward(1.0), columns)
    assert [len(run) for run in group_into_documents(generations)] == [2, 1]
    first, second = samples_of(t, np.arange(5) + 20)
    assert first.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert first.loss_weights.tolist() == [0, 0, 1, 1, 0, 1]
    assert first.token_columns["advantages"].tolist() == [0, 0, 20, 21, 0, 22]
    assert first.token_columns["rollout_logprobs"].tolist() == [0, 0, 0, 1, 0, 2]
    assert second.tokens.tolist() == [1, 9, 7, 8]
    assert second.token_columns["old_logprobs"].tolist() == [0, 0, 13, 14]
    other = Trajectory(t.prompt, generations[:1], "", Reward(0.0), {"old_logprobs": np.zeros(2, np.float32)})
    assert len(of_keys(GRPO).compute_advantages([(t, other)])) == 3


@pytest.mark.parametrize("in_batches", [True, False])
def test_conversations_end_where_they_should(tokenizer, environments, in_batches):
    whole, cut = (played([{}] * 4, tokenizer, environments, in_batches, turns=turns) for turns in (8, 2))
    assert all(len(t.generations) == 3 and t.complete and t.outcome == Reward(0.75) for t in whole)
    assert all(len(t.generations) == 2 and not t.complete and t.outcome == Reward(0.5) for t in cut)
    assert [facts(t) for t in whole] == [facts(t) for t in played([{}] * 4, tokenizer, environments, not in_batches)]
    for t in whole:
        (sample,) = samples_of(t)
        assert sample.loss_weights.sum() == t.num_sampled_tokens


def test_a_conversation_ends_when_there_is_no_more_room(tokenizer, environments):
    for length in range(8, 60, 5):
        for t in played([{}] * 3, tokenizer, environments, length=length):
            assert all(len(c.context) + len(c.sampled_ids) <= length for c in t.generations)
            assert isinstance(t.outcome, Reward)
            assert t.complete == (len(t.generations) == 3 and t.outcome.value == 0.75)


def test_an_environment_that_leaves_no_room_for_an_answer_has_no_result(tokenizer, environments):
    (found,) = played([{}], tokenizer, environments, length=3)
    assert isinstance(found.outcome, NoResult)
    assert "leaves no room for a response in data.seq_len (3)" in found.outcome.reason
    assert found.generations == ()
    assert samples_of(found) == []


SAID = {
    "raise": "the database is away",
    "hang": "longer than",
    "stop": "longer than",
    "die": "died",
    "garbage": "not a ptf.rl.environments.protocol.StepResult",
    "nan": "nan",
    "no number": "None",
    "no messages": "messages of a step",
    "no data": "cannot be sent",
    "text": "'1.0'",
    "overflow": "int too large",
    "no beginning": "reset returned [1.0]",
}


@pytest.mark.long
@pytest.mark.parametrize("fault", SAID)
def test_a_fault_is_named_and_the_others_play_on_as_if_nothing_had_been(tokenizer, environments, fault, capsys):
    rows = [{}, {}, {"at": 2, "fault": fault}, {}, {}, {}]
    undisturbed = [facts(t) for t in played([{}] * 6, tokenizer, environments)]
    found = played(rows, tokenizer, environments)
    assert isinstance(found[2].outcome, NoResult)
    assert SAID[fault] in found[2].outcome.reason
    assert [facts(t) for i, t in enumerate(found) if i != 2] == [f for i, f in enumerate(undisturbed) if i != 2]
    assert environments.retried == 1
    assert SAID[fault] in capsys.readouterr().out, "it is said when it happens"


def test_after_a_fork_no_answer_is_taken_for_anothers(tokenizer, environments, capsys):
    """A thread that forks has no event loop in the other process, which therefore answers nothing."""
    found = played([{"at": 3, "fault": "fork"}, {}], tokenizer, environments)
    for _ in range(5):
        found += played([{}, {}], tokenizer, environments)  # one in each process
    assert all(t.outcome == Reward(0.75) for t in found)
    assert capsys.readouterr().out == ""


@pytest.mark.long
@pytest.mark.parametrize("fault", ["raise", "die"])
def test_a_fault_that_passes_leaves_no_trace_but_a_count(tokenizer, environments, tmp_path, fault):
    undisturbed = [facts(t) for t in played([{}] * 3, tokenizer, environments)]
    found = played([{}, {"at": 2, "fault": fault, "once": str(tmp_path / "seen")}, {}], tokenizer, environments)
    assert [facts(t) for t in found] == undisturbed
    assert environments.retried == 1


LOGPROBS = {
    "words": ["a", "b"],
    "not a number": [-1, np.nan],
    "endless": [-1, -np.inf],
    "beyond what float32 holds": [-1, -1e308],
    "likelier than sure": [-1, 1e308],
    "too few": [-1.0],
}
SAMPLED = {
    "texts": ["a", "b"],
    "too many": np.arange(9),
    "none": np.zeros(0, np.int32),
    "beyond the vocabulary": [3, 10**6],
    "fractions": [1.5, 2.5],
}
GARBAGE = {
    "no generation": None,
    "another type": [1, 2],
    **{name: {"logprobs": np.array(x)} for name, x in LOGPROBS.items()},
    **{name: {"sampled_ids": np.array(x)} for name, x in SAMPLED.items()},
    "other weights": {"versions": np.zeros(2, np.int32)},
    "other context": {"context": np.array([8], np.int32)},
}


@pytest.mark.parametrize("what", GARBAGE)
def test_an_answer_of_the_engine_that_is_none_is_named(tokenizer, what):
    """As an error of its own kind, so that a cluster replaces the engine; of a right answer there is none."""

    class Broken(Scripted):
        async def generate(self, request):
            right = {
                "context": request.context,
                "sampled_ids": np.array([3, 4], np.int32),
                "logprobs": np.full(2, -1.0, np.float32),
                "versions": np.full(2, 3),
            }
            change = GARBAGE.get(self.what, {})
            return Generation(**{**right, **change}, finished=False) if isinstance(change, dict) else change

    (episode,) = episodes([{}], tokenizer, None, vocabulary=20)
    engine = Broken(tokenizer)
    engine.what = ""
    (found,) = asyncio.run(run_all(engine, [episode]))
    assert found.generations[0].sampled_ids.tolist() == [3, 4]
    engine.what = what
    (episode,) = episodes([{}], tokenizer, None, vocabulary=20)
    with pytest.raises(EngineFault, match="the rollout engine scripted answered with"):
        asyncio.run(run_all(engine, [episode]))


def test_an_environment_that_goes_on_without_a_message_is_named(tokenizer, environments):
    (found,) = played([{"at": 1, "fault": "silent"}], tokenizer, environments)
    assert isinstance(found.outcome, NoResult)
    assert "no message" in found.outcome.reason


def test_one_that_cannot_be_played_again_is_not_taken_for_the_same(tokenizer):
    moody = Environments(Plugin(use="tests.rl.environments:Moody"), processes=1, timeout_s=1.5)
    with contextlib.closing(moody) as environments:
        steady, gone = played([{}, {"at": 2, "fault": "die"}], tokenizer, environments, in_batches=True)
        assert isinstance(gone.outcome, NoResult)
        assert isinstance(steady.outcome, Reward | NoResult)
        assert "did not give the same replies as before" in gone.outcome.reason


@pytest.mark.parametrize("replayed", [True, False])
def test_an_episode_that_is_cancelled_ends_its_environment(replayed):
    """Also while it waits for the question that follows a replay: the environment exists again."""

    class Process:
        """Loses its environment before the second turn if it is to be played again, and answers the third never."""

        def __init__(self):
            self.asked, self.lost = [], replayed

        def ask(self, question, *, alone=False):
            self.asked.append(question[0])
            reply = Future()
            if question[0] == "reset":
                reply.set_result(([{"role": "user", "content": "?"}], None))
            elif question[2:] == ("second",) and self.lost:
                self.lost = False
                reply.set_result(Interrupted(suspect=False))
            elif question[2:] == ("first",):
                reply.set_result(StepResult([{"role": "user", "content": "!"}]))
            return reply

    async def run():
        state, _, _ = await environments.reset({}, 0)
        await environments.step(state, "first")
        waiting = asyncio.create_task(environments.step(state, "second"))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await environments.end(state)

    with contextlib.closing(Environments(Plugin(use="tests.rl.environments:Echo"))) as environments:
        started, environments.processes = environments.processes, [process := Process()]
        asyncio.run(run())
        environments.processes = started
    again = ["step", "reset", "step"] if replayed else []
    assert process.asked == ["reset", "step", *again, "step", "end"]


def test_episodes_that_end_together_come_together_and_none_is_lost(tokenizer):
    """All end in one turn of the loop; one that ends later comes by itself."""

    class Late(Scripted):
        async def generate(self, request):
            if request.seed == 301:
                await asyncio.sleep(0.05)
            return await super().generate(request)

    async def run():
        return [ended async for ended in run_episodes(Late(tokenizer), episodes([{}] * 6, tokenizer, None))]

    together, late = asyncio.run(run())
    assert sorted(i for i, _ in together) == [0, 1, 2, 4, 5]
    assert [i for i, _ in late] == [3]
    assert all(t.prompt.index == i for i, t in [*together, *late])


def test_episodes_that_ended_before_the_engine_failed_are_not_lost(tokenizer):
    class Failing(Scripted):
        async def generate(self, request):
            if request.seed == 301:
                raise RuntimeError("out of order")
            return await super().generate(request)

    found = []

    async def run():
        async for ended in run_episodes(Failing(tokenizer), episodes([{}] * 6, tokenizer, None)):
            found.extend(i for i, _ in ended)

    with pytest.raises(RuntimeError, match="out of order"):
        asyncio.run(run())
    assert sorted(found) == [0, 1, 2, 4, 5]


def test_no_conversation_waits_for_anothers_turn(tokenizer, environments):
    """While one environment hangs, the others come to their ends."""
    engine = Scripted(tokenizer)
    made = episodes([{"at": 1, "fault": "hang"}, {}], tokenizer, environments)  # in two processes
    ends = {}

    async def run():
        async def timed(episode):
            await run_all(engine, [episode])
            ends[episode.prompt.index] = time.monotonic()

        await asyncio.gather(*map(timed, made))

    asyncio.run(run())
    assert ends[1] + 1.0 < ends[0]


def test_a_failed_episode_enters_no_advantage(tokenizer, environments):
    found = played([{}, {"at": 1, "fault": "raise"}, {}], tokenizer, environments)
    marked = tuple(Trajectory(t.prompt, t.generations, t.text, t.outcome, {"old_logprobs": t.logprobs}) for t in found)
    assert len(of_keys(GRPO).compute_advantages([marked])) == 2


def test_an_environment_that_does_not_exist_is_refused_at_once():
    with pytest.raises(ConfigError, match="Echo"):
        Environments(Plugin(use="tests.rl.environments:Ecco"))


@pytest.mark.parametrize("name", ["WithoutMethods", "made_without_methods"])
def test_an_environment_without_its_methods_is_told_their_names(tokenizer, name, capsys):
    """Before anything is started if it is a class; what a function makes is known when an episode begins."""
    what = Plugin(use=f"tests.rl.environments:{name}")
    rollout = RolloutConfig(environment={"use": what.use})
    told = "has no method `reset` and no method `step`"
    if name == "WithoutMethods":
        with pytest.raises(UserError, match=f"rollout.environment: {what.use} {told}"):
            raise_if_wrong_environments(rollout)
    else:
        raise_if_wrong_environments(rollout)
    echo = {"use": "tests.rl.environments:Echo"}
    raise_if_wrong_environments(RolloutConfig(environment=echo))  # the control
    with contextlib.closing(Environments(what)) as environments:
        (found,) = played([{}], tokenizer, environments)
    assert isinstance(found.outcome, NoResult)
    assert told in found.outcome.reason
    assert told in capsys.readouterr().out


def test_the_environment_of_the_documentation_plays(tokenizer, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "rl.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    (shop,) = [block for block in blocks if "class Shop" in block]
    (tmp_path / "shop_of_the_page.py").write_text(shop)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with contextlib.closing(Environments(Plugin(use="shop_of_the_page:Shop"))) as environments:
        (found,) = played([{"messages": [{"role": "user", "content": "1"}], "answer": "2"}], tokenizer, environments)
    assert found.complete
    assert found.outcome in (Reward(0.0), Reward(1.0))
