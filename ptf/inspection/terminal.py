"""The report of `ptf inspect` as text: a table of sources, lengths, packing, rows that were left out, and samples with
the trained tokens marked."""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ptf.data.sources.files import shown
from ptf.data.survey import SourceSurvey, Survey
from ptf.inspection.report import Report, advice, outlook, spans

BAR = 50  # characters of the longest bar


def show(report: Report, console: Console) -> None:
    """Print the report."""
    survey = report.survey
    below = (*_histogram(survey), *_packing(report), *outlook(report), *advice(report))
    console.print(_sources(survey), *below, sep="\n", markup=False)
    for source in survey.sources:
        _left_out(source, console)
        for place, unit in source.examples:
            mark = "green" if console.is_terminal else "in ⟦ ⟧"
            console.print(
                f"\n{source.name}, {place}: {sum(map(len, unit))} tokens; trained tokens are {mark}",
                style="bold",
                markup=False,
            )
            for sample in unit:
                pieces = spans(sample.tokens, sample.loss_weights, report.tokenizer)
                console.print(marked(pieces, console.is_terminal), soft_wrap=True)


def _sources(survey: Survey) -> Table:
    columns = (
        "rows read",
        "samples",
        "tokens",
        "trained",
        "expansion",
        "p50",
        "p99",
        "max",
        "unused rows",
        "cut",
        "bad",
        "share of samples",
        "of tokens",
    )
    table = Table("source", "kind", *columns, box=SIMPLE)
    for column in table.columns[2:]:
        column.justify = "right"
    for s in survey.sources:
        c, (samples, tokens) = s.counts, survey.shares[s.name]
        rows = f"{c['rows']:,}" if s.whole else f"{c['rows']:,} of about {s.rows:,.0f}"
        trained = f"{c['trained'] / max(1, c['tokens']):.0%}"
        left = (f"{s.unused_rows_share:.1%}", f"{c['truncated']:,}", f"{c['bad']:,}")
        cells = [
            rows,
            f"{c['samples']:,}",
            f"{c['tokens']:,}",
            trained,
            f"×{s.expansion:.3g}",
            *([f"{n:,.0f}" for n in np.percentile(s.lengths, [50, 99, 100])] if len(s.lengths) else ["–"] * 3),
        ]
        table.add_row(s.name, s.kind, *cells, *left, f"{samples:.1%}", f"{tokens:.1%}")
    return table


def _histogram(survey: Survey) -> Iterator[str]:
    """Yield the lines of a histogram of sample lengths, in powers of two, and the longest samples."""
    bins = Counter(int(n).bit_length() for s in survey.sources for n in s.lengths)
    if not bins:
        yield "no sample to train on"
        return
    most = max(bins.values())
    yield "tokens in a sample"
    for b in range(min(bins), max(bins) + 1):
        yield f"{2 ** (b - 1):>9,} – {2**b - 1:>9,} {bins[b]:>8,} {'█' * max(bins[b] > 0, round(BAR * bins[b] / most))}"
    longest = sorted(((n, place, s.name) for s in survey.sources for n, place in s.longest), reverse=True)[:3]
    for n, place, name in longest:
        yield f"longest: {n:,} tokens, {place} (source {name})"
    yield ""


def _packing(report: Report) -> Iterator[str]:
    survey, job = report.survey, report.job
    about = "" if all(s.whole for s in survey.sources) else "about "
    line = f"an epoch of all sources: {about}{survey.tokens:,.0f} tokens"
    if not job.rollout:
        size = f"{job.train.global_batch_sequences} sequences × {job.data.seq_len} tokens"
        line += f", {about}{survey.steps:,.1f} steps of {size}, "
        line += f"{survey.fill:.2%} full with {survey.documents:.1f} documents per sequence"
    yield line


def _left_out(source: SourceSurvey, console: Console) -> None:
    if source.not_read:
        console.print(f"not read of {source.name}: {shown(source.not_read)}", style="yellow", markup=False)
    if source.unread:
        console.print(f"columns of {source.name} that nothing reads: {', '.join(source.unread)}", markup=False)
    for reason, count in source.left_out.items():
        console.print(f"left out of {source.name}: {count:,} × {reason}", style="yellow", markup=False)
    for bad in source.bad:
        console.print(f"bad row: {bad.where} (source {source.name}): {bad.reason}", style="red", markup=False)


def marked(pieces: Iterable[tuple[str, float]], colours: bool) -> Text:
    """Return a text of pieces with those marked that have a weight."""
    out = Text()
    for piece, weight in pieces:
        text = piece.replace("\x1b", "␛")  # the text of another does not control the terminal
        out.append(text if colours or not weight else f"⟦{text}⟧", style="black on green" if weight else "dim")
    return out
