"""Tokenizers with chat templates: our own, one for each way in which templates differ (tests/data/chat_templates), and
real ones where PTF_DATA has them.

What a person reads off a template, where a turn ends and how it begins, stands here by hand, for the oracle:
it is not found by the code under test.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ptf.data.rendering import Rendering
from ptf.data.tokenizer import Tokenizer

HERE = Path(__file__).parent / "chat_templates"
DATE = "2026-02-03"
SPECIAL = re.compile(r"<\|/?[A-Za-z_]+\|>|<｜[^｜'\"]+｜>|\[/?[A-Z_]{4,}\]|</?s>")


@dataclass(frozen=True)
class Case:
    """A template, the settings it is tried with, and what a person knows of it."""

    template: str  # a file of ours, a file of PTF_DATA's templates, or one of its tokenizers with its own template
    shows: str = ""  # the behaviour, in a line
    answer: str = "<|im_end|>"  # where an answer ends
    call: str | None = None  # where a call ends, if elsewhere
    borrowed: Mapping[bool, str] = field(default_factory=dict)  # calls → the end that only the next message brings
    behind: str = ""  # what stands behind the end of the last turn, besides white space and further ends
    headers: tuple[str, ...] = ("<|im_start|>assistant\n",)  # what stands right before an answer
    before_answer: str = ""  # what an answer begins with
    eos: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    text_arguments: bool = False  # it wants the arguments of calls as JSON text
    served: bool = False
    allow_unseen: bool = False

    @property
    def rendering(self) -> Rendering:
        return Rendering(DATE if self.template in DATED else None, self.served, self.allow_unseen, "keep")


MODEL = ("<|turn|>model\n",)
OURS = {
    "plain": Case("plain", "every role, tools, calls; a line break behind the stop"),
    "generation_markers": Case("generation_markers", "`{% generation %}` markers, which hold the header too"),
    "drops_thinking": Case("drops_thinking", "earlier thinking is dropped, an empty one shown"),
    "drops_thinking, enable_thinking: false": Case(
        "drops_thinking", "the same, thinking switched off", arguments={"enable_thinking": False}
    ),
    "next_role_stop": Case(
        "next_role_stop",
        "the stop is the next role's tag",
        "<|user|>",
        "<|observation|>",
        borrowed={False: "<|user|>", True: "<|observation|>"},
        headers=("<|assistant|>",),
        eos="<|endoftext|>",
    ),
    "closed_by_next": Case(
        "closed_by_next",
        "a turn is closed by the next question; results stand in the assistant's turn",
        "<|assistant_end|>",
        "<|tools_suffix|>",
        borrowed={False: "<|assistant_end|>"},
        headers=("<|assistant_start|>", "]"),
        eos="</s>",
    ),
    "closed_by_next, render: served": Case(
        "closed_by_next",
        "the same, behind the served prompt",
        "<|assistant_end|>",
        "<|tools_suffix|>",
        borrowed={False: "<|assistant_end|>"},
        headers=("<|assistant_start|>", "]", "<|tools_suffix|>"),
        eos="</s>",
        served=True,
    ),
    "no_system": Case(
        "no_system", "no system, strict order, answers stripped", "<|end|>", headers=("<|model|>",), eos="</s>"
    ),
    "system_folded": Case(
        "system_folded", "the system is folded into the first question; no tools", "<|end|>", headers=MODEL, eos="</s>"
    ),
    "system_folded, omitted_context: allow": Case(
        "system_folded", "the same, what is not shown allowed", "<|end|>", eos="</s>", allow_unseen=True
    ),
    "system_required": Case("system_required", "a system is required; nothing behind the stop", "<|end|>"),
    "date": Case("date", "today's date, tools by their descriptions"),
    "date, date_string": Case("date", "the same, the date an argument", arguments={"date_string": "1 May"}),
    "moving_tools": Case(
        "moving_tools",
        "tools and system move to the latest question; beside a call nothing is shown",
        "</s>",
        eos="</s>",
    ),
    "moving_tools, render: served": Case(
        "moving_tools",
        "the same, behind the served prompt",
        "</s>",
        headers=("[/INST]", "</s>", "[/RESULTS]", "<s>"),
        before_answer=" ",
        eos="</s>",
        served=True,
    ),
    "two_stops": Case(
        "two_stops",
        "two special tokens end a turn; the generation prompt is always written",
        "<|turn_end|>",
        behind="<|turn_start|><|chatbot_token|>",
        eos="<|turn_end|>",
    ),
    "thinking_opened": Case(
        "thinking_opened", "the generation prompt opens the thinking, the turn drops it", "</s>", eos="</s>"
    ),
    "thinking_opened, render: served": Case(
        "thinking_opened",
        "the same, behind the served prompt",
        "</s>",
        headers=("<|Assistant|>",),
        eos="</s>",
        served=True,
    ),
    "thinking_switch": Case(
        "thinking_switch", "the generation prompt opens the thinking, the turn shows it where there is some"
    ),
    "thinking_switch, enable_thinking: false": Case(
        "thinking_switch", "the same, closed by an argument", arguments={"enable_thinking": False}
    ),
    "thinking_switch, render: served": Case("thinking_switch", "the same, behind the served prompt", served=True),
    "empty_thought_prompt": Case(
        "empty_thought_prompt",
        "an empty thought ends the generation prompt alone",
        "<|end|>",
        headers=MODEL,
        eos="</s>",
    ),
    "empty_thought_prompt, enable_thinking: true": Case(
        "empty_thought_prompt",
        "the same, opened by an argument",
        "<|end|>",
        headers=MODEL,
        eos="</s>",
        arguments={"enable_thinking": True},
    ),
    "empty_thought_prompt, render: served": Case(
        "empty_thought_prompt", "the same, behind the served prompt", "<|end|>", headers=MODEL, eos="</s>", served=True
    ),
    "drops_tools": Case("drops_tools", "tools and calls are dropped", "<|end|>", headers=("<|assistant|>\n",)),
    "drops_tools, omitted_context: allow": Case("drops_tools", "the same, allowed", "<|end|>", allow_unseen=True),
    "drops_results": Case("drops_results", "results of tools are dropped", "<|end|>", headers=("<|assistant|>",)),
    "first_system_only": Case("first_system_only", "later systems and developers are dropped"),
    "developer": Case(
        "developer",
        "developers; results as JSON text; tools by name and description",
        "<|end|>",
        headers=("<|assistant|>",),
    ),
    "end_of_document": Case(
        "end_of_document",
        "the end of the document follows the last turn",
        "<|end|>",
        headers=("<|assistant|>\n",),
        eos="</s>",
    ),
    "only_end_of_document": Case(
        "only_end_of_document", "the only stop is the end of the document", "</s>", eos="</s>"
    ),
    "return_or_end": Case(
        "return_or_end",
        "the last answer, earlier ones and calls end otherwise",
        "<|return|>",
        "<|call|>",
        eos="<|return|>",
    ),
    "text_arguments": Case(
        "text_arguments",
        "arguments of calls as text; no generation prompt behind results",
        "</s>",
        eos="</s>",
        text_arguments=True,
    ),
    "text_arguments, render: served, enable_thinking: true": Case(
        "text_arguments",
        "the same, behind a served prompt that opens the thinking",
        "</s>",
        headers=("<|Assistant|>",),
        eos="</s>",
        text_arguments=True,
        served=True,
        arguments={"enable_thinking": True},
    ),
}
ONE_SAMPLE = (
    "granite-3.3",
    "minimind",
    "mistral-nemo",
    "phi-3.5",
    "qwen2.5",
    "qwen3-coder",
    "qwen3-instruct-2507",
    "smollm3",
)
SPLIT = ("gpt-oss", "qwen3", "qwen3.5-think")  # they rewrite earlier turns
UNSERVED = ("deepseek-r1-distill-qwen", "qwq-32b")  # their generation prompt is not in the rendered turn
OWN = ("own/minimind", "own/phi3-mini")  # a tokenizer directory as it is, with the template that it brings
R1_END = "<｜end▁of▁sentence｜>"
ENDS = {
    "granite-3.3": "<|end_of_text|>",
    "mistral-nemo": "</s>",
    "phi-3.5": "<|end|>",
    "own/phi3-mini": "<|end|>",
    "deepseek-r1-distill-qwen": R1_END,
}
REAL = {name: Case(name, answer=ENDS.get(name, "<|im_end|>")) for name in (*ONE_SAMPLE, *SPLIT, *UNSERVED, *OWN)}
REAL["gpt-oss"] = Case("gpt-oss", answer="<|return|>", call="<|call|>")
REAL["mistral-nemo"] = Case("mistral-nemo", answer="</s>", eos="</s>")
REAL["deepseek-r1-distill-qwen"] = Case("deepseek-r1-distill-qwen", answer=R1_END, eos=R1_END)
REAL |= {
    "deepseek-r1-distill-qwen, render: served": Case(
        "deepseek-r1-distill-qwen",
        answer=R1_END,
        eos=R1_END,
        behind="<｜Assistant｜>",
        headers=("<｜Assistant｜>", "<｜tool▁outputs▁end｜>"),
        served=True,
    ),
    "deepseek-r1-distill-qwen, render: served, enable_thinking: true": Case(
        "deepseek-r1-distill-qwen",
        answer=R1_END,
        eos=R1_END,
        behind="<｜Assistant｜>",
        headers=("<｜Assistant｜>", "<｜tool▁outputs▁end｜>"),
        served=True,
        arguments={"enable_thinking": True},
    ),
    "qwq-32b, render: served": Case("qwq-32b", served=True),
    "qwq-32b, render: served, enable_thinking: true": Case("qwq-32b", served=True, arguments={"enable_thinking": True}),
}
CASES = {**OURS, **REAL}
DATED = ("date", "gpt-oss", "smollm3", "granite-3.3")  # they render the day
REFUSED = {  # model → the behaviours of ours that it has, as they train: what is refused and by which key it trains
    "GLM-4.5 to 4.7": ("next_role_stop",),
    "Apertus": ("closed_by_next", "closed_by_next, render: served"),
    "Gemma 4": (
        "empty_thought_prompt",
        "empty_thought_prompt, enable_thinking: true",
        "empty_thought_prompt, render: served",
    ),
    "R1-distill, QwQ": ("thinking_opened", "thinking_opened, render: served"),
    "DeepSeek-V3.x": ("text_arguments", "text_arguments, render: served, enable_thinking: true"),
    "Command-R7B": ("two_stops",),
    "Nemotron-3": ("thinking_switch", "thinking_switch, enable_thinking: false", "thinking_switch, render: served"),
}


def template_of(case: Case, shared: Path | None) -> str:
    """The text of a template that is ours, or of PTF_DATA's."""
    ours = HERE / f"{case.template}.jinja"
    return (ours if ours.is_file() else (shared or Path()) / f"templates/{case.template}.jinja").read_text()


