"""Tool calls in the text that a policy sampled: parsers by format, and the format of a chat template.

A format is chosen by name with `parser`, or found in a tokenizer's chat template with `format_of`. `Format.parse` takes
a whole response; `Format.certain` says what of its content is known before. The text is the response decoded with
its special tokens (`[TOOL_CALLS]`, `<tool_call>`) and without the token that ends the turn.

What holds for every format:

* A response in which no call is found is content, unchanged; nothing that was sampled is removed from it.
* Where there are calls, content is the text before the first of them. The text after it is dropped.
* A call is complete. One that the end of the text cuts inside a name or an argument is not a call.
* Names of tools are not checked; whether a tool exists is for the caller to decide.
* Thinking is text like any other: a caller that shows it separately removes it first.
* No text raises an error.

Harmony (gpt-oss) divides the whole response into messages; content is the text of those for the user.

The other formats agree with the parsers of those names in vLLM 0.28, apart from its faults, which
`benchmarks/results/tool_calls.md` lists one by one.
"""

from ptf.data.tool_calls.protocol import Format, ParsedAnswer, ToolCall
from ptf.data.tool_calls.registry import FORMATS, format_of, parser, parser_of

__all__ = ["FORMATS", "Format", "ParsedAnswer", "ToolCall", "format_of", "parser", "parser_of"]
