"""How long a run will be, in a line of `ptf check`: where it can be told at once, from what lies on this machine."""

import glob

from ptf.config import Job

MOST_BYTES = 256 << 20  # of the sources' files: to count the rows of lines they are read
FEW_ROWS = 2000  # that are not tokenized, and are encoded for exact numbers; else an interval, from the first rows of each source
HOW = "`ptf inspect` and `ptf check --dry-run` say how often it passes over its data, and how many steps that takes"


def glance(job: Job) -> str:
    """Passes over each source, and steps; or what keeps them from being known, and how to hear of them. Asks no network and imports torch only where all
    that it needs is there. Raises UserError for data that cannot be read."""
    if there := _missing(job):
        return f"{there}; {HOW}"
    from ptf import recipes
    from ptf.data.added import tokenizer_of
    from ptf.data.blocks import Location, found_files
    from ptf.train.reading import specs
    from ptf.train.rendered import rendered
    from ptf.train.takes import takes

    if sum(sum(found_files(Location.of(spec)).sizes) for spec in specs(job.data.sources).values()) > MOST_BYTES:
        return f"the sources have more than {MOST_BYTES >> 20} MiB; {HOW}"
    tokenizer = rendered(job, tokenizer_of(job.model.tokenizer or job.model.path, job.model.tokens), None)
    return takes(job, recipes.build(job), tokenizer, FEW_ROWS)[0].said()


def _missing(job: Job) -> str | None:
    """What is not on this machine, or not made yet."""
    for name, source in job.data.sources.items():
        if source.path.startswith("prepare:") or not glob.glob(source.path.removeprefix("file://").rstrip("/")):
            return f"data.sources.{name}: {source.path} is not here"
    model = job.model.tokenizer or job.model.path
    return None if glob.glob(f"{glob.escape(model)}/tokenizer*.json") else f"the tokenizer of {model} is not here"
