"""Tokenizing a job's data once, to parquet, under a name that says what it was made from."""

import hashlib
import time

from ptf.config import Job, fingerprint
from ptf.data import tokenized
from ptf.data.blocks import Location, found_files
from ptf.data.encode import FORM
from ptf.data.files import described
from ptf.data.token_file import FORM as STORED
from ptf.data.tokenizer import Tokenizer
from ptf.recipes import registry
from ptf.train.reading import specs, unread_columns

SETTINGS = ("recipe", "algo", "data.seq_len", "data.too_long", "data.train_on", "data.on_bad_row", "data.max_bad")


def tokenize(job: Job, tokenizer: Tokenizer, processes: int, settings: str | None = None) -> dict[str, str]:
    """Source → directory, of all that are not tokenized yet. What was made from the same files with the same tokenizer and settings is reused.
    `settings`: a fingerprint of those; by default the job's."""
    recipe, data = registry.build(job), job.data
    made: dict[str, str] = {}
    made_by = settings or fingerprint(job, *SETTINGS), tokenizer.fingerprint(), FORM, STORED
    for name, source in {**data.sources, **data.validation}.items():
        if source.kind == "tokenized":
            continue
        found = found_files(Location.of(source))
        print("\n".join(described(name, Location.of(source), found)), flush=True)
        files = list(found.stamps.items())
        shape = source.kind, sorted(source.columns.items()), source.limit
        key = hashlib.sha256(repr((files, made_by, shape)).encode()).hexdigest()[:16]
        made[name] = f"{job.output}/tokenized/{name}-{key}"
        began = time.perf_counter()
        counts = tokenized.write(
            made[name], specs({name: source}, None, job.verify_bytes)[name], name,
            encode=lambda row, source: recipe.encode(row, tokenizer, source), seq_len=data.seq_len,
            too_long=data.too_long, tokenizer=tokenizer, config_fingerprint=key,
            max_bad=data.max_bad if data.on_bad_row == "skip" else None, processes=processes,
        )  # fmt: skip
        spent = time.perf_counter() - began
        for line in unread_columns(specs({name: source})):
            print(f"tokenize: {line}", flush=True)
        print(
            f"tokenize: {name}: {counts['rows']} rows, {counts['samples']} samples, {counts['tokens']} tokens ({counts['trained']} trained), "
            f"expansion ×{counts['expansion']:.3g}, {counts['dropped']} dropped, {counts['truncated']} cut, {counts['bad']} bad, {spent:.1f} s → "
            f"{made[name]}", flush=True,
        )  # fmt: skip
    return made
