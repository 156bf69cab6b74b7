"""Tool calls that ptf and vLLM find in the same 10,000 texts of each format. Writes benchmarks/results/tool_calls.md.

    python benchmarks/tool_calls.py [--texts 10000] [--formats hermes …]

The texts are those of tests/data/tool_calls/sampled_texts.py; their seeds are their numbers. vLLM's parser of the
format's name reads the whole text (`extract_tool_calls`). Exits 1 where a difference has no listed fault.
"""

import copy
import json
import logging
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.commands import options
from benchmarks.flow_runs import results_page
from benchmarks.pages import head, table, write_page
from benchmarks.tool_call_faults import FAULTS, Result, Tools, undo_all
from ptf.data.tool_calls import FORMATS, parser
from tests.data.tool_calls.sampled_texts import sampled

COMPARED = [name for name in FORMATS if name != "harmony"]  # whose parser needs a vocabulary that it downloads
SPECIAL = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]")


DECISIONS = (
    "Three of these are what vLLM intends; ptf decides otherwise, since nothing that was sampled may vanish:",
    "*thoughts* (vLLM leaves thinking to a different parser), *unknown* (a call of a tool that does not exist must be",
    "answered), and *text before*. *Lost text* is also counted where ptf finds no call and vLLM finds a cut one.",
)


class Vllm:
    """vLLM's parsers, each with a small tokenizer that has the special tokens of all formats."""

    def __init__(self) -> None:
        from vllm.tool_parsers import ToolParserManager

        logging.disable(logging.CRITICAL)  # the parsers log a traceback for every malformed text
        self.class_of = ToolParserManager.get_tool_parser
        self.old, self.new = _tokenizer(*SPECIAL), _tokenizer(*SPECIAL, "[ARGS]")

    def __call__(self, name: str, text: str, tools: Tools, old: bool | None = None, any_text: bool = False) -> Result:
        """Return the result of the parser of that name.

        `old`: with a tokenizer of Mistral before version 11; by default, that of the first call's form. `any_text`:
        without the regular expression that a list of Python calls must match.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam

        if old is None:
            old = re.search(r"\[TOOL_CALLS\]\s*\[", text) is not None
        given: Any = [ChatCompletionToolsParam(**copy.deepcopy(one)) for one in tools] if tools else None
        reader = self.class_of(name)(self.old if old else self.new, given)
        if any_text:
            reader.TOOL_CALL_REGEX = re_any()  # pyright: ignore[reportAttributeAccessIssue]
        request = ChatCompletionRequest.model_validate(
            {"messages": [{"role": "user", "content": "x"}], "model": "m", "tools": given}
        )
        try:
            found = reader.extract_tool_calls(text, request)
        except Exception as error:  # its server would answer with an error
            return Result("", (), type(error).__name__)
        return Result(found.content or "", tuple((c.function.name, c.function.arguments) for c in found.tool_calls))


def re_any() -> Any:
    """Return a pattern that matches at the beginning of any text."""
    import regex

    return regex.compile("")


def _tokenizer(*tokens: str) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    made.add_tokens(list(tokens))
    return PreTrainedTokenizerFast(tokenizer_object=made)


def ours(name: str, text: str, tools: Tools) -> Result:
    found = parser(name).parse(text, tools)
    return Result(found.content or "", tuple((call.name, call.arguments) for call in found.tool_calls))


def _value(text: str) -> Any:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return text


def equal(one: Result, other: Result, text: str) -> bool:
    """Return whether results are equal: content, names, order, and arguments as JSON values.

    Arguments that vLLM passes on as they stand in the text must be equal as texts.
    """
    if one.crash or one.content != other.content or len(one.calls) != len(other.calls):
        return False
    return all(
        a[0] == b[0] and (a[1] == b[1] if a[1] in text else _value(_plain(a[1])) == _value(_plain(b[1])))
        for a, b in zip(one.calls, other.calls, strict=True)
    )


def _plain(arguments: str) -> str:
    return re.sub(r"(?<=\d)\.0(?=[\],}\s])", "", arguments)  # 5.0 and 5 are the same JSON value


def compare(name: str, texts: int, vllm: Vllm) -> Counter[str]:
    """Return counts of texts by outcome, and of differing texts by the faults that explain them."""
    counts: Counter[str] = Counter()
    for seed in range(texts):
        text, tools, damaged = sampled(name, seed)
        theirs, mine = vllm(name, text, tools), ours(name, text, tools)
        counts.update({"texts": 1, "damaged": damaged, "calls": bool(mine.calls), "crashes": bool(theirs.crash)})
        if equal(theirs, mine, text):
            counts["equal"] += 1
            continue
        undone, faults = undo_all(name, text, tools, vllm)
        if equal(undone, mine, text):
            counts["explained"] += 1
            counts.update(f"fault {fault}" for fault in faults)
        else:
            counts["unexplained"] += 1
            if counts["unexplained"] <= 3:
                print(f"{name} {seed} {text!r}\n  vLLM   {theirs}\n  undone {undone} {faults}\n  ptf    {mine}")
    return counts


def control(name: str, texts: int, vllm: Vllm) -> Counter[str]:
    """Return how often a last call was left out on purpose where vLLM finds the same, and how often it was noticed."""
    counts: Counter[str] = Counter()
    for seed in range(texts):
        text, tools, _ = sampled(name, seed)
        mine = ours(name, text, tools)
        if mine.calls and equal(vllm(name, text, tools), mine, text):
            less = mine._replace(calls=mine.calls[:-1])
            noticed = not equal(undo_all(name, text, tools, vllm)[0], less, text)
            counts.update({"control": 1, "noticed": noticed})
    return counts


def shown(result: Result) -> str:
    """Return a result in one cell of a table."""
    if result.crash:
        return f"raises {result.crash}"
    calls = [f"`{name}`  `{arguments}`" for name, arguments in result.calls]
    return "; ".join([f"content {cell(result.content)}"] * bool(result.content) + calls) or "nothing"


def cell(text: str) -> str:
    """Return a text as code in a table."""
    return "`" + json.dumps(text, ensure_ascii=False)[1:-1].replace("|", "\\|").replace('\\"', '"') + "`"


def examples(vllm: Vllm) -> tuple[list[list[str]], list[str]]:
    """Return the rows of the faults' examples, and the faults whose example shows no difference."""
    rows, missed = [], []
    for fault in FAULTS:
        name = fault.formats[0]
        theirs, mine = vllm(name, fault.example, fault.tools), ours(name, fault.example, fault.tools)
        undone, faults = undo_all(name, fault.example, fault.tools, vllm)
        if equal(theirs, mine, fault.example) or not equal(undone, mine, fault.example) or fault.key not in faults:
            missed.append(f"the example of {fault.key} ({name})")
        rows.append([fault.key, name, cell(fault.example), shown(theirs), shown(mine)])
    return rows, missed


