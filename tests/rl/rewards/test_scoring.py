"""What a reward is called with: one response, a group, or a batch, with the episodes if it asks for them."""

import contextlib
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptf.config import Plugin
from ptf.config.reward_signature import RewardSignature
from ptf.data.trajectory import Generation, Group, NoResult, Prompt, Reward, Trajectory
from ptf.errors import UserError
from ptf.rl.rewards import batched, scores_groups
from ptf.rl.rewards.calls import Response, call_arguments, checked_rewards
from ptf.rl.rewards.declarations import COROUTINES, max_concurrent_calls
from ptf.rl.rewards.scoring import Rewards, RewardWorkers, responses_left_to, score_groups
from ptf.rl.rewards.weighted_sum import WeightedSum
from ptf.rl.worker_messages import Fault
from tests.rl.rewards.shapes import Sizes, lengths

HERE = "tests.rl.rewards.shapes"


def scored_by(name: str, *, args: dict[str, Any] | None = None, **options: Any) -> contextlib.closing[RewardWorkers]:
    plugin = Plugin(use=name if ":" in name else f"{HERE}:{name}", args=args or {})
    return contextlib.closing(RewardWorkers(plugin, **{"timeout_s": 20.0, "retries": 0, **options}))


def score_with(workers: RewardWorkers, groups: Any) -> Any:
    """The groups with the outcomes of one reward of all sources."""
    return score_groups(Rewards({"": (workers, 1.0)}), groups)


def group(prompt: str, texts: Sequence[str], **row: Any) -> Group:
    """Answers to one prompt, one token for each character; those with "…" at the end were cut off."""
    made = Prompt(np.arange(len(prompt), dtype=np.int32), {"prompt": prompt, **row}, "a", 0)

    def response(text: str) -> Trajectory:
        n = len(text)
        ids, numbers = np.arange(n, dtype=np.int32), np.zeros(n, np.int32)
        generation = Generation(made.tokens, ids, np.full(n, -1, np.float32), numbers, not text.endswith("…"))
        return Trajectory(made, (generation,), text, complete=generation.finished)

    return tuple(map(response, texts))


def values(groups: Sequence[Group]) -> list[list[Any]]:
    return [[t.outcome.value if isinstance(t.outcome, Reward) else t.outcome for t in group] for group in groups]


def test_a_reward_that_asks_for_the_episode_gets_it() -> None:
    groups = [group("1+1?", ["two", "tw…"]), group("?", [""])]
    with scored_by("sampled") as rewards:
        assert values(score_with(rewards, groups)) == [[3.04, 3.04], [0.01]]
    with scored_by("cut_off") as rewards:
        assert values(score_with(rewards, groups)) == [[0.0, 1.0], [0.0]]


def test_a_reward_of_groups_is_called_once_with_all_responses_to_a_prompt() -> None:
    groups = [group("1+1?", ["a", "bb", "ccc", "bb"]), group("?", ["a"]), group("1+1?", ["aa", "b"])]
    with scored_by("rank", args={"scale": 4.0}) as rewards:
        assert values(score_with(rewards, groups)) == [[0.0, 1.0, 3.0, 1.0], [0.0], [2.0, 0.0]]
        assert rewards.score([({"prompt": "p"}, "a"), ({"prompt": "p"}, "bb")]) == [Reward(0.0)] * 2, "groups of one"
    with scored_by("of_group") as rewards:
        given_groups = [group("1+1?", ["a…", "b", "c…"], number=10), group("1+1?", ["a"], number=20)]
        assert values(score_with(rewards, given_groups)) == [[12.0] * 3, [20.0]]


def test_a_fault_in_a_group_takes_the_result_from_all_of_it_and_from_no_other() -> None:
    groups = [group("1+1?", ["a", "bb"]), group("?", ["raise", "b"]), group("?", ["die", "b"]), group("?", ["hang"])]
    with scored_by("rank", timeout_s=0.5, retries=1) as rewards:
        found = values(score_with(rewards, groups))
        assert rewards.take_retries() == 5, "responses that were scored once more"
    assert found[0] == [0.0, 0.5]
    assert found[1] == [NoResult("KeyError: 'gold'")] * 2
    assert found[2] == [NoResult("the reward's process died")] * 2
    assert found[3] == [NoResult("took longer than 0.5 s")]


def test_a_list_of_another_length_is_no_result_of_a_group() -> None:
    names = ["short", "long", "number", "text", "dictionary", "nan", "none", "tuple", "numbers"]
    with scored_by("malformed") as rewards:
        found = dict(zip(names, values(score_with(rewards, [group(n, ["a", "b", "c"]) for n in names])), strict=True))
    assert found.pop("tuple") == found.pop("numbers") == [1.0] * 3
    assert found["short"] == [NoResult("the reward returned 2 numbers for 3 responses")] * 3
    assert found["long"] == [NoResult("the reward returned 4 numbers for 3 responses")] * 3
    assert found["number"] == [NoResult("the reward returned a float '1.0', not a list of 3 numbers")] * 3
    assert all(len(set(outcomes)) == 1 and isinstance(outcomes[0], NoResult) for outcomes in found.values())


def test_a_reward_of_batches_gets_as_many_responses_as_it_takes_whatever_their_prompts() -> None:
    groups = [group("1", ["a", "b", "c"]), group("2", ["d"]), group("3", ["e", "f"])]
    with scored_by("Sizes", args={"add": 0.5}) as rewards:
        assert values(score_with(rewards, groups)) == [[4.5] * 3, [4.5], [2.5] * 2]
        assert rewards.score([({}, "x")] * 5) == [*[Reward(4.5)] * 4, Reward(1.5)]
    with scored_by("lengths") as rewards:
        texts = [["a", "bb", "ccc"], ["dddd"], ["", "ff"]]
        found = values(score_with(rewards, [group("1", of) for of in texts]))
        assert found == [[len(text) for text in of] for of in texts]


