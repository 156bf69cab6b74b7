"""A tokenizer of events: one id for each token of a catalogue, and a chat template that writes a history as it is."""

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from ptf.data.event_tokens import END, EVENT, PAD, START, UNKNOWN
from ptf.data.tokenizer import Tokenizer
from ptf.data.tokenizer_files import write_tokenizer
from ptf.errors import UserError

# The template leaves out the assistant's messages: what was recommended is not what happened.
USER_TEXT_TEMPLATE = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


def event_tokenizer(tokens: Iterable[str], directory: str | Path, of: str = "") -> Tokenizer:
    """Write a tokenizer of exactly these tokens (`<…>` each) as a directory for AutoTokenizer, and load it.

    Its chat template writes the content of user messages unchanged, and nothing else. `of` names what the tokens stand
    for; it is a comment in the template, and so part of the fingerprint. Raises UserError for a token that occurs twice
    or has another form.
    """
    vocabulary: dict[str, int] = {}
    for token in (PAD, UNKNOWN, END, START, *tokens):
        if token in vocabulary or not re.fullmatch(EVENT, token):
            raise UserError(
                f"the token {token!r} is {'listed twice' if token in vocabulary else 'not of the form <…>'}"
            )
        vocabulary[token] = len(vocabulary)
    backend = Backend(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(EVENT), "isolated")
    backend.decoder = decoders.Fuse()
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, unk_token=UNKNOWN, eos_token=END, clean_up_tokenization_spaces=False
    )
    hf.chat_template = (f"{{# {of} #}}" if of else "") + USER_TEXT_TEMPLATE
    write_tokenizer(hf, directory)
    return Tokenizer.load(str(directory))
