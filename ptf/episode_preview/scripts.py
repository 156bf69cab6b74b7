"""What a scripted policy answers: nothing, the last user message, or the lines of a file."""

import itertools
import json
from collections.abc import Callable

from ptf import storage
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError

Script = Callable[[int, int, str], str]  # (number of the episode, number of the call, text of the context) → response
MARKS = ("zqxj", "jxqz", "qjzx")  # the contents of the probes: letters that no template writes


def empty(_episode: int, _call: int, _context: str) -> str:
    """Answer nothing."""
    return ""


def echo(tokenizer: Tokenizer) -> Script:
    """Return the script that repeats the last user message; of a context without one, the whole context."""
    opening, closing = user_markers(tokenizer)

    def repeat(_episode: int, _call: int, context: str) -> str:
        if not opening or opening not in context:
            return context
        return context.rpartition(opening)[2].partition(closing)[0] if closing else context.rpartition(opening)[2]

    return repeat


def user_markers(tokenizer: Tokenizer) -> tuple[str, str]:
    """Return what the chat template writes before and after a user message; empty without a chat template."""
    if not tokenizer.hf.chat_template:
        return "", ""
    first, second, third = MARKS
    roles = zip(("user", "assistant", "user"), MARKS, strict=True)
    text = tokenizer.render_text([{"role": role, "content": mark} for role, mark in roles], True)
    if any(text.count(mark) != 1 for mark in MARKS):
        return "", ""  # the template does not write the messages as they are
    before, rest = text.split(first)
    after_first, rest = rest.split(second)
    before_third, after_third = rest.split(third)
    return _common_start(before[::-1], before_third[::-1])[::-1], _common_start(after_first, after_third)


def _common_start(one: str, other: str) -> str:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(letter for letter, _ in same)


def of_file(path: str) -> Script:
    """Return the script of a file: a line is the responses of one episode, and the lines are repeated.

    A line is one response, which is given in every turn. In a file `.jsonl` a line is JSON: such a response as a
    string, or a list of strings, the responses by turn, repeated. Raises UserError for a file that is not so.
    """
    try:
        lines = storage.read_text(path).splitlines()
    except (storage.Missing, OSError, UnicodeDecodeError) as error:
        raise UserError(f"--policy: {path} cannot be read: {error}") from None
    if not lines:
        raise UserError(f"--policy: {path} has no line, and so no response")
    answers = [[line] for line in lines]
    if path.endswith(".jsonl"):
        answers = [_answers(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]

    def recite(episode: int, call: int, _context: str) -> str:
        turns = answers[episode % len(answers)]
        return turns[call % len(turns)]

    return recite


def _answers(line: str, where: str) -> list[str]:
    """Return the responses of one line of JSON."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(f"--policy: {where} is not JSON: {error}") from None
    answers = [value] if isinstance(value, str) else value
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise UserError(f"--policy: {where} is neither a string nor a list of strings, the responses by turn")
    return answers
