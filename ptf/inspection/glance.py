"""How long a run will be, in a line of `ptf check`: where it can be told at once, from what lies on this machine."""

import glob

from ptf.config import Job

MOST_BYTES = 256 << 20  # of the sources' files: to count the rows of lines they are read
# that are not tokenized, and are encoded for exact numbers; else an interval, from the first rows of each source
FEW_ROWS = 2000
HOW = "`ptf inspect` and `ptf check --dry-run` say how often it passes over its data, and how many steps that takes"


def glance(job: Job) -> str:
    """Return passes over each source, and steps; or why they are not known, and how to learn them. Asks no network
    and imports torch only where all that it needs is there. Raises UserError for data that cannot be read."""
    if there := _missing(job):
        return f"{there}; {HOW}"
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
    """Return what is not on this machine, or not made yet."""
    for name, source in job.data.sources.items():
        if source.path.startswith("prepare:") or not glob.glob(source.path.removeprefix("file://").rstrip("/")):
            return f"data.sources.{name}: {source.path} is not here"
    model = job.model.tokenizer or job.model.path
    return None if glob.glob(f"{glob.escape(model)}/tokenizer*.json") else f"the tokenizer of {model} is not here"
