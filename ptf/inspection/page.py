"""The report of `ptf inspect` as one self-contained HTML page: it loads no scripts, fonts or images."""

from collections import Counter
from collections.abc import Iterable, Iterator
from html import escape

import numpy as np

from ptf.data.encode import KINDS
from ptf.data.sample import Sample
from ptf.data.sources.files import shown
from ptf.data.survey import SourceSurvey, Survey
from ptf.inspection.report import Report, advice, outlook, spans

# for the sources, in order
COLOURS = ("#3b7dd8", "#d9822b", "#4a9c4a", "#b0498f", "#7a6ad0", "#2a9d9d", "#b8a030", "#c0504d")
STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --mark: #2e9e4f38; --edge: #2e9e4f; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid var(--line); font-weight: normal; }
th { opacity: .7; } th:first-child, td:first-child, .text td, .text th { text-align: left; } td { white-space: nowrap; }
.text td { white-space: normal; }
.wide { overflow-x: auto; } .warn { border-left: 4px solid #d9822b; padding-left: .8rem; }
.bar { display: inline-block; height: .8rem; vertical-align: middle; } .key { width: .8rem; margin-right: .4rem; }
.sequence { display: flex; height: 1rem; margin: 2px 0; background: var(--soft); } 
.sequence i { border-right: 1px solid Canvas; box-sizing: border-box; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft); padding: .8rem; margin: .3rem 0 1rem;
      font-size: 13px; }
