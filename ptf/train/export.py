"""Export of the trained model as a Hugging Face directory, with a probe that the loaded checkpoint must reproduce.

The probe is computed by the model that was trained, before anything is written, so the publish checks compare a loaded
checkpoint with the training run and not with another reading of the same files.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ptf import storage
from ptf.compute.world import World
from ptf.data.batch import Batch
from ptf.data.document import Document
from ptf.data.tokenizer import Tokenizer
from ptf.model import model_files, model_writer
from ptf.model.chunked import sampled_from, token_logprobs
from ptf.model.components import abbreviated
from ptf.model.head import head_output
from ptf.model.model import Model
from ptf.storage import file_verification
from ptf.train.export_settings import classifier_config, generation_files, padding_files

MODEL, PROBE = "model", "probe.json"  # in the run's directory
ADVICE = "run the train stage again: it continues from the last checkpoint and exports again"


def probe_tokens(model: Model) -> np.ndarray:
    """Return 64 fixed tokens, or as many as the model has positions for: int32 [n]."""
    tokens = np.random.default_rng(0).integers(0, model.config.vocab, min(64, model.config.max_positions))
    return np.resize(model.text_tokens.numpy(), model.config.vocab)[tokens].astype(np.int32)


@torch.no_grad()
def probe(model: Model, world: World, tokens: Sequence[int] | np.ndarray | None = None) -> dict[str, list]:
    """Return tokens, by default `probe_tokens`, and the model's log-prob of each given the tokens before it; for
    another head than the language model's, the head's `values` at each token."""
    tokens = probe_tokens(model) if tokens is None else np.asarray(tokens, np.int32)
    batch = Batch.of([[(Document(tokens, np.ones(len(tokens), np.float32)),)]], len(tokens)).to(world.device)
    if model.config.head != "lm":
        values = batch.through(model, partial(head_output, tokens))
        return {"tokens": tokens.tolist(), "values": values.float().cpu().tolist()}
    logprobs = batch.through(model, partial(token_logprobs, **sampled_from(batch))).logprobs
    return {"tokens": tokens.tolist(), "logprobs": logprobs[0, :-1].float().cpu().tolist()}


def export(model: Model, source: Path, directory: Path, world: World, tokenizer: str) -> None:
    """Write the model to `directory`, in the run, and its probe beside it as `probe.json`. Every rank calls it.

    The directory appears only when it is complete.
    """
    loaded, place, tokens = Tokenizer.load(tokenizer), Path(tokenizer), None
    config, files = model_files.read_config(source), generation_files(source, loaded, place)
    if model.config.head == "scalar":
        config = classifier_config(source, loaded)
        pad = config["pad_token_id"]
        # as a reward model reads them: without padding, and with the end of a response at their end and in their middle
        tokens, end = probe_tokens(model), next(iter(loaded.stop_ids), int(not pad))
        tokens[tokens == pad] = end
        tokens[[len(tokens) // 2 - 1, -1]] = end
        files |= padding_files(place, loaded.hf.convert_ids_to_tokens(pad)) if pad != loaded.hf.pad_token_id else {}
    values = probe(model, world, tokens)
    if world.leads:
        write_probe(directory, values)
    model_writer.save_hf(
        model.hf_tensors(source),
        source,
        directory,
        writes=world.leads,
        tokenizer=tokenizer,
        config=config,
        manifest=file_verification.of_run(directory),
        carried=model.carried(source),
        files=files,
    )
    if world.leads:
        print(f"export: {beside(source, directory)}", flush=True)
    world.barrier()


def beside(source: Path, directory: Path) -> str:
    """Say how an export differs from the directory that it was made from: in names and dtypes of tensors, and in chat
    templates."""
    before, after = model_files.stored_dtypes(source), model_files.stored_dtypes(directory)
    if not before:
        return f"{source} has no tensors to compare with"
    theirs, ours = _templates(source), _templates(directory)
    differing = {
        "without": sorted(before.keys() - after.keys()),
        "new": sorted(after.keys() - before.keys()),
        "in another dtype": sorted(n for n in before.keys() & after.keys() if before[n] != after[n]),
        "other chat templates": sorted(n for n in theirs.keys() | ours.keys() if theirs.get(n) != ours.get(n)),
    }
    found = [f"{what}: {abbreviated(names)}" for what, names in differing.items() if names]
    same = f"names and dtypes of {len(after)} tensors and the chat templates are those of {source}"
    return f"beside {source}, {'; '.join(found)}" if found else same


def _templates(directory: Path) -> dict[str, str]:
    """Return the chat templates of a directory by name, wherever they are stored."""
    files = [*directory.glob("chat_template.jinja"), *directory.glob("additional_chat_templates/*.jinja")]
    found = {"default" if file.stem == "chat_template" else file.stem: file.read_text() for file in files}
    settings = directory / "tokenizer_config.json"
    stored = json.loads(settings.read_text()).get("chat_template") if settings.is_file() else None
    by_name = {each["name"]: each["template"] for each in stored} if isinstance(stored, list) else {"default": stored}
    return {name: text for name, text in by_name.items() if text} | found


def write_probe(directory: Path, values: dict[str, list]) -> None:
    """Write what the exported model in `directory` must compute when it is loaded again."""
    storage.write_record(str(directory.with_name(PROBE)), {"lineage": directory.parent.name, **values})


def raise_if_damaged(run: Path, up_to: float) -> None:
    """Raise Corrupt if the exported model or its probe is not what this run wrote."""
    file_verification.raise_if_different(str(run / MODEL), file_verification.of_run(run / MODEL), up_to, ADVICE)
    probe_of(run)


def probe_of(run: Path) -> dict[str, Any]:
    """Read the probe of the run's exported model. Raises Corrupt if it is damaged or of another run."""
    return storage.read_record(str(run / PROBE), ADVICE, {"lineage": run.name})
