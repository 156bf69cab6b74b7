"""What the rows of a source hold and nothing reads: columns and keys of messages, each told once.

A key that the chat template names counts as read. The names are bounded, so a source with a new column in every row
costs no more than others.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping

from ptf.data.chat import SWITCHES, WEIGHT
from ptf.data.forms import Row, adopt_known_forms, rename_columns
from ptf.data.kinds import KINDS, MESSAGE_COLUMNS, READ_COLUMNS, label_of, shaped
from ptf.data.messages import MEDIA, THOUGHTS
from ptf.data.quarantine import FAULTS
from ptf.data.sources.reader import Reader
from ptf.data.sources.rows import RawRow, SourceSpec, rows_once
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError

MESSAGE_KEYS = ("role", "content", "tool_calls", *THOUGHTS, *MEDIA, WEIGHT, *SWITCHES)
NAMED = re.compile(r"""[.'"](\w+)""")  # an attribute or a key in a template
FIRST_ROWS = 100
MOST = 500  # names; what comes after so many is not looked for


class Unread:
    """The names that nothing reads. Online recipes pass every column to the reward, so sources of prompts have none."""

    def __init__(
        self,
        spec: SourceSpec,
        tokenizer: Tokenizer | None,
        keys: Iterable[str] = (),
        say: Callable[[str], None] | None = None,
    ):
        """`spec` has its kind already; `keys` are further keys of messages that the recipe reads; `say` gets a line for
        names that are new."""
        self.names: dict[str, str] = {}  # and the place of the row where each appeared
        self.say = say
        self._spec, self._off = spec, spec.kind not in READ_COLUMNS
        self._columns = {*KINDS.get(spec.kind, ()), *READ_COLUMNS.get(spec.kind, ())}
        self._keys = {*MESSAGE_KEYS, *keys, *NAMED.findall(str(tokenizer.hf.chat_template) if tokenizer else "")}

    def read_first(self) -> "Unread":
        """Note the names in the first rows."""
        for row in () if self._off else rows_once(Reader(self._spec.path), FIRST_ROWS):
            try:
                raw = row.read()
                self(raw, shaped(raw, self._spec.columns, self._spec.kind, row.rows.columnar), row)
            except FAULTS:
                continue
        return self

    def __call__(self, raw: Row, values: Row, row: RawRow) -> None:
        """Note the names in the values of a row as the file has them (`raw`), and as `shaped` returned them."""
        if self._off:
            return
        new: list[str] = []
        if not raw.keys() <= self._columns:
            adopted = adopt_known_forms(rename_columns(raw, self._spec.columns), self._spec.kind)
            new = [name for name in adopted if name not in self._columns]
            self._columns |= raw.keys()
        with contextlib.suppress(UserError):  # where it is unclear, and read, the row is refused
            new += ["label"] if values.get("label") is not None and label_of(values) is None else []
        found = [values.get(name) for name in MESSAGE_COLUMNS.get(self._spec.kind, ())]
        for message in (m for value in found for m in (value if isinstance(value, list) else [value])):
            if isinstance(message, dict) and not message.keys() <= self._keys:
                keys = [key for key, v in message.items() if v is not None and key not in self._keys]
                self._keys |= set(keys)
                new += [f"{key} (of messages)" for key in keys]
        if new:
            self.note(dict.fromkeys(new, row.where))

    def note(self, names: Mapping[str, str]) -> None:
        """Note names, which another process may have found, and tell those that are new."""
        new = {name: where for name, where in names.items() if name not in self.names}
        self.names |= new
        self._off = self._off or len(self.names) > MOST
        for where in dict.fromkeys(new.values()):
            if self.say is not None:
                self.say(f"{where}: nothing reads {', '.join(name for name in new if new[name] == where)}")
