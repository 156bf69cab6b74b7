"""The tokenize stage: tokenize the training and validation data of an offline recipe, to parquet."""

import os
from pathlib import Path

from ptf.config import Job, fingerprint
from steps.artifact import Artifact


def tokenize(job: Job, artifact: Artifact) -> Artifact:
    """Tokenize the sources, or reuse tokenized data that were made from the same files with the same tokenizer and
    settings.

    Does nothing for online recipes, which render prompts during training, and with `data.pretokenize: false`.
    """
    from ptf.recipes import registry

    if registry.is_online(job) or not job.data.pretokenize:
        print("tokenize: nothing to do, because tokenization happens during training", flush=True)
        return artifact

    from ptf.data.added import tokenizer_of
    from ptf.model.bridge import locate
    from ptf.train.job_tokenizer import rendered
    from ptf.train.tokenize import SETTINGS
    from ptf.train.tokenize import tokenize as tokenized

    resolved = artifact.resolve(job)
    model = resolved.model
    tokenizer = tokenizer_of(
        model.tokenizer or str(locate(model.path, model.revision, verify_up_to=job.verify_bytes)), model.tokens
    )
    tokenizer = rendered(resolved, tokenizer, Path(job.output) / artifact.run_name)
    made = tokenized(resolved, tokenizer, len(os.sched_getaffinity(0)), fingerprint(job, *SETTINGS))
    return artifact.with_changes(tokenized=made)
