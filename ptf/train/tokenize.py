"""Tokenization of a job's data to parquet, once, under a name that depends on all that decides the ids."""

import hashlib
import time

from ptf.config import Job, fingerprint
from ptf.config.plugin_code import code_of
from ptf.data import tokenized
from ptf.data.encode import FORM
from ptf.data.sources.files import described, resolve_files
from ptf.data.sources.rows import specs
from ptf.data.token_file import FORM as STORED
from ptf.data.tokenizer import Tokenizer
from ptf.recipes import registry
from ptf.train.dataloading import read_keys
from ptf.workspace import progress

SETTINGS = (
    "recipe",
    "algo",
    "data.seq_len",
    "data.too_long",
    "data.train_on",
    "data.max_bad_rows_share",
)


def tokenize(job: Job, tokenizer: Tokenizer, processes: int, settings: str | None = None) -> dict[str, str]:
    """Tokenize all sources that are not tokenized yet; return their directories by source.

    Data that was made from the same files with the same tokenizer and settings is reused. `settings`: a fingerprint of
    those; by default the job's.
    """
    recipe, data = registry.build(job), job.data
    for reason in code_of(job.model_dump()["recipe"]).unseen:
        print(f"tokenize: {reason}", flush=True)
    directories: dict[str, str] = {}
    made_by = settings or fingerprint(job, *SETTINGS), tokenizer.identity["fingerprint"], FORM, STORED
    for name, source in {**data.sources, **data.validation}.items():
        if source.kind == "tokenized":
            continue
        source_files = resolve_files(source.path)
        print("\n".join(described(name, source.path, source_files)), flush=True)
        files = list(source_files.stamps.items())
        shape = source.kind, sorted(source.columns.items()), source.limit
        key = hashlib.sha256(repr((files, made_by, shape)).encode()).hexdigest()[:16]
        directories[name] = f"{job.output}/tokenized/{name}-{key}"
        began = time.perf_counter()
        with progress.stage("tokenize"):
            counts = tokenized.write(
                directories[name],
                specs({name: source}, None, job.verify_bytes)[name],
                name,
                encode=lambda row, source: recipe.encode(row, tokenizer, source),
                seq_len=data.seq_len,
                too_long=data.too_long,
                tokenizer=tokenizer,
                config_fingerprint=key,
                max_bad_rows_share=data.max_bad_rows_share,
                processes=processes,
                read_keys=read_keys(job, recipe),
            )
        print(
            f"tokenize: {name}: {counts['rows']} rows, {counts['samples']} samples, "
            f"{counts['tokens']} tokens ({counts['trained']} trained), "
            f"expansion ×{counts['expansion']:.3g}, {counts['too_long']} too long, {counts['truncated']} cut, "
            f"{counts['bad']} bad, {time.perf_counter() - began:.1f} s → "
            f"{directories[name]}",
            flush=True,
        )
    return directories