@functools.cache
def templated(name: str, shared: Path | None = None) -> Tokenizer:
    """The tokenizer of a case: one of our own, or with real templates the Qwen3 tokenizer;
    the template's special tokens are added."""
    case = CASES[name]
    if name in OWN:
        tokenizer = Tokenizer.load(str((shared or Path()) / "tokenizers" / name.removeprefix("own/")))
    else:
        hf: Any = (
            bytes_tokenizer()
            if name in OURS
            else AutoTokenizer.from_pretrained((shared or Path()) / "tokenizers/qwen3")
        )
        hf.chat_template = template_of(case, shared)
        hf.add_tokens(markers(hf.chat_template), special_tokens=True)
        if case.eos:
            hf.eos_token = case.eos
        if "<s>" in markers(hf.chat_template) and name == "mistral-nemo":
            hf.bos_token = "<s>"
        elif name.startswith("deepseek-r1"):
            hf.bos_token = "<｜begin▁of▁sentence｜>"
        tokenizer = Tokenizer(hf)
    tokenizer.set_template(None, case.arguments)
    tokenizer.rendering = case.rendering
    return tokenizer


def markers(template: str) -> list[str]:
    """The special tokens that a template writes, and those that ours make of roles."""
    made = {
        f"<|{role}{end}|>"
        for role in ("system", "developer", "user", "assistant", "tool")
        for end in ("", "_start", "_end", "_token")
    }
    used = {token for token in made if "+ m.role +" in template or token in template or "_token|>" in template}
    return sorted(set(SPECIAL.findall(template)) | used | {"<s>", "</s>"})


TEXT = """The weather in Denver is sunny today, and the answer to your question is 42. \
What is it that you would like to know?
\n\nYes, of course. You are a helpful assistant.\n\n\tIt shines.  Two  spaces, 3.14 and 1234567.\r\n{"name": "lookup", \
"arguments": {"city": "Denver"}}
\n<think>\nSo the user wants to know what the weather is.\n</think>\n\n\
assistant user system tool name arguments function parameters type object
naïve café Ångström 数学 русский العربية हिन्दी 👩‍👩‍👧 don't DON'T it's ﬁ ①\n"""


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, NFC-normalized, trained here on a few lines:
    some words and line breaks are one token."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([TEXT] * 8, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
