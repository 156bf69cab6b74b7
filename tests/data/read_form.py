"""A row of somebody's data set through the readers and encoders that a run has."""

import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ptf.data.character_tokenizer import character_tokenizer
from ptf.data.document import PackUnit
from ptf.data.encode import encode_prompt
from ptf.data.partitions import opened, pack_units_once
from ptf.data.prompts import prompts_once
from ptf.data.sources.rows import RawRow, SourceSpec
from ptf.data.tokenizer import Tokenizer
from ptf.data.trajectory import Prompt
from ptf.data.unread import Unread
from ptf.recipes.dpo.recipe import DPO
from ptf.recipes.rm.recipe import RM
from ptf.recipes.sft.recipe import SFT
from tests.data.dataset_forms import Form
from tests.recipes.of_keys import of_keys
from tests.tiny import write_jsonl

TEMPLATE = (  # it shows tools, calls and all that anybody says
    "{% if tools %}{% for tool in tools %}{{ '<tool>' + (tool | tojson) }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|><|' + m.role + '|>' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + ({'name': c.function.name, 'arguments': "
    "c.function.arguments} | tojson) + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|><|assistant|>' }}{% endif %}"
)
RECIPES: Mapping[str, Any] = {
    "sft": of_keys(SFT),
    "dpo": of_keys(DPO),
    "rm": of_keys(RM),
    "rm binary": of_keys(RM, loss_type="binary"),
    "rm regression": of_keys(RM, loss_type="regression"),
}
SUFFIXES = ("jsonl", "parquet")


@dataclass
class Rows:
    """A block of rows that no file could hold."""

    rows: list[Any]
    columnar: bool = False
    nbytes: int = 0

    @property
    def lines(self) -> int:
        return len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def line(self, i: int) -> int:
        return i

    def row(self, i: int) -> Any:
        return self.rows[i]

    def part(self, start: int, end: int) -> "Rows":
        return Rows(self.rows[start:end], self.columnar)


def at(row: Any, line: int = 1, columnar: bool = False) -> RawRow:
    """The row, said to be on a line of a.jsonl."""
    return RawRow(Rows([row], columnar), 0, "a.jsonl", line - 1)


def tokenizer(directory: Path) -> Tokenizer:
    """One id a character."""
    made = character_tokenizer(string.printable + "…", directory)
    made.hf.chat_template = TEMPLATE
    return Tokenizer(made.hf)


def write(rows: list[Any], path: Path) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_jsonl(path, rows)


def spec_of(form: Form, path: Path) -> SourceSpec:
    return SourceSpec(str(path), kind="prompt" if form.recipe == "grpo" else form.kind, columns=form.columns)


def read(form: Form, path: Path, tokenizer: Tokenizer) -> list[PackUnit] | list[Prompt]:
    """What a run makes of a file of its rows. Raises UserError for what it refuses."""
    if form.recipe == "grpo":
        return list(prompts_once(spec_of(form, path), "set", tokenizer))

    def encode(row, source) -> list[PackUnit]:
        return RECIPES[form.recipe].encode(row, tokenizer, source)

    return list(pack_units_once({"set": spec_of(form, path)}, encode=encode, seq_len=1000))


def plainly(form: Form, tokenizer: Tokenizer) -> list[PackUnit] | list[Prompt]:
    """What its plain row is, for the same recipe."""
    assert form.plain is not None
    if form.recipe == "grpo":
        return [encode_prompt(form.plain, tokenizer, "set", 0)]
    return RECIPES[form.recipe].encode(form.plain, tokenizer, "set")


def not_read(form: Form, path: Path) -> tuple[str, ...]:
    _, spec = opened(replace(spec_of(form, path)), None)
    return tuple(Unread(spec, None, ("reward",) if form.recipe.startswith("rm") else ()).read_first().names)


def trained(units: list[PackUnit], tokenizer: Tokenizer) -> tuple[str, ...]:
    """The text that is trained, of each sample."""
    return tuple(
        tokenizer.decode(s.tokens[s.loss_weights > 0]).replace("<|im_end|>", "<end>") for unit in units for s in unit
    )
