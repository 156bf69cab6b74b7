"""Episodes that the user's own code plays: it asks the policy as often as it likes."""

import asyncio

import numpy as np
import pytest
import torch
import yaml

from ptf.compute.tracking import read_metrics
from ptf.config import ConfigError, loads
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import NoResult, Prompt, Reward, group_into_documents, samples_of
from ptf.rl.engines.native import NativeEngine
from ptf.rl.engines.protocol import Sampling
from ptf.rl.episodes import Episode, run_all
from ptf.rl.policy.policy import Limits
from tests.data.templates import templated
from tests.rl.endpoint.served import Scripted, user
from tests.rl.test_controller import raw as raw  # a fixture
from tests.tiny import checkpoint
from tests.train.test_loop import train


@pytest.fixture
def tokenizer() -> Tokenizer:
    return templated("plain")


async def best_of(prompt, policy, *, n=3):
    """Ask n times at once, and then once more about the last of the answers."""
    calls = await asyncio.gather(*(policy.generate([user("guess")]) for _ in range(n)))
    chosen = max(calls, key=lambda call: call.text)
    final = await policy.generate([user("guess"), {"role": "assistant", "content": chosen.text}, user("sure?")])
    return policy.trajectory(float(len(final.text)), calls=[*calls, final], counts={"asked": len(policy.calls)})


async def twice(prompt, policy, *, n=2):
    """Continue the prompt's tokens `n` times."""
    tokens = prompt.tokens
    for _ in range(n):
        call = await policy.generate(tokens)
        tokens = np.concatenate([tokens, call.generation.sampled_ids])
    return policy.trajectory(len(set(call.text)) / 4, counts={"asked": len(policy.calls)})


async def judged(prompt, policy):
    """Leave the reward to rollout.reward, and train the first answer only."""
    first = await policy.generate([user("a")])
    await policy.generate([user("b")])
    return policy.trajectory(text=f"said {first.text}", calls=[first])


async def wrong(prompt, policy, *, how="raise"):
    await policy.generate([user("a")], max_tokens=1)
    if how == "raise":
        raise ValueError("no such move")
    if how == "hang":
        await asyncio.sleep(60)
    return {"number": 1.0, "nan": policy.trajectory(float("nan")), "nothing": None}[how]


def episodes(play, tokenizer, n=1, timeout_s=None, length=2000):
    limits = Limits(Sampling(20, 1.0, tokenizer.stop_ids), length)
    return [
        Episode(prompt, limits, tokenizer, lambda k, i=i: 50 * i + k + 1, play, timeout_s)
        for i, prompt in enumerate(Prompt(np.array([9], np.int32), {}, "a", i) for i in range(n))
    ]


def test_a_play_asks_at_once_and_goes_on_from_the_answer_it_chose(tokenizer):
    (t,) = asyncio.run(run_all(Scripted(tokenizer, lambda i: f"{i}"), episodes(best_of, tokenizer)))
    assert t.outcome == Reward(1.0)
    assert group_into_documents(t.generations) == [[0], [1], [2, 3]], "the final answer continues the third guess"
    assert sum(int((s.loss_weights != 0).sum()) for s in samples_of(t)) == t.num_sampled_tokens
    assert t.counts == {"asked": 4}


def test_a_play_may_leave_the_reward_and_train_a_part(tokenizer):
    (t,) = asyncio.run(run_all(Scripted(tokenizer, lambda i: f"{i}"), episodes(judged, tokenizer)))
    assert (t.outcome, t.text, len(t.generations)) == (None, "said 0", 1)


REASONS = {
    "raise": "no such move",
    "hang": "did not end within 0.3 s (rollout.episode_timeout_s)",
    "number": "the rollout function returned a float, not a Trajectory",
    "nothing": "the rollout function returned a NoneType",
    "nan": "the reward of the episode is nan",
}


@pytest.mark.parametrize("how", REASONS)
def test_a_play_that_fails_has_no_result_and_keeps_no_other_from_its_own(tokenizer, how):
    async def mixed(prompt, policy):
        return await (wrong(prompt, policy, how=how) if prompt.index == 1 else best_of(prompt, policy))

    found = asyncio.run(run_all(Scripted(tokenizer), episodes(mixed, tokenizer, 3, timeout_s=0.3)))
    assert isinstance(found[1].outcome, NoResult)
    assert REASONS[how] in found[1].outcome.reason
    assert isinstance(found[0].outcome, Reward)
    assert isinstance(found[2].outcome, Reward)


