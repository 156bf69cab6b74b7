"""The forms in which people's data sets come, each made in small, and what ptf is to make of it.

One literal table is what the tests assert and what benchmarks/results/formats.md shows.
"""

import json
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
ASK, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2."}
MORE, LAST = {"role": "user", "content": "And 2+2?"}, {"role": "assistant", "content": "4."}
WORSE = {"role": "assistant", "content": "5."}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"name": "weather", "description": "Of a city", "parameters": {"city": {"type": "str"}}}
WRAPPED = {"type": "function", "function": TOOL}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
CALLED = '<call>{"name": "weather", "arguments": {"city": "Rome"}}</call>'


def ft(*said: tuple[str, str]) -> list[Row]:
    return [{"from": who, "value": text} for who, text in said]


def without(message: Row, **more: Any) -> Row:
    return {**message, **more}


@dataclass(frozen=True)
class Form:
    """One row. It is read as `plain` is, and of that `trained` counts, a text for each sample; or it is `refused`,
    by a message that matches."""

    sets: str
    row: Row
    plain: Row | None = None
    trained: tuple[str, ...] = ()
    refused: str = ""
    recipe: str = "sft"
    kind: str = "auto"
    columns: dict[str, str | None] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    weights: tuple[float, ...] = (1.0,)  # that are among the weights of what is trained
    note: str = ""


ULTRACHAT = "ultrachat_200k, no_robots, tulu-3-sft-mixture"
ULTRAFEEDBACK = "ultrafeedback_binarized"
SKYWORK = "tulu-3 preferences, Skywork-Reward-Preference"
HH = "hh-rlhf"
ORCA = "orca_dpo_pairs"
CAPYBARA = "capybara, capybara-dpo"
NECTAR = "nectar, helpsteer2"
KTO = "kto-mix, distilabel-kto"
SHAREGPT = "ShareGPT, OpenHermes-2.5, SlimOrca, Magpie"
ALPACA = "Alpaca, Dolly, natural-instructions, Aya"
OASST = "oasst1/2"
WILDCHAT = "WildChat, lmsys-chat-1m"
MATHS = "NuminaMath-CoT, OpenR1-Math, OpenThoughts"
GSM8K = "gsm8k, MATH"
VERL = "verl's parquet, DAPO-Math-17k"
CODE = "MBPP, HumanEval, APPS, TACO"
CALLS = "xlam-function-calling, ToolACE, hermes-function-calling, Glaive"
AGENTS = "SWE-bench-like, tau-bench"
IMAGES = "LLaVA-Instruct, ShareGPT4V"
WEB = "FineWeb, the Pile"

ultrafeedback = {
    "prompt": "1+1?",
    "prompt_id": "ab",
    "chosen": [ASK, ANSWER],
    "rejected": [ASK, WORSE],
    "messages": [ASK, ANSWER],
    "score_chosen": 8.5,
    "score_rejected": 3.0,
}
pair = {"chosen": [ASK, ANSWER], "rejected": [ASK, WORSE]}
long_pair = {"chosen": [ASK, ANSWER, MORE, LAST], "rejected": [ASK, ANSWER, MORE, WORSE]}
orca = {"system": "Be brief.", "question": "1+1?", "chosen": "2.", "rejected": "5."}
kto = {"prompt": [ASK], "completion": [ANSWER], "label": True}
verl = {
    "data_source": "maths",
    "prompt": [ASK],
    "ability": "maths",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7, "split": "train"},
}
hermes_system = "You may call <tools>" + json.dumps(WRAPPED) + "</tools>"
alpaca = {"instruction": "Translate.", "input": "due", "output": "two"}
human_eval = {
    "prompt": "def f(a, b):",
    "canonical_solution": " return a+b",
    "test": "assert f(1, 1) == 2",
    "entry_point": "f",
}
hermes = {
    "conversations": ft(("system", hermes_system), ("human", "Rome?"), ("gpt", "<tool_call>…")),
    "tools": json.dumps([WRAPPED]),
}
mbpp = {
    "task_id": 2,
    "text": "Add two numbers.",
    "code": "a+b",
    "test_list": ["assert f(1, 1) == 2"],
    "test_setup_code": "",
}

