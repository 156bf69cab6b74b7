"""The report of `ptf inspect` on a job's data, as plain values and as the JSON object that it prints.

Rows go through the same encoder, mixer and packer as in training. Numbers for more rows than were read are
extrapolated, and the report marks them.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ptf.compute.device_defaults import settled
from ptf.config import Job
from ptf.config.tree import Problems
from ptf.data.document import Document, PackUnit
from ptf.data.encode import encode_prompt
from ptf.data.forms import Row
from ptf.data.survey import SourceSurvey, Survey, survey
from ptf.data.tokenizer import Tokenizer
from ptf.data.training_length import BLOCKS, DataPlan
from ptf.errors import UserError
from ptf.recipes import registry
from ptf.run import resolved
from ptf.train.dataloading import make_partitions, preview_data
from ptf.train.job_tokenizer import job_tokenizer

FEW_ROWS = 2000  # rows of each source that are read if all sources together have more than `ALL_ROWS`
ALL_ROWS = 100_000
COSTLY = 2.0  # expansion above which the report gives advice


@dataclass(frozen=True, slots=True)
class Report:
    """The data of a job as training will see it."""

    job: Job
    survey: Survey
    tokenizer: Tokenizer
    planned: DataPlan | None  # None if there is no sample to train on
    orders: Mapping[str, str]  # the order in which each source is read, in words

    @property
    def expansion(self) -> float:
        """Tokens of all samples divided by the tokens of each conversation's longest sample, over all sources.

        This is how many times as many tokens are trained because conversations are split.
        """
        counts = [source.counts for source in self.survey.sources]
        return sum(c["tokens"] for c in counts) / max(1, sum(c["whole"] for c in counts))


def report(job: Job, rows: int | None, samples: int) -> Report:
    """Read the first `rows` rows of each source and return the report, with the first `samples` samples of each.

    If `rows` is None, all rows are read if the sources together have at most `ALL_ROWS`, otherwise the first `FEW_ROWS`
    of each. Runs `data.prepare` if its output does not exist. Raises UserError for data that cannot be read.
    """
    job = settled(resolved(job))
    recipe = registry.build(job)
    tokenizer = job_tokenizer(job, None, verify_up_to=None)
    partitions = make_partitions(job, recipe, tokenizer)
    if job.rollout:
        sources = {name: replace(spec, kind="prompt") for name, spec in partitions.sources.items()}
        room = job.data.seq_len - job.rollout.max_new_tokens
        partitions = replace(partitions, sources=sources, encode=partial(_prompt, tokenizer=tokenizer), seq_len=room)
    known = [partitions.opened(name)[0].rows for name in partitions.sources]
    default = ALL_ROWS if None not in known and sum(n or 0 for n in known) <= ALL_ROWS else FEW_ROWS
    surveyed = survey(partitions, sequences=job.train.global_batch_sequences, limit=rows or default, examples=samples)
    if not any(source.counts["samples"] for source in surveyed.sources):
        return Report(job, surveyed, tokenizer, None, {})
    return Report(job, surveyed, tokenizer, *preview_data(job, partitions))


def _prompt(row: Row, source: str, tokenizer: Tokenizer) -> list[PackUnit]:
    """Encode a prompt as a sample of which nothing is trained."""
    tokens = encode_prompt(row, tokenizer, source, 0).tokens
    return [(Document(tokens, np.zeros(len(tokens), np.float32), source),)]


def spans(tokens: np.ndarray, weights: np.ndarray, tokenizer: Tokenizer) -> list[tuple[str, float]]:
    """Return a text in pieces of equal weight, each with its weight; weight 0 is context."""
    changes = ((weights[1:] != weights[:-1]).nonzero()[0] + 1).tolist()
    edges = itertools.pairwise([0, *changes, len(tokens)])
    return [(tokenizer.decode(tokens[start:end]), float(weights[start])) for start, end in edges if end > start]


def as_dict(report: Report) -> dict[str, Any]:
    """Return the report as JSON values: each source's rows, samples, passes and omissions; the steps, the expansion and
    the first samples."""
    return {
        "sources": {source.name: _source(source, report.planned) for source in report.survey.sources},
        "steps": round(sum(report.planned.steps) / 2) if report.planned else 0,
        "steps_exact": report.planned is None or report.planned.steps[0] == report.planned.steps[1],
        "expansion": round(report.expansion, 6),
        "samples": _samples(report),
    }


def outlook(report: Report) -> list[str]:
    """Return sentences about how long the run will be and in which order the sources are read."""
    lines = [f"The run as configured: {report.planned.describe()}."] if report.planned else []
    return lines + [f"Source {name} is read {order}." for name, order in report.orders.items() if order != BLOCKS]


def advice(report: Report) -> list[str]:
    """Return sentences that recommend changes to the config, if splitting conversations makes the run much longer."""
    if report.expansion <= COSTLY:
        return []
    return [
        f"Splitting conversations makes the run {report.expansion:.2g} times as long: "
        "the template renders earlier turns differently than when they were the last turn, "
        "so each turn becomes a separate sample. `data.share_prefixes: true` (recipe sft) "
        "processes the prefix that they share once; `data.train_on: last` trains "
        "only the last turn of each conversation."
    ]


def _source(source: SourceSurvey, planned: DataPlan | None) -> dict[str, Any]:
    passes = planned.passes[source.name] if planned else None
    return {
        "rows": round(source.rows),
        "samples": round(source.samples),
        "passes": None if passes is None else round(sum(passes) / 2, 6),
        "left_out": dict(source.left_out),
        "unused_rows_share": round(source.unused_rows_share, 6),
        "not_read": list(source.not_read),
        "columns_not_read": list(source.unread),
    }


def _samples(report: Report) -> list[dict[str, Any]]:
    """Return one entry per document. The two responses of a preference have the same number `pair`; other documents
    have none."""
    pairs = itertools.count()
    units = [(source.name, place, unit) for source in report.survey.sources for place, unit in source.examples]
    return [
        {
            **{"source": name, "place": place, "text": report.tokenizer.decode(sample.tokens)},
            **{"ids": sample.tokens.tolist(), "weights": [round(w, 6) for w in sample.loss_weights.tolist()]},
            "pair": pair,
        }
        for name, place, unit in units
        for pair in [next(pairs) if len(unit) > 1 else None]
        for sample in unit
    ]


def errors_as_json(error: UserError) -> str:
    """Return the errors of a refused config as one JSON object: place (file:line), key and message of every problem.

    Place and key are null if the problem has none.
    """
    if isinstance(error, Problems):
        listed = [{"place": str(p.place), "key": p.key or None, "message": p.what} for p in error.problems]
    else:
        listed = [{"place": None, "key": None, "message": str(error)}]
    return json.dumps({"errors": listed}, ensure_ascii=False)