def test_a_context_without_room_is_told_to_the_play(tokenizer):
    async def long(prompt, policy):
        await policy.generate([user("a " * 500)])

    (t,) = asyncio.run(run_all(Scripted(tokenizer), episodes(long, tokenizer, length=300)))
    assert "leaves no room for a response in data.seq_len (300)" in t.outcome.reason


def test_a_text_of_megabytes_is_refused_before_it_is_encoded(tokenizer, monkeypatch):
    async def long(prompt, policy):
        monkeypatch.setattr(type(tokenizer), "encode_all", None)  # would raise
        await policy.generate([user("a" * 10_000_000)])

    (t,) = asyncio.run(run_all(Scripted(tokenizer), episodes(long, tokenizer, length=300)))
    assert "new characters, which data.seq_len has no room for" in t.outcome.reason


def test_batches_of_plays_do_not_depend_on_their_pace(tmp_path, tokenizer):
    """Fixed batches: the same ids and log-probs to the bit, however long the plays think between two requests."""
    directory = checkpoint(tmp_path / "m", vocab_size=tokenizer.vocab_size)

    def played(pauses):
        async def play(prompt, policy):
            tokens = list(range(5, 12 + prompt.index))
            for turn in range(2 + prompt.index % 3):
                await asyncio.sleep(pauses[(prompt.index + turn) % len(pauses)])
                calls = await asyncio.gather(*(policy.generate(tokens) for _ in range(1 + prompt.index % 2)))
                tokens = [*calls[-1].context.tokens, *calls[-1].generation.sampled_ids]
            return policy.trajectory(1.0)

        engine = NativeEngine(str(directory), device=torch.device("cpu"), dtype=torch.float32, version=3)
        found = asyncio.run(run_all(engine, episodes(play, tokenizer, 5)))
        return [(g.sampled_ids.tolist(), g.logprobs.tolist()) for t in found for g in t.generations]

    assert played([0.0]) == played([0.0, 0.02, 0.005]) == played([0.01])


@pytest.mark.parametrize(
    "others", [{"environment": {"use": "tests.rl.environments:Echo"}}, {"harness": {"command": ["x"]}}]
)
def test_a_job_has_one_kind_of_play(raw, others):
    raw["rollout"] |= {"play": {"use": "tests.rl.test_play:best_of"}} | others
    raw["rollout"].pop("reward", None)
    with pytest.raises(ConfigError, match="give one, not both"):
        loads(yaml.safe_dump(raw))


def test_a_run_trains_on_plays_and_shows_what_they_count(raw):
    raw["rollout"] |= {"play": {"use": "tests.rl.test_play:twice", "args": {"n": 3}}}
    raw["rollout"].pop("reward", None)
    raw["train"]["steps"] = 2
    raw["evaluate"] = {}
    rows = read_metrics(train(raw) / "metrics.jsonl")
    assert [(row["turns"], row["episode/asked"]) for row in rows] == [(3.0, 3.0)] * 2


async def changes_all_it_is_given(prompt, policy):
    """Play a turn, and change the row and the tokens, and afterwards the messages that the policy was asked with."""
    messages, tools = prompt.row["messages"], [{"function": {"name": "add"}}]
    messages.append(user("more"))
    prompt.tokens[:] = 0
    policy.prompt.row["seen"] = len(messages)
    call = await policy.generate(messages)
    context = [dict(message) for message in call.context.messages]
    messages[0]["content"] = tools[0]["function"]["name"] = "other"
    assert [dict(message) for message in call.context.messages] == context
    return policy.trajectory(float(len(messages)))


def test_what_a_play_changes_no_other_episode_and_no_held_out_row_sees(tokenizer):
    prompt = Prompt(np.array([9], np.int32), {"messages": [user("a")]}, "a", 0)
    limits = Limits(Sampling(20, 1.0, tokenizer.stop_ids), 2000)
    group = [
        Episode(prompt, limits, tokenizer, lambda k, i=i: 50 * i + k + 1, changes_all_it_is_given) for i in range(4)
    ]
    played = asyncio.run(run_all(Scripted(tokenizer), group))
    assert [t.outcome for t in played] == [Reward(2.0)] * 4
    assert prompt.row == {"messages": [user("a")]}
    assert prompt.tokens.tolist() == [9]
    assert all(t.prompt is prompt for t in played)
