"""A preview as one self-contained HTML page: it loads no scripts, fonts or images."""

import json
from collections.abc import Iterable, Iterator
from html import escape

from ptf.episode_preview.report import Preview, PreviewEpisode
from ptf.episode_preview.words import count_lines, reward_bins, reward_lines, time_rows, title

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --mark: #2e9e4f38; --edge: #2e9e4f; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid var(--line); font-weight: normal; }
th { opacity: .7; } th:first-child, td:first-child, td:last-child { text-align: left; }
.bar { display: inline-block; height: .8rem; vertical-align: middle; background: #3b7dd8; }
.warn { border-left: 4px solid #d9822b; padding-left: .8rem; } .fail { border-color: #c0504d; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft); padding: .8rem; margin: .3rem 0 1rem;
      font-size: 13px; }
mark { background: var(--mark); color: inherit; border-bottom: 2px solid var(--edge); }
details { border-bottom: 1px solid var(--line); padding: .4rem 0; } summary { cursor: pointer; }
"""


def page(preview: Preview) -> str:
    """Return the preview as an HTML document."""
    recipe = preview.job.recipe if isinstance(preview.job.recipe, str) else preview.job.recipe.use
    seen = "The same seeds did not play the same." if preview.has_result else "Whether they repeat is not known."
    repeats = "The same seeds played the same twice." if preview.repeatable else seen
    parts = [
        f"<h1>Episodes of {escape(recipe)} job {escape(preview.job.output)}</h1>",
        f"<p>Policy: {escape(preview.policy)}. {repeats}</p>",
        *(f"<p>{escape(line)}</p>" for line in count_lines(preview)),
        *_problems(preview),
        "<h2>Rewards</h2>",
        *_rewards(preview),
        "<h2>Times</h2>",
        _table(("seconds of", "median", "max"), time_rows(preview)),
        "<h2>Episodes</h2>",
        "<p>What the policy answered is <mark>marked</mark>; the rest is context.</p>",
        *(_episode(number, episode) for number, episode in enumerate(preview.episodes)),
    ]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>ptf try: '
        f"{escape(preview.job.output)}</title><style>{STYLE}</style></head>"
    )
    return f"{head}<body>{''.join(parts)}</body></html>\n"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _problems(preview: Preview) -> Iterator[str]:
    for line in preview.warnings:
        yield f'<p class="warn">Warning: {escape(line)}</p>'
    found = {"Without a result": preview.no_result, "Different when played again": preview.differences}
    for name, lines in found.items():
        if lines:
            listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
            yield f'<div class="warn fail">{name}: {len(lines)}<ul>{listed}</ul></div>'


def _rewards(preview: Preview) -> Iterator[str]:
    yield f"<p>{escape(reward_lines(preview)[0])}</p>"
    bins = reward_bins(preview)
    most = max((count for _, count in bins), default=1)
    rows = (
        f"<tr><td>{escape(name)}</td><td>{count}</td>"
        f'<td><span class="bar" style="width:{30 * count / most:.2f}rem"></span></td></tr>'
        for name, count in bins
    )
    yield f"<table>{''.join(rows)}</table>"


def _episode(number: int, episode: PreviewEpisode) -> str:
    parts = [f"<details open><summary>{escape(title(number, episode))}</summary>"]
    if episode.reason is not None:
        parts.append(f'<p class="warn fail">{escape(episode.reason)}</p>')
    for document in episode.documents:
        pieces = (f"<mark>{escape(p.text)}</mark>" if p.sampled else escape(p.text) for p in document)
        parts.append(f"<pre>{''.join(pieces)}</pre>")
    if episode.turns:
        rows = (
            (f"{i}", f"{turn.policy_seconds:.3g}", f"{turn.other_seconds:.3g}")
            for i, turn in enumerate(episode.turns, 1)
        )
        parts.append(_table(("turn", "seconds of the policy", "of what follows"), rows))
    if episode.counts:
        parts.append(f"<p>{escape(', '.join(f'{name} {value:g}' for name, value in episode.counts.items()))}</p>")
    row = json.dumps(dict(episode.prompt.row), ensure_ascii=False, default=str, indent=1)
    return "".join([*parts, f"<details><summary>row</summary><pre>{escape(row)}</pre></details></details>"])
