"""Texts as a policy may sample them, by format: with calls, well-formed or damaged. `sampled(name, seed)` makes one."""

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

from ptf.data.tool_calls.schema_types import properties_of

Tools = list[dict[str, Any]]
Renderer = Callable[[Random, list[tuple[str, dict[str, Any]]]], list[str]]  # calls → the text of each

NAMES = ["get_weather", "search", "f", "send_email", "calculate2", "now", "a"]
KEYS = ["city", "count", "x", "options", "tags", "is_on", "ratio", "note", "when"]
UNTYPED: dict[str, Any] = {"description": "anything"}
SCHEMAS: list[dict[str, Any]] = [
    *({"type": kind} for kind in ("string", "integer", "number", "boolean", "array", "object", "null") * 2),
    *({"type": kind} for kind in ("int", "Float", "bool", "dict", "list", "str")),
    {"type": ["string", "null"]},
    {"type": ["integer", "null"]},
    {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    {"oneOf": [{"type": "number"}, {"type": "null"}]},
    {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
    {"enum": ["metric", "imperial"]},
    {"enum": [1, 2, 2.5]},
    {"enum": [True, None]},
    {"type": "array", "items": {"type": "integer"}},
    {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "string"}}},
    UNTYPED,
    {},
]
VALUES: list[Any] = [
    "Oslo",
    "",
    "null",
    "true",
    "5",
    "-3",
    "2.50",
    "1e3",
    "01234",
    " 7 ",
    "12345678901234567890",
    "a\nb",
    "\n",
    'say "hi"',
    "it's",
    "back\\slash",
    "tab\t",
    "{x}",
    '{"a": 1}',
    "[1, 2]",
    "['a']",
    "æøå 東京 🌦",
    "a < b > c",
    "None",
    "True",
    "yes",
    "<b>x</b>",
    "nan",
    "1_000",
    "\\n",
    "x=1, y=(2)",
    "], [",
    "&amp;",
    "0",
    "1",
    0,
    1,
    5,
    -3,
    2.5,
    5.0,
    1e21,
    12345678901234567890,
    True,
    False,
    None,
    [],
    {},
    [1, "2", None],
    {"a": "1", "b": 2},
    {"k": {"l": [True, {"m": "n"}]}},
    ["x", ["y"]],
    [[]],
    "[1e999]",
    "End with </tool_call>.",
    "</parameter>, </function>",
    "a </arg_value> b",
]
TEXTS = [
    "",
    "",
    "",
    "",
    "I'll look that up.",
    "Let me check",
    "\n",
    "  ",
    "\n\n",
    "Sure!\n",
    "Sure! \n\n",
    " leading",
    "Ω 東京 👍 ",
    "a < b and c > d",
    'He said "no".',
    "f(x) = [1, 2]",
    "<b>bold</b>",
    "`code`",
    "1. one\n2. two\n",
    "<tool",
    "[TOOL",
    "don't",
    "<|python",
    "5 > 3 ",
    "[note] ",
]
THOUGHTS = ["<think>\nI need the tool.\n</think>\n\n", "I think so.</think>\n", "<think>short", "<think></think>"]
TRAILERS = ["", "", "", "", "\n", " ", "\nDone.", " I hope this helps!", "\n\nThen we see [1].", "}", " æ"]


class Sampled(NamedTuple):
    """A text, the tools of its request (None: there are none), and whether it was damaged at random."""

    text: str
    tools: Tools | None
    damaged: bool


def _tools(rng: Random) -> Tools | None:
    if rng.random() < 0.1:
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {key: rng.choice(SCHEMAS) for key in rng.sample(KEYS, rng.randint(0, 4))},
                },
            },
        }
        for name in rng.sample(NAMES, rng.randint(1, 4))
    ]


def _calls(rng: Random, tools: Tools | None) -> list[tuple[str, dict[str, Any]]]:
    known = [tool["function"]["name"] for tool in tools or []]
    calls = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        name = rng.choice(known) if known and rng.random() < 0.85 else rng.choice(NAMES)
        keys = [key for key in properties_of(tools, name) if rng.random() < 0.8]
        keys += rng.sample(KEYS, rng.choice((0, 0, 0, 1, 2)))
        calls.append((name, {key: rng.choice(VALUES) for key in keys}))
    return calls


