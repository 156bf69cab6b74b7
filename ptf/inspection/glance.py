"""The line of `ptf check` about how long a run will be, if the data on this machine suffice to compute it quickly."""

import glob

from ptf.config import Job

MOST_BYTES = 256 << 20  # largest size of the sources' files together: counting the rows of JSON lines reads them whole
# with up to this many rows that are not tokenized, all are encoded and the numbers are exact; with more, the first rows
# of each source give an interval
FEW_ROWS = 2000
HOW = "`ptf inspect` and `ptf check --dry-run` print the number of passes over the data and of steps"


def glance(job: Job) -> str:
    """Return the passes over each source and the steps, or why they are unknown and which command prints them.

    Does not use the network, and imports torch only if all the files that it needs are on this machine. Raises
    UserError for data that cannot be read.
    """
    if missing := _missing(job):
        return f"{missing}; {HOW}"
    from ptf.data.added import tokenizer_of
    from ptf.data.sources.blocks import Location, resolve_files
    from ptf.recipes import registry
    from ptf.train.data_plan import preview_data
    from ptf.train.job_tokenizer import rendered
    from ptf.train.source_specs import specs

    if sum(sum(resolve_files(Location.of(spec)).sizes) for spec in specs(job.data.sources).values()) > MOST_BYTES:
        return f"the sources have more than {MOST_BYTES >> 20} MiB; {HOW}"
    tokenizer = rendered(job, tokenizer_of(job.model.tokenizer or job.model.path, job.model.tokens), None)
    return preview_data(job, registry.build(job), tokenizer, FEW_ROWS)[0].describe()


def _missing(job: Job) -> str | None:
    """Return a sentence about a source or a tokenizer that is not on this machine, or not made yet; None if all are."""
    for name, source in job.data.sources.items():
        if source.path.startswith("prepare:") or not glob.glob(source.path.removeprefix("file://").rstrip("/")):
            return f"data.sources.{name}: {source.path} is not on this machine"
    model = job.model.tokenizer or job.model.path
    return (
        None
        if glob.glob(f"{glob.escape(model)}/tokenizer*.json")
        else f"the tokenizer of {model} is not on this machine"
    )
