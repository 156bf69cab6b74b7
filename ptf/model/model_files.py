"""The files of a checkpoint directory beside its tensors: where the directory of a model lies, and what its
config.json says."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from ptf import storage
from ptf.errors import UserError
from ptf.model import hub
from ptf.model.families import MODULES, family_of
from ptf.model.tensor_files import TensorFiles, has_own_head, has_weights, weight_map
from ptf.storage import file_verification, published_versions

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def locate(path: str, cache: str | None = None, verify_up_to: float | None = float("inf")) -> Path:
    """Return the local directory of a model (`local_directory`). Raises UserError if there is none, it has no
    config.json or is not what was written."""
    local = local_directory(path, cache, verify_up_to)
    if not (local / "config.json").is_file():
        if (local / "adapter_config.json").is_file():
            raise UserError(
                f"model.path: {path} is an adapter and not a whole model; give the merged one "
                "(publish.what: merged or both)"
            )
        raise UserError(f"model.path: {path} is not a model: it has no config.json")
    if (index := local / "model.safetensors.index.json").is_file():
        weight_map(index)  # checked here, because transformers and vLLM would follow it to any file
    return local


def local_directory(path: str, cache: str | None = None, verify_up_to: float | None = float("inf")) -> Path:
    """Return the local directory of a model or an adapter: a directory (of versions: the one named by the pointer), a
    URI (copied into `cache`), or a Hugging Face id (`owner/name`, `owner/name@revision`), through its cache. A
    published version and a copy are verified first (ptf.storage.file_verification), up to `verify_up_to` bytes; None
    is for callers that read no weights, and verifies nothing. Raises UserError if there is no such model."""
    path = published_versions.latest(path) or path
    if "://" in path:
        into = cache or os.path.join("runs", "models")
        if verify_up_to is None:
            return Path(storage.localize(path, into, without=hub.COPIES))
        local = Path(file_verification.localized(path, into, verify_up_to, without=hub.COPIES))
        published_versions.raise_if_damaged(local, path, verify_up_to, without=hub.COPIES)
        return local
    if os.path.isdir(path):
        if verify_up_to is not None:
            published_versions.raise_if_damaged(Path(path), path, verify_up_to)
        return Path(path)
    if hub.is_id(path):
        return hub.fetch(path)
    raise UserError(f"model.path: there is no directory {path}")


def read_config(directory: Path) -> dict[str, Any]:
    """Return the config.json of a directory, untied if its tensors are (`unties`). Raise UserError if it is not a
    JSON object."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise UserError(f"model.path: {directory}/config.json is not a JSON object")
    parts = [config, *([config["text_config"]] if config.get("text_config") else ())]
    stated = [part["tie_word_embeddings"] for part in parts if "tie_word_embeddings" in part]
    if (not stated or stated[0] is not False) and has_own_head(directory):
        for part in parts:
            part["tie_word_embeddings"] = False
    return config


def unties(directory: Path) -> bool:
    """Return whether a directory stores a head unlike the embedding that its config.json ties it to, or a default
    does. It is not tied, as in transformers 5."""
    return read_config(directory) != json.loads((directory / "config.json").read_text())


def export_dtype(directory: Path) -> torch.dtype:
    """Return the dtype in which a checkpoint's weights are stored, by its config.json."""
    config = read_config(directory)
    text = config.get("text_config") or {}
    name = (
        config.get("dtype")
        or config.get("torch_dtype")
        or text.get("dtype")
        or text.get("torch_dtype")
        or ("bfloat16" if "quantization_config" in config else "float32")
    )
    if name not in DTYPES:
        raise UserError(f"model.path: {directory}/config.json stores weights as {name}; ptf trains {', '.join(DTYPES)}")
    return DTYPES[name]


def stored_dtypes(directory: Path) -> dict[str, torch.dtype]:
    """Return the dtypes of a checkpoint's tensors, by the names that ptf writes; {} where there are none."""
    if not has_weights(directory):
        return {}
    kind = read_config(directory)["model_type"]
    with TensorFiles(directory, family_of({"model_type": kind}).aliases if kind in MODULES else None) as files:
        return {name: files.dtype(name) for name in files.names}
