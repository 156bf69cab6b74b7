"""What the files of an export say of the ends of responses: the ids at which generation stops, and the token that pads
the texts of a reward model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptf.data.tokenizer import Tokenizer
from ptf.data.tokenizer_files import read_stop_ids
from ptf.errors import UserError
from ptf.model import model_files
from ptf.model.head import as_scalar


def generation_files(source: Path, tokenizer: Tokenizer, place: Path) -> dict[str, str]:
    """Return the generation_config.json of an export of `source` with the tokenizer in `place`.

    Its `eos_token_id` are the ids that end a response, those of training first, so that any program stops where ptf
    does. There is none where what is copied says so already.
    """
    copied: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for file in (directory / "generation_config.json" for directory in (source, place)):
        copied = json.loads(file.read_text()) if file.is_file() else copied
        settings |= copied
    if not copied:  # transformers then reads these in config.json
        config = model_files.read_config(source)
        settings = {name: config[name] for name in ("bos_token_id", "pad_token_id") if config.get(name) is not None}
    named = settings.get("eos_token_id")
    stops = dict.fromkeys([*tokenizer.stop_ids, *read_stop_ids(str(source), None, True)])
    if set(stops) != set(named if isinstance(named, list) else [named]):
        settings["eos_token_id"] = list(stops)
    if not stops or settings == copied:
        return {}
    return {"generation_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n"}


def padding_id(tokenizer: Tokenizer, config: Mapping[str, Any]) -> int:
    """Return the id that pads the texts of a reward model: a special token that ends no response, because transformers
    reads the score at the last token that is not padding.

    It is the tokenizer's own or the config's if they end none, else one that is not in the chat template if there is
    one. Raises UserError for a tokenizer without such a token.
    """
    hf = tokenizer.hf
    special = {i: token.content for i, token in hf.added_tokens_decoder.items() if token.special}
    known, template = (hf.unk_token_id, hf.bos_token_id), str(hf.chat_template)
    others = sorted(special, key=lambda i: (i in known, special[i] in template, i))
    free = (i for i in (hf.pad_token_id, config.get("pad_token_id"), *others) if i in special)
    found = next((i for i in free if i not in tokenizer.stop_ids), None)
    if found is None:
        raise UserError(
            "model.tokenizer: every special token of the tokenizer ends responses, so none can pad the texts of a "
            'reward model; add one: model.tokens: {added: ["<|padding|>"], special: true}'
        )
    return found


def classifier_config(source: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the config.json of a reward model that is trained from `source`. Raises UserError if there is none."""
    config = model_files.read_config(source)
    return as_scalar(config, padding_id(tokenizer, config))


def padding_files(place: Path, pad: str) -> dict[str, str]:
    """Return the files of the tokenizer in `place` that name its padding token, with `pad` as that token."""
    files = (place / name for name in ("tokenizer_config.json", "special_tokens_map.json"))
    settings = {file.name: json.loads(file.read_text()) | {"pad_token": pad} for file in files if file.is_file()}
    return {name: json.dumps(of, indent=2, ensure_ascii=False) + "\n" for name, of in settings.items()}
