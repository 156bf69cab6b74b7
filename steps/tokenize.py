"""Tokenize once, to parquet, what an offline recipe trains and validates on."""

import hashlib
import os
import time

from ptf.config import Job, fingerprint
from steps.artifact import Artifact


def tokenize(job: Job, artifact: Artifact) -> Artifact:
    """Idempotent: what was made from the same files with the same tokenizer and settings is reused. Online recipes render prompts as they
    go, and so does `data.pretokenize: false`; then there is nothing to do."""
    from ptf import recipes, storage
    from ptf.data import tokenized
    from ptf.data.added import tokenizer_of
    from ptf.model.bridge import locate
    from ptf.train.fit import specs

    recipe = recipes.build(job)
    resolved = artifact.resolve(job)
    if recipe.online or not job.data.pretokenize:
        print("tokenize: on the fly, nothing to do ahead", flush=True)
        return artifact
    data = resolved.data
    tokenizer = tokenizer_of(resolved.model.tokenizer or str(locate(resolved.model.path, resolved.model.revision)), resolved.model.tokens)
    made: dict[str, str] = {}
    settings = ("recipe", "algo", "data.seq_len", "data.too_long", "data.train_on", "data.on_bad_row", "data.max_bad")
    made_by = fingerprint(job, *settings), tokenizer.fingerprint()
    processes = len(os.sched_getaffinity(0))
    for name, source in {**data.sources, **data.validation}.items():
        if source.kind == "tokenized":
            continue
        files = [(f, *_stamp(f)) for f in storage.listing(source.path)]
        shape = source.kind, sorted(source.columns.items()), source.limit
        key = hashlib.sha256(repr((files, made_by, shape)).encode()).hexdigest()[:16]
        made[name] = f"{job.output}/tokenized/{name}-{key}"
        began = time.perf_counter()
        counts = tokenized.write(
            made[name], specs({name: source})[name], name, encode=lambda row, source: recipe.encode(row, tokenizer, source), seq_len=data.seq_len,
            too_long=data.too_long, tokenizer=tokenizer, config_fingerprint=key,
            max_bad=data.max_bad if data.on_bad_row == "skip" else None, processes=processes,
        )  # fmt: skip
        spent = time.perf_counter() - began
        print(
            f"tokenize: {name}: {counts['rows']} rows, {counts['samples']} samples, {counts['tokens']} tokens ({counts['trained']} trained), "
            f"expansion ×{counts['expansion']:.3g}, {counts['dropped']} dropped, {counts['truncated']} cut, {counts['bad']} bad, {spent:.1f} s → "
            f"{made[name]}", flush=True,
        )  # fmt: skip
    return artifact.but(tokenized=made)


def _stamp(path: str) -> tuple[int, int]:
    """Size and time of a local file; a remote one is named by its URI alone."""
    if not os.path.exists(path):
        return (0, 0)
    info = os.stat(path)
    return info.st_size, info.st_mtime_ns