def lines_of(results: dict[str, Counter[str]], rows: list[list[str]]) -> list[str]:
    outcomes, faults = [], []
    for name, n in results.items():
        counts = [f"{n[key]:,}" for key in ("calls", "equal", "explained")] + [f"**{n['unexplained']}**"]
        noticed = f"{n['noticed']} of {n['control']}"
        outcomes.append([name, f"{n['texts']:,}", f"{n['damaged'] / n['texts']:.0%}", *counts, noticed])
    for fault in FAULTS:
        counts = [f"{name} {results[name][f'fault {fault.key}']:,}" for name in fault.formats if name in results]
        faults.append([fault.key, ", ".join(fault.formats), fault.what, ", ".join(counts)])
    return [
        table(
            "format | texts | damaged | with calls | equal | differ by listed faults | unexplained | control", outcomes
        ),
        "\n## Faults\n",
        *DECISIONS,
        "",
        table("fault | formats | what vLLM does | texts of each format", faults),
        "\n## The smallest texts\n",
        table("fault | format | text | vLLM | ptf", rows),
    ]


def main() -> int:
    given = options(__doc__, texts=10_000, formats=COMPARED)
    vllm = Vllm()
    results = {
        name: compare(name, given.texts, vllm) + control(name, given.texts // 20, vllm) for name in given.formats
    }
    rows, missed = examples(vllm)
    missed += [f"{name}: {n['unexplained']} unexplained" for name, n in results.items() if n["unexplained"]]
    missed += [f"{name}: the control" for name, n in results.items() if n["noticed"] < n["control"]]
    for name, n in results.items():
        print(name, dict(n))
    if given.formats != COMPARED or given.texts != 10_000:
        print(f"no page is written of a part; missed: {missed}")
        return 1 if missed else 0
    import vllm as package

    about = f"""\
Content and calls that `ptf.data.tool_calls` and vLLM {package.__version__} find in the same texts: `parse`, and
`extract_tool_calls` of the parser of that name. *Damaged*: the calls in the text were changed at random: cut, tags or
characters removed, doubled or put in, quotes exchanged, a different format's calls. *Equal*: content, names, number and
order of calls, and arguments as JSON values; as texts where vLLM passes them on. No content and empty content are the
same. A difference is *by listed faults* if undoing faults of the list below, and nothing else, makes vLLM's result
ptf's (`benchmarks/tool_call_faults.py`); a text may show several. Mistral's texts are read with the tokenizer of
their first call's form. *Control*: how often it is noticed that the last call is left out of
ptf's result on purpose.

"""
    page = results_page("tool_calls.md")
    return write_page(page, head("Tool calls beside vLLM's parsers") + about, lines_of(results, rows), missed)


if __name__ == "__main__":
    sys.exit(main())
