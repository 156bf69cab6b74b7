"""Rows as they should not be: each is bad, with a reason and a place, and can be set aside; none is another error."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ptf.config import loads
from ptf.data.document import Document, PackUnit
from ptf.data.encode import Encoder, encode_prompt
from ptf.data.kinds import KINDS
from ptf.data.partitions import pack_units_once
from ptf.data.prompts import prompts_once
from ptf.data.quarantine import BadRow, Quarantine, rows_in
from ptf.data.sources.rows import SourceSpec
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from ptf.recipes.sft.recipe import SFT
from ptf.train.dataloading import held_out_sequences
from tests.data import read_form
from tests.data.dataset_forms import ANSWER, ASK, FORMS, TOOL
from tests.data.read_form import RECIPES, at
from tests.recipes.of_keys import of_keys
from tests.tiny import arithmetic

ASKED, SAID = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}
GOOD = {"messages": [ASKED, SAID]}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "ARGUMENTS"}}]}
NESTED = '{"a":' * 2000 + "1" + "}" * 2000
LESS = '{"a":' * 300 + "1" + "}" * 300  # the parser would take it


def line(**more: Any) -> str:
    return json.dumps(GOOD | more)


BAD = {
    "half of a character": (
        line().replace('"2"', r'"\ud800"'),
        r"half of a character \(a lone surrogate\) in '\\ud800'",
    ),
    "tools that are no JSON": (line(tools="search"), "`tools` is not JSON that can be read"),
    "tools that are strings": (line(tools=["search"]), "`tools`: tool 0 is not JSON that can be read"),
    "tools that are numbers": (line(tools=[1]), "`tools`: tool 0 must be an object, or the JSON of one, not a number"),
    "deep JSON": (line(meta=0).replace(": 0", ": " + NESTED), "more than 200 objects and lists inside each other"),
    "JSON that is less deep": (
        line(meta=0).replace(": 0", ": " + LESS),
        "more than 200 objects and lists inside each other",
    ),
    "deep arguments": (
        line(messages=[ASKED, CALL]).replace("ARGUMENTS", NESTED.replace('"', r"\"")),
        "the arguments of f are not JSON that can be read",
    ),
    "a weight beyond all numbers": (line(weight=10**400), "the row's `weight` must be a number above 0"),
    "a weight that vanishes": (line(weight=1e-60), "the row's `weight` must be a number above 0"),
    "a number of 5,000 digits": (line(n=0).replace(": 0", ": " + "1" * 5000), "not JSON: Exceeds the limit"),
    "reasoning that is an object": (
        line(messages=[ASKED, {**SAID, "thinking": {"a": 1}}]),
        "`thinking` must be a string, not an object",
    ),
    "calls that are a number": (
        line(messages=[ASKED, {**CALL, "tool_calls": 7}]),
        "`tool_calls` must be a list of tool calls, not a number",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_a_rows_fault_is_named_and_set_aside(name: str, printable: Tokenizer, tmp_path: Path) -> None:
    text, reason = BAD[name]
    (tmp_path / "a.jsonl").write_text(
        f"{line()}\n{text}\n{line(tools='')}\n{line(tools=[json.dumps({'name': 'f'})])}\n"
    )
    source = {"set": SourceSpec(str(tmp_path / "a.jsonl"))}

    def encode(row: Any, name: str) -> list[PackUnit]:
        return RECIPES["sft"].encode(row, printable, name)

    with pytest.raises(UserError, match=rf"a\.jsonl:2 \(source set\): .*{reason}"):
        list(pack_units_once(source, encode=encode, seq_len=999))
    aside = Quarantine(tmp_path / "bad.jsonl", 0.1)
    units = list(pack_units_once(source, encode=encode, seq_len=999, set_aside=aside.add))
    assert len(units) == 3, "the others are read, and empty tools are none"
    assert "<tool>" not in printable.decode(units[1][0].tokens)
    assert "<tool>" in printable.decode(units[2][0].tokens)
    (bad,) = rows_in(tmp_path / "bad.jsonl")
    assert bad.where.endswith("a.jsonl:2")


def test_bad_rows_of_validation_sets_are_set_aside(tmp_path: Path) -> None:
    characters = read_form.tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text("\n".join([line(note=1), BAD["tools that are numbers"][0], line(other=1)]))
    job = arithmetic(tmp_path)
    job["data"] |= {"validation": {"held": {"path": str(tmp_path / "a.jsonl")}}, "seq_len": 99}
    with pytest.raises(UserError, match=r"a\.jsonl:2 \(source held\): `tools`"):
        held_out_sequences(loads(yaml.safe_dump(job)), of_keys(SFT), characters)
    job["data"] |= {"max_bad_rows_share": 0.1}
    sets = held_out_sequences(loads(yaml.safe_dump(job)), of_keys(SFT), characters, tmp_path / "quarantine")
    assert len([unit for sequence in sets["held"] for unit in sequence]) == 2
    assert [bad.where[-9:] for bad in rows_in(tmp_path / "quarantine" / "validation-held.jsonl")] == ["a.jsonl:2"]


def test_a_bad_prompt_has_a_place(printable: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1"}\n{"prompt": "\\ud800"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2 \(source set\): half of a character"):
        list(prompts_once(SourceSpec(str(tmp_path / "a.jsonl")), "set", printable))


def test_an_error_of_an_encoder_says_where_it_was_raised_and_others_stop_the_run(tmp_path: Path) -> None:
    aside: list[BadRow] = []

    def broken(error: Exception) -> Encoder:
        def encode(row: Any, name: str) -> list[PackUnit]:
            raise error

        return Encoder(encode, "set", SourceSpec(""), 99, "error", set_aside=lambda bad, counts: aside.append(bad))

    assert broken(KeyError("x"))(at(dict(GOOD))) == []
    assert aside[0].reason.startswith("KeyError: 'x' (test_row_faults.py:")
    for error in (OSError("disk"), MemoryError(), AssertionError(), NotImplementedError()):
        with pytest.raises(type(error)):
            broken(error)(at(dict(GOOD)))


VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    0.5,
    10**400,
    float("nan"),
    float("inf"),
    1e-60,
    "",
    " ",
    "1",
    "{",
    "[]",
    "{}",
    '{"name": "f"}',
    '["f"]',
    "null",
    "user",
    "assistant",
    "gpt",
    "tool",
    "\n\nHuman: a\n\nAssistant: b",
    "\ud800",
    [],
    {},
    [None],
    [[]],
    [{}],
    {"a": None},
    ["1"],
    [{"role": "user", "content": "1"}],
    [{"role": "assistant", "content": "1"}],
    {"role": "assistant", "content": "1"},
    [{"from": "gpt", "value": 1}],
    [{"input": "1", "output": None}],
    [{"type": "text", "text": "1"}],
    [{"function": {"name": "f", "arguments": [1]}}],
    json.loads(LESS),
    ("x", 1),
)
COLUMNS = (
    *sorted({name for names in KINDS.values() for name in names}),
    "tools",
    "system",
    "system_prompt",
    "label",
    "weight",
    "margin",
    "conversations",
    "conversation",
    "instruction",
    "input",
    "output",
    "context",
    "response",
    "query",
    "answers",
    "image",
    "inside",
    "values",
    "history",
)
KEYS = (
    "role",
    "content",
    "from",
    "value",
    "weight",
    "reward",
    "thinking",
    "reasoning_content",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "images",
)
BASES = [
    *(
        (form.row | more, form.recipe, form.kind, form.columns)
        for form in FORMS
        for more in ({}, {"weight": 0.5, "margin": 1.0})
        if not form.refused
    ),
    ({"events": ["ab", ["c", "d"]], "context": 1, "inside": 0.5, "values": {"v": [1, None]}}, "sft", "auto", {}),
    ({"messages": [ASK, ANSWER | {"reward": 0.5}], "tools": [TOOL]}, "rm binary", "scored", {}),
]


def changed(random: Random, value: Any) -> Any:
    """With another value somewhere inside, or another key, or one less."""
    if isinstance(value, dict) and value and random.random() < 0.8:
        key = random.choice(list(value))
        if random.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return value | {random.choice(KEYS) if random.random() < 0.15 else key: changed(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.8:
        i = random.randrange(len(value))
        return [*value[:i], changed(random, value[i]), *value[i + 1 :]]
    return random.choice(VALUES)


@settings(max_examples=250)
@given(seed=st.integers(0, 2**32))
def test_any_row_becomes_units_or_is_bad_for_a_reason_of_ours(printable: Tokenizer, seed: int) -> None:
    """Through the encoder that a run has; a reason that begins with the type of an error was not foreseen."""
    random, aside, units = Random(seed), list[BadRow](), list[PackUnit]()
    row, recipe, kind, columns = random.choice(BASES)
    row, columns = dict(row), {ours: there for ours, there in columns.items() if random.random() < 0.9}
    for _ in range(random.randint(0, 2)):
        row = changed(random, row) if random.random() < 0.7 else row | {random.choice(COLUMNS): random.choice(VALUES)}
        row = row if isinstance(row, dict) else {"text": row}

    def encode(row: Any, name: str) -> list[PackUnit]:
        if recipe == "grpo":
            return [
                (
                    Document(
                        prompt := encode_prompt(row, printable, name, 0).tokens, np.ones(len(prompt), np.float32), name
                    ),
                )
            ]
        return RECIPES[recipe].encode(row, printable, name)

    kind = "prompt" if recipe == "grpo" else random.choice([kind, kind, kind, *KINDS])
    encoder = Encoder(
        encode,
        "set",
        SourceSpec("", columns=columns, kind=kind),
        999,
        "truncate",
        set_aside=lambda bad, counts: aside.append(bad),
    )
    units = encoder(at(row, columnar=random.random() < 0.5))
    assert bool(units) != bool(aside), "it is trained, or it is said why not"
    for bad in aside:
        assert not re.match(r"\w+(Error|Exception|Panic)", bad.reason), bad.reason
        assert bad.reason.encode(), "it can be written"
    for unit in units:
        assert all(len(s) and np.isfinite(s.loss_weights).all() and (s.loss_weights[1:] > 0).any() for s in unit)
    event(f"{recipe}: {'read' if units else 'bad'}")
