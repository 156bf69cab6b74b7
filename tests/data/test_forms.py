"""What people's data sets are read as: benchmarks/results/formats.md."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import formats
from ptf.data.document import PackUnit
from ptf.data.encode import encode_document
from ptf.data.kinds import shaped
from ptf.data.partitions import opened, pack_units_once
from ptf.data.prompts import prompts_once
from ptf.data.quarantine import BadRow
from ptf.data.sources.rows import SourceSpec
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Prompt
from ptf.errors import UserError
from tests.data.dataset_forms import ANSWER, ASK, FORMS, LAST, MORE, WORSE, Form
from tests.data.read_form import RECIPES, SUFFIXES, not_read, plainly, read, trained, write


def same(ours: Any, others: Any) -> bool:
    """Ids, weights and token_columns."""
    if isinstance(ours, Prompt):
        return np.array_equal(ours.tokens, others.tokens) and ours.weight == others.weight
    return len(ours) == len(others) and all(
        np.array_equal(a.tokens, b.tokens)
        and np.array_equal(a.loss_weights, b.loss_weights)
        and a.token_columns.keys() == b.token_columns.keys()
        and all(np.array_equal(a.token_columns[k], b.token_columns[k]) for k in a.token_columns)
        for a, b in zip(ours, others, strict=True)
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "form", FORMS, ids=lambda form: f"{form.sets.split(',')[0]}-{form.recipe}-{'refused' if form.refused else 'read'}"
)
def test_a_form_is_read_right_or_refused_with_the_way_out(
    form: Form, suffix: str, printable: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / f"rows.{suffix}"
    write([form.row], path)
    if form.refused:
        with pytest.raises(UserError, match=form.refused) as refusal:
            read(form, path, printable)
        assert f"rows.{suffix}:1 (source set): " in str(refusal.value)
        return
    (found,), (plain,) = read(form, path, printable), plainly(form, printable)
    assert same(found, plain)
    if form.unread or form.recipe == "sft":
        assert not_read(form, path) == form.unread
    if isinstance(found, Prompt):
        given = {name: form.row[name] for name in form.row if name not in (*form.columns.values(), "prompt")}
        assert found.row.items() >= given.items(), "the reward sees every column"
    else:
        assert trained([found], printable) == form.trained
        assert {float(w) for s in found for w in s.loss_weights} - {0.0} == set(form.weights)


def test_forms_that_differ_are_told_apart(printable: Tokenizer) -> None:
    """The comparison above can fail."""
    one, other = ({"messages": [ASK, answer]} for answer in (ANSWER, LAST))
    assert not same(*(RECIPES["sft"].encode(row, printable, "")[0] for row in (one, other)))
    heavier = {"messages": [ASK, ANSWER | {"weight": 2}]}
    assert not same(*(RECIPES["sft"].encode(row, printable, "")[0] for row in (one, heavier)))


HISTORIES = (
    {"prompt": "1+1?"},
    {"prompt": [ASK]},
    {"messages": [ASK]},
    {"prompt": "1+1?", "messages": [ASK, ANSWER]},
    {},
)
PLAIN = {"prompt": "1+1?", "chosen": "2.", "rejected": "5.", "completion": "2.", "reward": 0.5}


@pytest.mark.parametrize("beside", HISTORIES, ids=str)
@pytest.mark.parametrize("led", [False, True])
def test_an_answer_in_which_the_user_speaks_is_the_conversation(
    printable: Tokenizer, beside: dict[str, Any], led: bool
) -> None:
    before = [{"role": "system", "content": "Be brief."}, ASK] if led else [ASK]
    wanted = PLAIN | {"prompt": before}
    row = {**beside, "chosen": [*before, ANSWER], "rejected": [*before, WORSE]}
    for recipe in ("dpo", "rm"):
        assert same(*(RECIPES[recipe].encode(r, printable, "")[0] for r in (row, wanted)))
    if "prompt" in beside:
        answer = {"prompt": beside["prompt"], "completion": [*before, ANSWER], "reward": 0.5}
        for recipe in ("sft", "rm regression"):
            scored = {"prompt": before, "completion": "2.", "reward": 0.5}
            assert same(*(RECIPES[recipe].encode(r, printable, "")[0] for r in (answer, scored)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "1+2?", "chosen": [ASK, ANSWER], "rejected": [ASK, WORSE]},
            r"`chosen` is a whole conversation, .*\{prompt: null\}",
        ),
        (
            {"prompt": [ASK, ANSWER], "chosen": [ASK, ANSWER], "rejected": [ASK, WORSE]},
            "`rejected` is a whole conversation, but it does not begin",
        ),
        (
            {"messages": [MORE], "prompt": "1+1?", "chosen": "2.", "rejected": "5."},
            r"`messages` do not begin with `prompt`.*\{messages: null\}",
        ),
        (
            {"prompt": "1+1?", "chosen": [ASK, ANSWER, MORE, LAST], "rejected": [ASK, WORSE, MORE, LAST]},
            "answer different prompts",
        ),
        ({"prompt": "1+1?", "chosen": [ASK, ANSWER, MORE, LAST], "rejected": "5."}, "answer different prompts"),
        (
            {"prompt": "1+1?", "chosen": [ANSWER | {"weight": 0.5}], "rejected": "5."},
            "a pair counts as a whole: give the row a `weight`",
        ),
    ],
)
def test_histories_that_differ_are_refused(printable: Tokenizer, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RECIPES["dpo"].encode(shaped(row, {}), printable, "")


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"prompt": "1+1?", "messages": [ASK, ANSWER, MORE, LAST]}, [ASK]),
        ({"prompt": "1+1?", "messages": [ASK, ANSWER, MORE]}, [ASK, ANSWER, MORE]),
        ({"prompt": "\n\nHuman: 1+1?\n\nAssistant:"}, [ASK]),
        ({"system": "Be brief.", "prompt": "1+1?"}, [{"role": "system", "content": "Be brief."}, ASK]),
        (
            {"system": "Be brief.", "prompt": "1+1?", "messages": [ASK, ANSWER]},
            [{"role": "system", "content": "Be brief."}, ASK],
        ),
        (
            {"system": "Be brief.", "prompt": "1+1?", "messages": [ASK]},
            [{"role": "system", "content": "Be brief."}, ASK],
        ),
        ({"instruction": "Add.", "input": "1 1", "output": "2"}, [{"role": "user", "content": "Add.\n\n1 1"}]),
    ],
)
def test_a_prompt_is_what_comes_before_the_answer(
    printable: Tokenizer, tmp_path: Path, row: dict[str, Any], asked: list[Any]
) -> None:
    write([row], tmp_path / "a.jsonl")
    (prompt,) = prompts_once(SourceSpec(str(tmp_path / "a.jsonl")), "a", printable)
    assert prompt.tokens.tolist() == printable.render(asked, True)
    assert prompt.row.keys() >= row.keys(), "the reward sees what the row said"


def test_a_prompts_weight_is_its_rows(printable: Tokenizer, tmp_path: Path) -> None:
    write([{"prompt": "1", "weight": 0.5}, {"prompt": "1"}, {"prompt": "1", "weight": "heavy"}], tmp_path / "a.jsonl")
    prompts = prompts_once(SourceSpec(str(tmp_path / "a.jsonl")), "a", printable)
    assert [next(prompts).weight, next(prompts).weight] == [0.5, 1.0]
    with pytest.raises(
        UserError, match=r"a\.jsonl:3 .* `weight` must be a number above 0, not 'heavy'; .*\{weight: null\}"
    ):
        next(prompts)


DEEP = {"city": None, "day": {"from": None, "to": 3, "at": [{"hour": None, "min": 5}, {"hour": 4, "min": None}]}}
STRIPPED = {"day": {"to": 3, "at": [{"min": 5}, {"hour": 4}]}}
SCHEMA = {"name": "f", "parameters": {"x": {"type": "str", "default": None}, "y": {"type": None, "default": 1}}}


@pytest.mark.parametrize("written", ["objects", "JSON"])
def test_nulls_that_parquet_made_are_not_trained(printable: Tokenizer, tmp_path: Path, written: str) -> None:
    """Every object of a column has the keys of all others there. What JSON says is kept,
    in lines and in strings of parquet."""
    put = json.dumps if written == "JSON" else lambda value: value

    def row(arguments: Any, tools: Any) -> dict[str, Any]:
        call = {"function": {"name": "f", "arguments": put(arguments)}}
        return {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": put(tools)}

    said, stripped = (
        row(DEEP, [SCHEMA]),
        row(STRIPPED, [{"name": "f", "parameters": {"x": {"type": "str"}, "y": {"default": 1}}}]),
    )
    for suffix in SUFFIXES:
        write([said, said], tmp_path / f"a.{suffix}")
        specs = {"a": SourceSpec(str(tmp_path / f"a.{suffix}"))}
        units = list(pack_units_once(specs, encode=lambda r, n: RECIPES["sft"].encode(r, printable, n), seq_len=9999))
        wanted = stripped if (suffix, written) == ("parquet", "objects") else said
        assert same(units[1], RECIPES["sft"].encode(shaped(wanted, {}), printable, "")[0]), suffix
        assert ("null" in printable.decode(units[0][0].tokens)) == (wanted is said)


@pytest.mark.parametrize(
    ("weights", "trained_on", "wanted"),
    [((0, 1), "assistant", {1.0}), ((2, 0.5), "assistant", {2.0, 0.5}), ((1, 0.5), "last", {0.5})],
)
def test_a_message_counts_as_its_weight_says(
    printable: Tokenizer, weights: tuple[float, float], trained_on: str, wanted: set[float]
) -> None:
    messages = [ASK | {"weight": 0}, ANSWER | {"weight": weights[0]}, MORE, LAST | {"weight": weights[1]}]
    ((sample,),) = encode_document({"messages": messages}, printable, "", trained_on)
    assert {float(w) for w in sample.loss_weights} - {0.0} == wanted
    ((plain,),) = encode_document({"messages": [ASK, ANSWER, MORE, LAST]}, printable)
    assert sample.tokens.tolist() == plain.tokens.tolist(), "templates do not see it"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [ASK, ANSWER | {"weight": 0}]}, "no turn of the conversation counts: `weight` is 0"),
        (
            {"messages": [ASK | {"weight": 1}, ANSWER]},
            r"message 0 \(user\): only what the assistant says can be trained, yet its `weight` is 1",
        ),
        (
            {"messages": [ASK, ANSWER | {"weight": -1}]},
            r"message 1 \(assistant\): `weight`, which says how much it counts",
        ),
        ({"messages": [ASK, ANSWER], "label": False}, "not to be imitated"),
        ({"messages": [ASK, ANSWER], "label": 0}, "not to be imitated"),
        ({"messages": [ASK, ANSWER], "system": 7}, "`system` must be a string"),
        (
            {"messages": [{"role": "system", "content": "No."}, ASK, ANSWER], "system": "Be brief."},
            r"`system` and the first message .*\{system: null\}",
        ),
        (
            {"messages": [ASK, ANSWER], "system": "Be brief.", "system_prompt": "No."},
            "`system` and `system_prompt` differ",
        ),
        (
            {"messages": [ASK, ANSWER], "conversations": [{"from": "human", "value": "2"}]},
            "`messages` and `conversations` differ",
        ),
        (
            {"messages": [ASK, ANSWER], "images": ["a.png"]},
            r"`images` is part of the row, but ptf trains text only.*\{images: null\}",
        ),
        ({"messages": [ASK | {"images": ["a.png"]}, ANSWER]}, "messages: message 0 has `images`; ptf trains text only"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}, ANSWER]},
            "2 parts of text, and servers differ",
        ),
        (
            {"instruction": "a", "output": "b", "prompt": "c"},
            r"both `instruction` and `prompt` could be what is trained.*\{prompt: null\}",
        ),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, r"earlier turns in `history` are not read"),
    ],
)
def test_columns_that_mean_something_are_refused_by_name(
    printable: Tokenizer, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        RECIPES["sft"].encode(shaped(row, {}), printable, "")


def test_what_csv_writes_as_text_is_what_it_says(printable: Tokenizer, tmp_path: Path) -> None:
    """Every value of CSV is text, an empty one the empty text."""
    messages = json.dumps([ASK, ANSWER]).replace('"', '""')
    (tmp_path / "a.csv").write_text(
        f'messages,weight,label,tools,system\n"{messages}",0.5,True,,Be brief.\n"{messages}",,,,\n'
        f'"{messages}",,false,,\n'
    )
    source = {"a": SourceSpec(str(tmp_path / "a.csv"))}
    aside: list[BadRow] = []
    read = pack_units_once(
        source,
        encode=lambda r, n: RECIPES["sft"].encode(r, printable, n),
        seq_len=999,
        set_aside=lambda bad, counts: aside.append(bad),
    )
    plain = [
        {"messages": [{"role": "system", "content": "Be brief."}, ASK, ANSWER | {"weight": 0.5}]},
        {"messages": [ASK, ANSWER]},
    ]
    assert all(
        same(ours, RECIPES["sft"].encode(row, printable, "")[0]) for ours, row in zip(list(read), plain, strict=True)
    )
    assert [(bad.where[-7:], "not to be imitated" in bad.reason) for bad in aside] == [("a.csv:4", True)]


@pytest.mark.parametrize("recipe", ["sft", "rm regression"])
def test_a_label_of_any_form_is_read_or_refused(printable: Tokenizer, recipe: str) -> None:
    """SFT trains what is good alone; a reward model learns both; what may be either is refused by name."""
    row = {"prompt": "1", "completion": "2"}

    def encoded(label: Any) -> list[PackUnit]:
        kind = "auto" if recipe == "sft" else "scored"
        return RECIPES[recipe].encode(shaped(row | {"label": label}, {}, kind), printable, "")

    for good, bad in [(True, False), (1, 0), ("yes", "no"), (" Good", "BAD "), ("1", "0.0")]:
        assert same(encoded(good)[0], encoded(True)[0])
        if recipe == "sft":
            with pytest.raises(UserError, match="not to be imitated"):
                encoded(bad)
        else:
            assert same(encoded(bad)[0], encoded(False)[0])
            assert not same(encoded(bad)[0], encoded(True)[0])
    for other in ("wrong", -1, 0.5):
        with pytest.raises(UserError, match=r"`label` must say .*\{label: null\} if"):
            encoded(other)
    for topic in (3, "math", ["no"]):
        if recipe == "sft":
            assert same(encoded(topic)[0], encoded(True)[0])
        else:
            with pytest.raises(UserError, match="reward"):
                encoded(topic)


@pytest.mark.parametrize("content", ["", " \n"])
@pytest.mark.parametrize("recipe", ["sft", "dpo", "rm regression"])
def test_a_blank_response_is_refused_unless_it_calls_a_tool(printable: Tokenizer, recipe: str, content: str) -> None:
    def encoded(answer: Any) -> list[PackUnit]:
        row = {"prompt": [ASK], "completion": answer, "reward": 1.0}
        if recipe == "dpo":
            row = {"prompt": [ASK], "chosen": "2", "rejected": answer}
        return RECIPES[recipe].encode(shaped(row, {}, {"rm regression": "scored"}.get(recipe, "auto")), printable, "")

    blank = {"role": "assistant", "content": content}
    for answer in (content, [blank], [blank | {"thinking": "hm"}]):
        with pytest.raises(UserError, match="empty"):
            encoded(answer)
    assert encoded([blank | {"tool_calls": [{"name": "f", "arguments": {}}]}])


def test_columns_are_left_out_by_name(printable: Tokenizer) -> None:
    row = {"messages": [ASK, ANSWER], "images": ["a.png"], "system": "Be brief.", "label": False, "note": 1}
    assert shaped(row, {"images": None, "system": None, "label": None}) == {"messages": [ASK, ANSWER], "note": 1}


def test_the_first_row_says_what_recognised_rows_are(tmp_path: Path) -> None:
    rows = {
        "chat": {"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]},
        "completion": {"instruction": "1", "output": "2"},
    }
    for kind, row in rows.items():
        # the first is bad, whatever it is
        write([{"conversations": [7], "instruction": ""}, row], tmp_path / "a.jsonl")
        assert opened(SourceSpec(str(tmp_path / "a.jsonl")), None)[1].kind == kind


def test_the_page_is_of_this_table() -> None:
    assert formats.PAGE.read_text() == formats.page(), "python benchmarks/formats.py writes it anew"
