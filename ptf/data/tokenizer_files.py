"""The files of a tokenizer: the class of transformers that reads them, how they are written, and the ids that end a
response."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from ptf.errors import UserError

# Model families for which AutoTokenizer follows tokenizer_config.json where that names no class of the family's own.
PLAIN_FAMILIES = frozenset({None, "gemma3", "gemma3_text", "gpt_oss", "llama", "qwen3", "qwen3_moe"})
PLAIN_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})


def tokenizer_class(path: str) -> Any:
    """Return AutoTokenizer, or the class that it would choose where the directory's files leave one choice.

    Importing AutoTokenizer takes 2.7 CPU-seconds in every process of a run, because it imports all of
    `transformers.generation`, scikit-learn and torch._dynamo.
    """
    directory = Path(path)
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text())
        family = (
            json.loads((directory / "config.json").read_text()).get("model_type")
            if (directory / "config.json").exists()
            else None
        )
    except (OSError, ValueError):
        config, family = {}, None
    plain = config.get("tokenizer_class") in PLAIN_CLASSES and "auto_map" not in config and family in PLAIN_FAMILIES
    if plain and (directory / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def write_tokenizer(hf: Any, directory: str | Path) -> None:
    """Write the files of a tokenizer in a form that transformers 4 reads, too.

    transformers 5 writes a class and a list of special tokens of its own, and how it found the files.
    """
    hf.save_pretrained(directory)
    file = Path(directory) / "tokenizer_config.json"
    config = json.loads(file.read_text())
    for name in ("backend", "is_local", "local_files_only"):
        config.pop(name, None)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def read_stop_ids(path: str, revision: str | None, local: bool) -> list[int]:
    """Return the ids that end a response in the model's generation_config.json, or in its config.json where the former
    names none.

    Raises UserError for a file that cannot be read.
    """
    stops = None
    for file in ("generation_config.json", "config.json"):
        try:
            config, _ = PreTrainedConfig.get_config_dict(
                path, revision=revision, local_files_only=local, _configuration_file=file
            )
        except OSError as e:
            if (there := Path(path) / file).is_file():
                raise UserError(
                    f"{there} cannot be read, so the ids that end a response are not known; restore it: "
                    f"{next(iter(str(e).splitlines()), '')}"
                ) from None
            continue
        named = (part.get("eos_token_id") for part in (config, config.get("text_config") or {}))
        stops = next((ids for ids in (stops, *named) if ids is not None), None)
    return stops if isinstance(stops, list) else [] if stops is None else [stops]