def test_of_a_batch_that_fails_the_response_at_fault_alone_has_no_result() -> None:
    texts = ["a", "raise", "b", "c", "d", "nan", "e", "f", "die", "g"]
    with scored_by("Sizes", retries=1) as rewards:
        outcomes = rewards.score([({}, text) for text in texts])
        assert rewards.take_retries() == 4 + 1 + 2, "a whole batch, the response without a number, a whole batch"
    found = dict(zip(texts, outcomes, strict=True))
    assert found.pop("raise") == NoResult("KeyError: 'gold'")
    assert "nan" in found.pop("nan").reason  # type: ignore[union-attr]
    assert found.pop("die") == NoResult("the reward's process died")
    assert [found[text] for text in "abc"] == [Reward(1.0)] * 3, "each in a batch of its own"
    assert [found[text] for text in "def"] == [Reward(4.0)] * 3


def test_batches_of_a_plain_reward_do_not_overlap_and_a_declaration_is_made_once() -> None:
    assert (Sizes.max_concurrent_calls, max_concurrent_calls(lengths)) == (1, COROUTINES)  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="declared twice"):
        scores_groups(lengths)
    with pytest.raises(ValueError, match="at least one response"):
        batched(max_size=0)


def test_an_object_is_constructed_once_in_a_process() -> None:
    with scored_by("Counts", args={"start": 10}) as rewards:
        assert [rewards.score([({}, "")]) for _ in range(3)] == [[Reward(11.0)], [Reward(12.0)], [Reward(13.0)]]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("rank", {"scael": 1}, None),  # `ptf check` names it, and every call fails
        ("sampled", {"episode": 1}, "`episode` is given by ptf"),
        ("Counts", {}, "missing a required argument: 'start'"),
        ("fault", {}, "too many positional arguments"),
    ],
)
def test_what_is_no_reward_is_refused_before_any_response(name: str, args: dict[str, Any], message: str | None) -> None:
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        RewardWorkers(Plugin(use=f"{HERE}:{name}", args=args)).close()


RESPONSES = st.lists(st.text(max_size=3).map(lambda text: Response({"prompt": "p"}, text)), min_size=1, max_size=6)


@given(RESPONSES, st.booleans())
def test_arguments_are_those_of_the_responses_in_order(responses: list[Response], sees: bool) -> None:
    row, texts = responses[0].row, [response.text for response in responses]
    for scores, positional, keyword in (
        ("group", [row, texts], "episodes"),
        ("batch", [[(row, text) for text in texts]], "episodes"),
    ):
        found = call_arguments(RewardSignature(scores, sees, 6), responses)
        assert found == (positional, {keyword: [None] * len(texts)} if sees else {})
    assert call_arguments(RewardSignature("response", sees), responses[:1]) == (
        [row, texts[0]],
        {"episode": None} if sees else {},
    )


@given(st.lists(st.floats() | st.none() | st.text(max_size=2), max_size=5), st.integers(1, 5))
def test_a_result_is_a_number_or_a_fault_for_each_response(found: list[Any], count: int) -> None:
    of_batch, of_group = (checked_rewards(RewardSignature(s, False, 5), found, count) for s in ("batch", "group"))
    if len(found) != count:
        assert isinstance(of_batch, Fault)
        assert isinstance(of_group, Fault)
        return
    assert isinstance(of_batch, list)
    assert [isinstance(one, float) for one in of_batch] == [isinstance(x, float) and abs(x) <= 1e12 for x in found]
    assert of_group == of_batch if all(isinstance(one, float) for one in of_batch) else isinstance(of_group, Fault)


@pytest.mark.parametrize(("name", "asks"), [("rank", False), ("has_episode", False), ("cut_off", True)])
def test_the_row_of_a_group_is_sent_once_and_the_episode_only_if_it_is_asked_for(name: str, asks: bool) -> None:
    row = {"prompt": "p", "long": "x" * 10_000}
    one, eight = (len(pickle.dumps(tuple(Response(row, "t") for _ in range(n)))) for n in (1, 8))
    assert eight < one + 1000, "a long row does not grow the question with the size of the group"
    with scored_by(name) as rewards:
        sent = responses_left_to(rewards, group("p", ["a", "b", "c"]))
    assert len({id(response.row) for response in sent}) == 1
    assert [response.episode is not None for response in sent] == [asks] * 3


def test_what_a_reward_changes_no_other_response_sees() -> None:
    with scored_by("changes_rows") as rewards:
        assert values(score_with(rewards, [group("p", ["a", "b", "c"], seen=[])])) == [[0.0] * 3]
    parts = [{"use": f"{HERE}:counts_its_calls", "args": {"seen": []}}] * 2
    assert WeightedSum(parts=parts)({"seen": []}, "a") == 2.0
    assert parts[0]["args"] == {"seen": []}


@pytest.mark.parametrize("kind", ["dict", "list", "NoneType", "coroutine"])
def test_what_is_no_number_is_named_with_the_forms_that_are_and_the_row(kind: str, capsys: Any) -> None:
    (t,) = group("p", [kind])
    placed = replace(t, prompt=replace(t.prompt, where="rows.jsonl:3"))
    with scored_by("returned") as rewards:
        ((outcome,),) = values(score_with(rewards, [(placed,)]))
    assert outcome.reason.startswith(f"the reward returned a {kind}, not a number: a reward is an int, a float")
    assert "failed for a response to rows.jsonl:3: the reward returned" in capsys.readouterr().out
