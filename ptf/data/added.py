"""Tokens that a job adds to a tokenizer: special tokens, items, or semantic ids.

The added tokens are a function of the config and the tokenizer alone, so every stage that reads the config gets the
same ids.
"""

import json
from dataclasses import dataclass

from ptf import storage
from ptf.config.sections.model import TokensConfig
from ptf.data.tokenizer import Tokenizer
from ptf.errors import UserError


@dataclass(frozen=True, slots=True)
class Added:
    """Tokens that a tokenizer did not have, by id, and the description of each."""

    ids: tuple[int, ...]  # ascending, without gaps
    previous_vocab_size: int  # number of ids in use before
    descriptions: tuple[str, ...]  # "" where there is none


def wanted(spec: TokensConfig) -> dict[str, str]:
    """Return token → description, in the order of `added` and `file`.

    Raises UserError that names the line of the file that is wrong, or a token that occurs twice.
    """
    descriptions: dict[str, str] = {}
    for token, description in [*((t, "") for t in spec.added), *(_rows(spec.file) if spec.file else ())]:
        if token in descriptions or not token:
            raise UserError(f"model.tokens: the token {token!r} is {'listed twice' if token else 'empty'}")
        descriptions[token] = description
    if spec.init == "description" and (bare := [t for t, d in descriptions.items() if not d]):
        raise UserError(f"model.tokens.init: description, but {len(bare)} tokens have none: {', '.join(bare[:5])}")
    return descriptions


def _rows(file: str) -> list[tuple[str, str]]:
    """Return the (token, description) pairs of a jsonl file. Raises UserError that names an invalid line."""
    rows = []
    for number, line in enumerate(storage.read_text(file).splitlines(), 1):
        try:
            row = json.loads(line)
            rows.append((str(row["token"]), str(row.get("description", ""))))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"model.tokens.file: {file}:{number} is not a JSON object with a token: {line[:80]!r}"
            ) from None
    return rows


def add(tokenizer: Tokenizer, spec: TokensConfig) -> Added:
    """Add the tokens to the tokenizer, in place; one that is in its vocabulary already is left unchanged.

    Raises UserError for a tokenizer whose ids have gaps.
    """
    descriptions = wanted(spec)
    known, vocabulary = tokenizer.vocab_size, tokenizer.hf.get_vocab()
    first = max(vocabulary.values()) + 1
    new = [token for token in descriptions if token not in vocabulary]
    tokenizer.add(new, special=spec.special)
    ids = tuple(tokenizer.hf.convert_tokens_to_ids(new))
    if ids != tuple(range(first, first + len(new))):
        raise UserError(
            f"model.tokens: the tokenizer's ids have gaps: new tokens got {ids[:3]} …, "
            f"and should begin at {first}; save the tokenizer without gaps"
        )
    return Added(ids, known, tuple(descriptions[token] for token in new))


def tokenizer_of(path: str, tokens: TokensConfig | None) -> Tokenizer:
    """Return the tokenizer that a job trains with: the one at `path` with its added tokens."""
    tokenizer = Tokenizer.load(path)
    if tokens is not None:
        add(tokenizer, tokens)
    return tokenizer
