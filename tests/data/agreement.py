"""ptf's masks beside the oracle's: equal ids and equal masks, or refused by both at the same turn for the same
reason."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ptf.data.chat import chat_samples
from ptf.data.document import Document
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError
from tests.data.conversations import Conversation
from tests.data.oracle import Masked, Oracle, Reason, Refusal

MESSAGES: dict[Reason, str] = {
    "no assistant turn": "no assistant turn",
    "blank": "is empty: there is nothing to train",
    "speaks first": "the assistant speaks first",
    "template refuses": "refuses the messages",
    "never served": "the generation prompt ends in",
    "left out": "the template leaves out",
    "unseen context": "it does not show",
    "thinking closed": "already closes the thinking block",
    "no tags": "it has no tags for thinking",
    "call not served": "renders this tool call in a way that does not continue",
    "nothing before": "nothing comes before the response",
    "stop inside": "stands inside the response",
    "endless": "no end-of-turn token",
}


@dataclass(frozen=True)
class Verdict:
    problem: str | None  # where they disagree
    refusal: Refusal | None = None  # where they agree to refuse
    spans: int = 0
    tokens: int = 0  # in all samples
    whole: int = 0  # in the longest


def judge(tokenizer: Tokenizer, oracle: Oracle, conversation: Conversation) -> Verdict:
    _, messages, tools, train_on, arguments = conversation
    found = outcome(tokenizer, conversation)
    try:
        expected = oracle(messages, tools, train_on == "last", arguments)
    except Refusal as refusal:
        return Verdict(refused_otherwise(found, refusal, tokenizer.template_name), refusal)
    if isinstance(found, UserError):
        return Verdict(f"ptf refuses what can be verified: {found}")
    lengths = [len(ids) for ids, _ in expected]
    turns = sum(m["role"] == "assistant" for m in messages) if train_on == "assistant" else 1
    return Verdict(difference(found, expected), None, turns, sum(lengths), max(lengths))


def outcome(tokenizer: Tokenizer, conversation: Conversation) -> list[Document] | UserError:
    try:
        return chat_samples(
            conversation.messages, tokenizer, "", conversation.train_on, conversation.tools, conversation.arguments
        )
    except UserError as e:
        return e


def refused_otherwise(found: list[Document] | UserError, refusal: Refusal, template: str) -> str | None:
    if not isinstance(found, UserError):
        return f"ptf trains what cannot be verified: {refusal}"
    if MESSAGES[refusal.reason] not in str(found):
        return f"ptf refuses for another reason than {refusal}: {found}"
    if refusal.reason == "blank":  # which no template decides
        return None if f"message {refusal.turn} " in str(found) else f"ptf does not name {refusal}: {found}"
    if refusal.turn is not None and not (f"turn {refusal.turn}:" in str(found) and template in str(found)):
        return f"ptf does not name the template or turn {refusal.turn}: {found}"
    return None


def difference(found: Sequence[Document], expected: Sequence[Masked]) -> str | None:
    if len(found) != len(expected):
        return f"{len(found)} samples, not {len(expected)}"
    for n, (sample, (ids, mask)) in enumerate(zip(found, expected, strict=True)):
        if sample.tokens.tolist() != ids:
            return f"other ids in sample {n}"
        if not 0 < sum(mask) < len(mask):
            return f"sample {n} is trained as a whole or not at all"
        if not np.array_equal(sample.loss_weights, np.array(mask, np.float32)):
            return (
                f"other mask in sample {n}, first at token "
                f"{int((sample.loss_weights != np.array(mask, np.float32)).argmax())}"
            )
    return None