def _json(rng: Random, value: Any) -> str:
    separators = rng.choice(((", ", ": "), (", ", ": "), (",", ":")))
    return json.dumps(
        value, ensure_ascii=rng.random() < 0.2, separators=separators, indent=rng.choice((None,) * 7 + (1,))
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _odd_arguments(rng: Random, arguments: dict[str, Any]) -> Any:
    return rng.choice((json.dumps(arguments), [1], None, "x", 5)) if rng.random() < 0.03 else arguments


def _objects(rng: Random, calls: list[tuple[str, dict[str, Any]]], keys: tuple[str, ...]) -> list[str]:
    objects = []
    for name, arguments in calls:
        value = {"name": name, rng.choice(keys): _odd_arguments(rng, arguments)}
        if rng.random() < 0.05:
            value["id"] = "abc"
        if rng.random() < 0.03:
            del value[rng.choice(sorted(value))]
        objects.append(_json(rng, value))
    return objects


def _hermes(rng: Random, calls: list[tuple[str, dict[str, Any]]]) -> list[str]:
    gap = rng.choice(("\n", "\n", "", " "))
    return [f"<tool_call>{gap}{one}{gap}</tool_call>" for one in _objects(rng, calls, ("arguments",))]


def _qwen(rng: Random, calls: list[tuple[str, dict[str, Any]]]) -> list[str]:
    gap = rng.choice(("\n", "\n", "\n", "", " "))
    bare = rng.random() < 0.1
    texts = []
    for name, arguments in calls:
        body = "".join(
            f"<parameter={key}>{gap}{_plain(value)}{gap}</parameter>{gap}" for key, value in arguments.items()
        )
        function = f"<function={name}>{gap}{body}</function>"
        texts.append(function if bare else f"<tool_call>{gap}{function}{gap}</tool_call>")
    return texts


def _glm(rng: Random, calls: list[tuple[str, dict[str, Any]]]) -> list[str]:
    gap = rng.choice(("\n", "\n", ""))
    return [
        f"<tool_call>{name}{gap}"
        + "".join(
            f"<arg_key>{key}</arg_key>{gap}<arg_value>{_plain(value)}</arg_value>{gap}"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    ]


def _llama3(rng: Random, calls: list[tuple[str, dict[str, Any]]]) -> list[str]:
    mark = rng.choice(("", "", "<|python_tag|>", "<|python_start|>"))
    first, *others = _objects(rng, calls, ("parameters", "parameters", "arguments"))
    between = rng.choice(("; ", "; ", "\n", " ", "", ";"))
    return [mark + first, *(between + one for one in others)]


def _python(rng: Random, value: Any) -> str:
    if rng.random() < 0.05 and isinstance(value, list):
        return repr(tuple(value))
    if isinstance(value, bool | None) and rng.random() < 0.3:
        return json.dumps(value)
    return json.dumps(value) if isinstance(value, str) and rng.random() < 0.5 else repr(value)


def _llama4(rng: Random, calls: list[tuple[str, dict[str, Any]]]) -> list[str]:
    made = []
    for name, arguments in calls:
        name = f"tools.{name}" if rng.random() < 0.04 else name
        words = [f"{key}={_python(rng, value)}" for key, value in arguments.items()]
        if rng.random() < 0.04:
            words.insert(0, rng.choice(("3", "*x", "**{'a': 1}", "f(x=1)")))
        made.append(f"{name}({rng.choice((', ', ', ', ',')).join(words)})")
    start, end = rng.choice((("", ""), ("", ""), ("<|python_start|>", "<|python_end|>"), ("<|python_start|>", "")))
    opening = rng.choice(("[",) * 9 + ("[ ",))
    closing = rng.choice(("]",) * 9 + (",]", " ]"))
    return [start + opening + ", ".join(made) + closing + end]


def _mistral_array(rng: Random, calls: list[tuple[str, dict[str, Any]]]) -> list[str]:
    between = rng.choice((", ", ","))
    objects = _objects(rng, calls, ("arguments",))
    return [f"[TOOL_CALLS]{rng.choice(('', ' '))}[{between.join(objects)}]"]


def _mistral_named(rng: Random, calls: list[tuple[str, dict[str, Any]]]) -> list[str]:
    between = rng.choice(("[ARGS]", "[ARGS]", "", " ", "[CALL_ID]Ab3dE6gh9[ARGS]"))
    return [f"[TOOL_CALLS]{name}{between}{_json(rng, arguments)}" for name, arguments in calls]


def _mistral(rng: Random, calls: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return rng.choice((_mistral_array, _mistral_named))(rng, calls)


def _harmony(rng: Random, calls: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Write each call in one of the forms that the model has learned; thinking or a preamble may come first."""
    made = []
    for name, arguments in calls:
        value = _json(rng, _odd_arguments(rng, arguments))
        kind = rng.choice((" <|constrain|>json", " json", ""))
        after = f"<|channel|>commentary to=functions.{name}{kind}<|message|>{value}<|call|>"
        before = f" to=functions.{name}<|channel|>commentary{kind}<|message|>{value}<|call|>"
        thought = rng.choice(("", "", "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"))
        said = rng.choice(("", "", "", "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"))
        made.append((("<|start|>assistant" if made else "") + thought + said) + rng.choice((after, before)))
    return made


RENDERERS: Mapping[str, Renderer] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen,
    "qwen3_xml": _qwen,
    "llama3_json": _llama3,
    "llama4_pythonic": _llama4,
    "mistral": _mistral,
    "glm45": _glm,
    "glm47": _glm,
    "harmony": _harmony,
}
FRAGMENTS: Mapping[str, list[str]] = {
    "hermes": ["<tool_call>", "</tool_call>", "{", "}", '"', '{"name": "f"}', '"arguments": {}', "NaN", "<think>"],
    "qwen3_coder": [
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "<function=f>",
        "</function>",
        "<parameter=",
        "<parameter=x>",
        "</parameter>",
        ">",
        "<",
        "\n",
        "< parameter = y >",
        "</ parameter>",
        "</think>",
    ],
    "llama3_json": ["{", "}", '{"name": "f", "parameters": {}}', "<|python_tag|>", "; ", '"', "NaN", "{}"],
    "llama4_pythonic": ["[", "]", "(", ")", "'", '"', ",", "=", "<|python_start|>", "<|python_end|>", "f()", "\n"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "{", "}", "[", "]", '"', "f", '[{"name": "f"}]', "NaN", "[CALL_ID]"],
    "harmony": [
        "<|start|>",
        "<|start|>assistant",
        "<|channel|>",
        "<|channel|>analysis",
        "<|channel|>final<|message|>",
        " to=functions.f",
        "to=",
        "<|message|>",
        "<|constrain|>json",
        "<|end|>",
        "<|call|>",
        "{}",
        "<|",
    ],
    "glm45": [
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "f\n",
        "<",
        ">",
        "<arg_key>x</arg_key>",
        "<think>",
        "</think>",
    ],
}
FRAGMENTS = {**FRAGMENTS, "qwen3_xml": FRAGMENTS["qwen3_coder"], "glm47": FRAGMENTS["glm45"]}


def _damage(rng: Random, name: str, text: str, others: str) -> str:
    """Return the text of calls with one fault in it; `others` are calls in a different format."""
    position = rng.randint(0, len(text))
    fragments = FRAGMENTS[name]
    match rng.randint(0, 7):
        case 0 | 1:
            return text[: rng.randint(1, len(text) - 1)]
        case 2:
            return text[:position] + rng.choice(fragments) + text[position:]
        case 3:
            present = [fragment for fragment in fragments if fragment in text]
            fragment = rng.choice(present) if present else text[position : position + 1]
            place = rng.choice([i for i in range(len(text)) if text.startswith(fragment, i)])
            return (
                text[:place] + rng.choice(("", "", fragment * 2, rng.choice(fragments))) + text[place + len(fragment) :]
            )
        case 4:
            end = min(len(text), position + rng.randint(1, 6))
            return text[:position] + text[end:]
        case 5:
            return rng.choice((text.replace('"', "'"), text.replace("=", ":"), text.replace("\n", ""), text.upper()))
        case 6:
            return others
        case _:
            return "".join(rng.choice((*fragments, "f", "x", " ", "1", "é")) for _ in range(rng.randint(1, 14)))


def sampled(name: str, seed: int, damaged_share: float = 0.5) -> Sampled:
    """Return the text number `seed` of a format."""
    rng = Random(f"{name} {seed}")
    tools = _tools(rng)
    if rng.random() < 0.03:
        return Sampled("".join(rng.choice(TEXTS) for _ in range(3)), tools, damaged=False)
    calls = _calls(rng, tools)
    made = RENDERERS[name](rng, calls)
    between = [rng.choice(("", "\n", "\n", " and ")) for _ in made[1:]] + [""]
    middle = "".join(one + gap for one, gap in zip(made, between, strict=True))
    before, after = rng.choice(TEXTS), rng.choice(TRAILERS)
    damaged = rng.random() < damaged_share
    if damaged:
        other = rng.choice([other for other in RENDERERS if RENDERERS[other] not in (RENDERERS[name], _harmony)])
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            middle = _damage(rng, name, middle, "".join(RENDERERS[other](rng, calls))) or "x"
            if len(middle) < 2:
                break
    if name == "llama4_pythonic" and rng.random() < 0.8:  # which has no text around its calls
        return Sampled(middle, tools, damaged)
    thought = rng.choice(THOUGHTS) if rng.random() < 0.06 else ""
    return Sampled(thought + before + middle + (after if rng.random() < 0.6 else ""), tools, damaged)