FORMS = (
    Form(
        ULTRACHAT,
        {"prompt": "1+1?", "prompt_id": "ab", "messages": [ASK, ANSWER, MORE, LAST], "source": "x"},
        {"messages": [ASK, ANSWER, MORE, LAST]},
        ("2.<end>4.<end>",),
        unread=("prompt", "prompt_id", "source"),
    ),
    Form(
        ULTRACHAT,
        {"prompt": "1+1?", "messages": [ASK, ANSWER, MORE, LAST]},
        {"messages": [ASK]},
        recipe="grpo",
        note="`messages` end with an answer, so the prompt is `prompt`",
    ),
    Form(
        ULTRAFEEDBACK,
        ultrafeedback,
        pair,
        ("2.<end>", "5.<end>"),
        recipe="dpo",
        unread=("prompt_id", "score_chosen", "score_rejected"),
    ),
    Form(ULTRAFEEDBACK, ultrafeedback, pair, ("2.<end>", "5.<end>"), recipe="rm"),
    Form(
        ULTRAFEEDBACK,
        ultrafeedback | {"prompt": "What?"},
        recipe="dpo",
        refused="`chosen` is a whole conversation, but it does not begin with the row's prompt",
    ),
    Form(ULTRAFEEDBACK, pair, refused=r"recipes dpo and rm learn from pairs.*\{messages: chosen\}"),
    Form(
        ULTRAFEEDBACK,
        pair,
        {"messages": [ASK, ANSWER]},
        ("2.<end>",),
        columns={"messages": "chosen"},
        unread=("rejected",),
    ),
    Form(
        SKYWORK,
        {"prompt": "1+1?", **long_pair, "source": "x"},
        {"prompt": [ASK, ANSWER, MORE], "chosen": "4.", "rejected": "5."},
        ("4.<end>", "5.<end>"),
        recipe="dpo",
        unread=("source",),
    ),
    Form(
        SKYWORK,
        {**long_pair, "source": "x"},
        {"prompt": [ASK, ANSWER, MORE], "chosen": "4.", "rejected": "5."},
        ("4.<end>", "5.<end>"),
        recipe="rm",
    ),
    Form(
        HH,
        {
            "chosen": "\n\nHuman: 1+1?\n\nAssistant: 2.\n\nHuman: And 2+2?\n\nAssistant: 4.",
            "rejected": "\n\nHuman: 1+1?\n\nAssistant: 2.\n\nHuman: And 2+2?\n\nAssistant: 5.",
        },
        {"prompt": [ASK, ANSWER, MORE], "chosen": "4.", "rejected": "5."},
        ("4.<end>", "5.<end>"),
        recipe="dpo",
    ),
    Form(
        HH,
        {
            "chosen": "\n\nHuman: 1+1?\n\nHuman: And?\n\nAssistant: 2.",
            "rejected": "\n\nHuman: 1+1?\n\nHuman: And?\n\nAssistant: 5.",
        },
        refused=r"`chosen` is a text of turns \(Human:, Assistant:\) that do not alternate",
        recipe="dpo",
    ),
    Form(
        ORCA,
        orca,
        recipe="dpo",
        refused=r"without a `prompt`, `chosen` and `rejected` must be whole conversations.*columns: \{prompt: "
        r"question\} makes it the prompt",
    ),
    Form(
        ORCA,
        orca,
        {"prompt": [SYSTEM, ASK], "chosen": "2.", "rejected": "5."},
        ("2.<end>", "5.<end>"),
        recipe="dpo",
        columns={"prompt": "question"},
    ),
    Form(
        CAPYBARA,
        {"source": "x", "conversation": [{"input": "1+1?", "output": "2."}, {"input": "And 2+2?", "output": "4."}]},
        {"messages": [ASK, ANSWER, MORE, LAST]},
        ("2.<end>4.<end>",),
        unread=("source",),
    ),
    Form(
        CAPYBARA,
        {
            **long_pair,
            "conversation": [{"input": "1+1?", "output": "2."}, {"input": "And 2+2?", "output": "4."}],
            "rating_chosen": 5.0,
        },
        {"prompt": [ASK, ANSWER, MORE], "chosen": "4.", "rejected": "5."},
        ("4.<end>", "5.<end>"),
        recipe="dpo",
        unread=("rating_chosen",),
    ),
    Form(
        NECTAR,
        {
            "prompt": "\n\nHuman: 1+1?\n\nAssistant: ",
            "answers": [{"answer": "2.", "rank": 1.0}, {"answer": "5.", "rank": 2.0}],
            "turns": 1,
        },
        refused=r"needs `chosen` and `rejected`.*several responses to one prompt: write `chosen` and `rejected`, "
        r"or `completion`, with data\.prepare",
        recipe="dpo",
    ),
    Form(
        NECTAR,
        {"prompt": "\n\nHuman: 1+1?\n\nAssistant: ", "answers": [{"answer": "2.", "rank": 1.0}]},
        {"prompt": "1+1?"},
        recipe="grpo",
    ),
    Form(
        NECTAR,
        {"prompt": "1+1?", "response": "2.", "helpfulness": 4, "verbosity": 1},
        refused=r"columns: \{completion: response\} trains the responses",
    ),
    Form(
        NECTAR,
        {"prompt": "1+1?", "response": "2.", "helpfulness": 4, "verbosity": 1},
        {"prompt": [ASK], "completion": "2."},
        ("2.<end>",),
        columns={"completion": "response"},
        unread=("helpfulness", "verbosity"),
    ),
    Form(
        NECTAR,
        {"prompt": "1+1?", "response": "2.", "helpfulness": 4, "verbosity": 1},
        {"prompt": [ASK], "completion": "2.", "reward": 4},
        ("<end>",),
        recipe="rm regression",
        columns={"completion": "response", "reward": "helpfulness"},
        note="the score is read at the answer's end",
    ),
    Form(KTO, kto, {"prompt": "1+1?", "completion": "2."}, ("2.<end>",)),
    Form(
        KTO,
        kto | {"label": False},
        refused=r"`label` says that this response is not to be imitated.*recipe rm.*\{label: null\}",
    ),
    Form(
        KTO,
        kto | {"label": False},
        {"prompt": "1+1?", "completion": "2.", "reward": 0.0},
        ("<end>",),
        recipe="rm binary",
        kind="scored",
    ),
    Form(
        KTO,
        {"prompt": "1+1?", "completion": [ASK, ANSWER], "label": True},
        {"prompt": "1+1?", "completion": "2."},
        ("2.<end>",),
    ),
    Form(
        SHAREGPT,
        {"id": "a", "conversations": ft(("system", "Be brief."), ("human", "1+1?"), ("gpt", "2."))},
        {"messages": [SYSTEM, ASK, ANSWER]},
        ("2.<end>",),
        unread=("id",),
    ),
    Form(
        SHAREGPT,
        {"conversations": ft(("human", "1+1?"), ("gpt", "2.")), "system_prompt": "Be brief.", "model": "x"},
        {"messages": [SYSTEM, ASK, ANSWER]},
        ("2.<end>",),
        unread=("model",),
    ),
    Form(
        SHAREGPT,
        {
            "conversations": [
                {"from": "system", "value": "Be brief.", "weight": None},
                {"from": "human", "value": "1+1?", "weight": 0.0},
                {"from": "gpt", "value": "2.", "weight": 0.0},
                {"from": "human", "value": "And 2+2?", "weight": 0.0},
                {"from": "gpt", "value": "4.", "weight": 0.5},
            ]
        },
        {"messages": [SYSTEM, ASK, ANSWER | {"weight": 0}, MORE, LAST | {"weight": 0.5}]},
        ("4.<end>",),
        weights=(0.5,),
    ),
    Form(
        SHAREGPT,
        {"conversations": ft(("human", "1+1?"), ("bing", "2."))},
        refused=r"message 1 is from 'bing'; known are .*data\.prepare",
    ),
    Form(ALPACA, alpaca, {"prompt": "Translate.\n\ndue", "completion": "two"}, ("two<end>",)),
    Form(
        ALPACA,
        alpaca | {"input": "", "text": "Below is an instruction …"},
        {"prompt": "Translate.", "completion": "two"},
        ("two<end>",),
        unread=("text",),
    ),
    Form(
        ALPACA,
        alpaca,
        refused=r"`input` is not read, though the response may depend on it",
        columns={"prompt": "instruction", "completion": "output"},
    ),
    Form(
        ALPACA,
        alpaca | {"system": "Be brief."},
        {"prompt": [SYSTEM, {"role": "user", "content": "Translate.\n\ndue"}], "completion": "two"},
        ("two<end>",),
    ),
    Form(
        ALPACA,
        {"instruction": "What is due?", "context": "due: two", "response": "two", "category": "qa"},
        {"prompt": "What is due?\n\ndue: two", "completion": "two"},
        ("two<end>",),
        unread=("category",),
    ),
    Form(
        ALPACA,
        {"inputs": "1+1?", "targets": "2.", "language": "en"},
        refused=r"columns: \{prompt: inputs, completion: targets\}",
    ),
    Form(
        ALPACA,
        {"inputs": "1+1?", "targets": "2.", "language": "en"},
        {"prompt": "1+1?", "completion": "2."},
        ("2.<end>",),
        columns={"prompt": "inputs", "completion": "targets"},
        unread=("language",),
    ),
    Form(
        ALPACA,
        {"definition": "Translate.", "inputs": "due", "targets": "two"},
        refused=r"\{instruction: definition, input: inputs, output: targets\}",
    ),
    Form(
        ALPACA,
        {"definition": "Translate.", "inputs": "due", "targets": "two"},
        {"prompt": "Translate.\n\ndue", "completion": "two"},
        ("two<end>",),
        columns={"instruction": "definition", "input": "inputs", "output": "targets"},
    ),
    Form(
        OASST,
        {"message_id": "a", "parent_id": "b", "text": "1+1?", "role": "prompter", "rank": 0, "lang": "en"},
        refused=r"`text` is not the only content of this row.*messages of a tree: make conversations of them "
        r"with data\.prepare",
    ),
    Form(
        WILDCHAT,
        {
            "conversation": [
                without(ASK, language="English", toxic=False, header={"accept": "en"}),
                without(ANSWER, language="English"),
            ],
            "language": "English",
            "redacted": False,
        },
        {"messages": [ASK, ANSWER]},
        ("2.<end>",),
        unread=("language", "redacted", *(f"{key} (of messages)" for key in ("language", "toxic", "header"))),
    ),
    Form(
        MATHS,
        {"problem": "1+1?", "solution": "2.", "answer": "2", "generations": ["2.", "two"], "messages": [ASK, ANSWER]},
        {"messages": [ASK, ANSWER]},
        ("2.<end>",),
        unread=("problem", "solution", "answer", "generations"),
    ),
    Form(
        MATHS,
        {
            "system": "Be brief.",
            "conversations": ft(("user", "1+1?"), ("assistant", "<|begin_of_thought|>…<|end_of_thought|>2.")),
        },
        {"messages": [SYSTEM, ASK, {"role": "assistant", "content": "<|begin_of_thought|>…<|end_of_thought|>2."}]},
        ("<|begin_of_thought|>…<|end_of_thought|>2.<end>",),
        note="tags of thinking that the template does not know are text",
    ),
    Form(
        MATHS,
        {"problem": "1+1?", "solution": "2.", "answer": "2", "generations": ["2.", "two"]},
        refused=r"columns: \{prompt: problem, completion: solution\}",
    ),
    Form(
        GSM8K,
        {"question": "1+1?", "answer": "2.\n#### 2"},
        refused=r"columns: \{prompt: question, completion: answer\} trains the answers",
    ),
    Form(
        GSM8K,
        {"question": "1+1?", "answer": "2.\n#### 2"},
        {"prompt": "1+1?", "completion": "2.\n#### 2"},
        ("2.\n#### 2<end>",),
        columns={"prompt": "question", "completion": "answer"},
    ),
    Form(
        GSM8K,
        {"question": "1+1?", "answer": "2.\n#### 2"},
        {"messages": [ASK]},
        recipe="grpo",
        columns={"prompt": "question"},
    ),
    Form(
        GSM8K,
        {"problem": "1+1?", "solution": "\\boxed{2}", "level": "1", "type": "sums"},
        {"prompt": "1+1?", "completion": "\\boxed{2}"},
        ("\\boxed{2}<end>",),
        columns={"prompt": "problem", "completion": "solution"},
        unread=("level", "type"),
    ),
    Form(
        VERL,
        verl,
        {"messages": [ASK]},
        recipe="grpo",
        note="the reward sees the whole row, `reward_model` and `extra_info` as they are nested",
    ),
    Form(VERL, verl, refused="rows to answer, for online recipes"),
    Form(
        CODE, mbpp, refused=r"`text` is not the only content of this row.*columns: \{prompt: text, completion: code\}"
    ),
    Form(
        CODE,
        mbpp,
        {"prompt": "Add two numbers.", "completion": "a+b"},
        ("a+b<end>",),
        columns={"prompt": "text", "completion": "code"},
        unread=("task_id", "test_list", "test_setup_code"),
    ),
    Form(CODE, mbpp, {"prompt": "Add two numbers."}, recipe="grpo", columns={"prompt": "text"}),
    Form(
        CODE,
        human_eval,
        {"prompt": "def f(a, b):"},
        recipe="grpo",
    ),
    Form(
        CODE,
        human_eval,
        refused=r"columns: \{completion: canonical_solution\}",
    ),
    Form(
        CODE,
        {"question": "Add.", "solutions": '["a+b"]', "input_output": '{"inputs": ["1 1"]}'},
        refused=r"for online recipes.*\{prompt: question\}",
    ),
    Form(
        CALLS,
        {"query": "Rome?", "tools": json.dumps([TOOL]), "answers": json.dumps([CALL["function"]])},
        {
            "messages": [
                {"role": "user", "content": "Rome?"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
            ],
            "tools": [WRAPPED],
        },
        (CALLED + "<end>",),
    ),
    Form(
        CALLS,
        {
            "system": "You may call weather(city).",
            "conversations": ft(("user", "Rome?"), ("assistant", "[weather(city='Rome')]")),
        },
        {
            "messages": [
                {"role": "system", "content": "You may call weather(city)."},
                {"role": "user", "content": "Rome?"},
                {"role": "assistant", "content": "[weather(city='Rome')]"},
            ]
        },
        ("[weather(city='Rome')]<end>",),
        note="the tools and calls are text, in the set's own notation",
    ),
    Form(
        CALLS,
        {
            "conversations": ft(
                ("human", "Rome?"),
                ("function_call", json.dumps(CALL["function"])),
                ("observation", "sun"),
                ("gpt", "Sun."),
            ),
            "tools": json.dumps([WRAPPED]),
        },
        {
            "messages": [
                {"role": "user", "content": "Rome?"},
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "sun"},
                {"role": "assistant", "content": "Sun."},
            ],
            "tools": [WRAPPED],
        },
        (CALLED + "<end>Sun.<end>",),
    ),
    Form(
        CALLS,
        hermes,
        refused=r"the tools are in the system message and in `tools`.*\{tools: null\} leaves the latter out",
    ),
    Form(
        CALLS,
        hermes,
        {
            "messages": [
                {"role": "system", "content": hermes_system},
                {"role": "user", "content": "Rome?"},
                {"role": "assistant", "content": "<tool_call>…"},
            ]
        },
        ("<tool_call>…<end>",),
        columns={"tools": None},
    ),
    Form(
        CALLS,
        {"system": "SYSTEM: You may call …", "chat": "USER: Rome?\n\n\nASSISTANT: Sun. <|endoftext|>"},
        refused=r"a conversation that is one text: write `messages` with data\.prepare",
    ),
    Form(
        AGENTS,
        {"instance_id": "a", "repo": "b", "problem_statement": "It fails.", "patch": "+1"},
        refused=r"an environment runs it: online recipes",
    ),
    Form(
        AGENTS,
        {"instance_id": "a", "repo": "b", "problem_statement": "It fails.", "patch": "+1"},
        {"prompt": "It fails."},
        recipe="grpo",
        columns={"prompt": "problem_statement"},
    ),
    Form(
        IMAGES,
        {"image": "a.jpg", "conversations": ft(("human", "<image>\nWhat?"), ("gpt", "A cat."))},
        refused=r"`image` is part of the row, but ptf trains text only.*\{image: null\}",
    ),
    Form(
        IMAGES,
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
            ]
        },
        refused=r"messages: message 0 holds image, text; ptf trains text only: leave such rows out with data\.prepare",
    ),
    Form(
        IMAGES,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "2."}]},
            ]
        },
        {"messages": [ASK, ANSWER]},
        ("2.<end>",),
        note="a content of one part of text is that text",
    ),
    Form(
        WEB,
        {"text": "One and one.", "id": "a", "url": "b", "language_score": 0.9},
        {"text": "One and one."},
        ("ne and one.<end>",),
        unread=("id", "url", "language_score"),
    ),
    Form(
        WEB,
        {"text": "One and one.", "meta": {"pile_set_name": "x"}},
        {"text": "One and one."},
        ("ne and one.<end>",),
        unread=("meta",),
    ),
)