mark { background: var(--mark); color: inherit; border-bottom: 2px solid var(--edge); } 
.pair { border-left: 4px solid var(--line); padding-left: .8rem; }
"""


def page(report: Report) -> str:
    """Return the report as an HTML document."""
    survey, job = report.survey, report.job
    colours = {source.name: COLOURS[i % len(COLOURS)] for i, source in enumerate(survey.sources)}
    recipe = job.recipe if isinstance(job.recipe, str) else job.recipe.use
    parts = [
        f"<h1>Data of {escape(recipe)} job {escape(job.output)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in outlook(report)),
        *(f'<p class="warn">{escape(line)}</p>' for line in advice(report)),
        "<h2>Sources and mixture</h2>",
        *_sources(survey, colours),
        "<h2>Lengths</h2>",
        *_lengths(survey.sources, colours),
        "<h2>Packing</h2>",
        *_packing(report, colours),
        "<h2>Left out</h2>",
        *_left_out(survey),
        "<h2>Samples</h2>",
        "<p>What is trained is <mark>marked</mark>; the rest is context.</p>",
        *_samples(report),
    ]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>ptf inspect: '
        f"{escape(job.output)}</title><style>{STYLE}</style></head>"
    )
    return f"{head}<body>{''.join(parts)}</body></html>\n"


def _key(colour: str) -> str:
    return f'<span class="bar key" style="background:{colour}"></span>'


def _table(header: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "") -> str:
    """Return an HTML table; the cells are HTML already, and are not escaped."""
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><tr>{head}</tr>{body}</table></div>'


def _sources(survey: Survey, colours: dict[str, str]) -> Iterator[str]:
    header = (
        "source",
        "kind",
        "rows read",
        "of",
        "samples",
        "tokens",
        "trained",
        "expansion",
        "median",
        "longest",
        "share of samples",
        "of tokens",
    )
    rows = []
    for s in survey.sources:
        c, (samples, tokens) = s.counts, survey.shares[s.name]
        lengths = [f"{n:,.0f}" for n in np.percentile(s.lengths, [50, 100])] if len(s.lengths) else ["–", "–"]
        total = f"{s.rows:,.0f}" if s.whole else f"about {s.rows:,.0f}"
        bar = f'<span class="bar" style="background:{colours[s.name]};width:{5 * tokens:.2f}rem"></span> {tokens:.1%}'
        rows.append(
            [
                _key(colours[s.name]) + escape(s.name),
                escape(s.kind),
                f"{c['rows']:,}",
                total,
                f"{c['samples']:,}",
                f"{c['tokens']:,}",
                f"{c['trained'] / max(1, c['tokens']):.0%}",
                f"×{s.expansion:.3g}",
                *lengths,
                f"{samples:.1%}",
                bar,
            ]
        )
    yield _table(header, rows)


def _lengths(sources: Iterable[SourceSurvey], colours: dict[str, str]) -> Iterator[str]:
    """Yield a histogram of sample lengths in powers of two, as a table; each bar is divided by source."""
    bins = {source.name: Counter(int(n).bit_length() for n in source.lengths) for source in sources}
    filled = [b for counts in bins.values() for b in counts]
    if not filled:
        yield "<p>No sample to train on.</p>"
        return
    totals = {b: sum(counts[b] for counts in bins.values()) for b in range(min(filled), max(filled) + 1)}
    most = max(totals.values())
    rows = []
    for b, total in totals.items():
        pieces = ((colours[name], 40 * counts[b] / most) for name, counts in bins.items() if counts[b])
        bar = "".join(
            f'<span class="bar" style="background:{colour};width:{max(0.05, width):.2f}rem"></span>'
            for colour, width in pieces
        )
        rows.append(
            [f"{2 ** (b - 1):,} – {2**b - 1:,} tokens", f"{total:,}", f'<div style="text-align:left">{bar}</div>']
        )
    yield _table(("length of a sample", "samples", ""), rows)


def _packing(report: Report, colours: dict[str, str]) -> Iterator[str]:
    """Yield the first packed sequences as bars; the width of each document is its share of the sequence."""
    survey, seq_len = report.survey, report.job.data.seq_len
    if report.job.rollout:
        yield "<p>Prompts are not packed.</p>"
        return
    yield (
        f"<p>Sequences of {seq_len:,} tokens are {survey.fill:.2%} full, "
        f"with {survey.documents:.1f} documents in each.</p>"
    )
    for sequence in survey.packing:
        pieces = (
            (
                f'<i title="{escape(name)}: {n:,} tokens" '
                f'style="width:{100 * n / seq_len:.3f}%;background:{colours[name]}"></i>'
            )
            for name, n in sequence
        )
        yield f'<div class="sequence">{"".join(pieces)}</div>'


def _left_out(survey: Survey) -> Iterator[str]:
    rows = [
        (escape(s.name), escape(reason), f"{count:,}") for s in survey.sources for reason, count in s.left_out.items()
    ]
    yield _table(("source", "reason", "how many"), rows, "text") if rows else "<p>None of the rows that were read.</p>"
    for source in survey.sources:
        if source.not_read:
            yield f"<p>Not read of {escape(source.name)}: {escape(shown(source.not_read))}</p>"
        if source.unread:
            yield f"<p>Columns of {escape(source.name)} that nothing reads: {escape(', '.join(source.unread))}</p>"
        if source.unused_rows_share:
            name = escape(source.name)
            yield f"<p>{source.unused_rows_share:.1%} of the rows of {name} that were read gave no sample.</p>"
    bad = [(escape(s.name), escape(row.where), escape(row.reason)) for s in survey.sources for row in s.bad]
    if bad:
        yield "<h3>The first bad rows</h3>" + _table(("source", "place", "reason"), bad, "text")


def _samples(report: Report) -> Iterator[str]:
    for source in report.survey.sources:
        for place, unit in source.examples:
            names = KINDS["preference"] if source.kind == "preference" else [""] * len(unit)
            documents = "".join(
                f"{name}<pre>{_marked(sample, report)}</pre>" for name, sample in zip(names, unit, strict=True)
            )
            title = f"{escape(source.name)}, {escape(place)}: {sum(map(len, unit)):,} tokens"
            yield f"<h3>{title}</h3>" + (f'<div class="pair">{documents}</div>' if len(unit) > 1 else documents)


def _marked(sample: Sample, report: Report) -> str:
    pieces = []
    for text, weight in spans(sample, report.tokenizer):
        counts = "" if weight in (0, 1) else f' title="counts {weight:g} times"'
        pieces.append(f"<mark{counts}>{escape(text)}</mark>" if weight else escape(text))
    return "".join(pieces)
