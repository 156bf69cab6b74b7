"""The fingerprint of a tokenizer: what decides its ids, stored with data that was made with it and compared later."""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ptf.data.probes import PROBES
from ptf.errors import UserError

if TYPE_CHECKING:
    from ptf.data.tokenizer import Tokenizer


def identity_of(tokenizer: "Tokenizer") -> dict[str, Any]:
    """Return what decides the ids of a tokenizer, to be stored with data that was made with it.

    It holds the SHA-256 of the vocabulary, merges, special tokens and chat template, the ids of probe strings
    (which detect a lost normalizer), and one `fingerprint` of all.
    """
    hf, settings = tokenizer.hf, tokenizer.rendering.facts
    backend = getattr(hf, "backend_tokenizer", None)
    backend_config = json.loads(backend.to_str()) if backend is not None else {}
    model = backend_config.get("model", {})
    steps = {name: backend_config.get(name) for name in ("normalizer", "pre_tokenizer", "added_tokens")}
    facts = {
        "vocabulary": sorted(hf.get_vocab().items()),
        "merges": model.get("merges"),
        "special tokens": dict(sorted(hf.special_tokens_map.items())),
        "chat template": hf.chat_template,
        # How a text is split into pieces, and how the pieces are joined.
        "steps": steps | {key: value for key, value in model.items() if key not in ("vocab", "merges")},
    }
    identity: dict[str, Any] = {name: _digest(fact) for name, fact in facts.items()}
    identity["probes"] = [[text, hf(text, add_special_tokens=False)["input_ids"]] for text in PROBES]
    if settings:  # without them the fingerprint does not depend on them
        identity["rendering"] = settings
    return {"fingerprint": _digest(identity), **identity}


def raise_if_other_identity(now: Mapping[str, Any], identity: Mapping[str, Any], what: str) -> None:
    """Raise UserError unless `what` was made with the tokenizer that is `now`; `identity` is the one stored with it.

    The message names the first probe or part that differs.
    """
    if identity.get("fingerprint") == now["fingerprint"]:
        return
    probes = dict(now["probes"])
    for text, ids in identity.get("probes", ()):
        if text in probes and probes[text] != ids:
            raise UserError(
                f"{what} was made with another tokenizer than the model's: for {text!r} it has the ids {ids}, "
                f"but the model's tokenizer gives {probes[text]}"
            )
    then, today = ((facts.get("rendering") or {}).get("date") for facts in (identity, now))
    if then != today:
        raise UserError(
            f"{what} was made with a chat template that rendered the date {then}, not {today}: set data.date, "
            "or make it again"
        )
    parts = [
        name
        for name in dict.fromkeys((*identity, *now))
        if name not in ("fingerprint", "probes") and identity.get(name) != now.get(name)
    ]
    raise UserError(
        f"{what} was made with another tokenizer than the model's: they differ in their {' and '.join(parts)}"
    )


def _digest(fact: Any) -> str:
    return hashlib.sha256(json.dumps(fact, ensure_ascii=False, default=str).encode()).hexdigest()
