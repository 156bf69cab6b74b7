"""Draw benchmarks/results/main_job.svg from the table of main_job.md: held-out exact match of every run, by seed.

python benchmarks/main_job_figure.py
"""

import re
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
COLOURS = {"untrained": "#b0b0b0", "SFT": "#7aa6d8", "GRPO": "#1f5fa8", "GRPO, shuffled answers": "#d8a07a"}
WIDTH, HEIGHT, LEFT, TOP, BASE = 640, 250, 44, 46, 210  # pixels; BASE is where 0 lies


def table(page: str) -> list[dict[str, str]]:
    """The rows of the page's first table, by the names of its columns."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    end = next(i for i, row in enumerate(cells) if i > 1 and len(row) != len(cells[0])) if len(cells) > 2 else 0
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:end]]


def figure(page: str) -> str:
    """SVG: a group of bars for each seed, and one bar for each run of that seed."""
    facts = {name: re.search(rf"^{name}: `?([^`\n]*?)`? *$", page, re.MULTILINE) for name in ("Hardware", "Date")}
    said = ", ".join(found[1] for found in facts.values() if found)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13">Held-out exact match (greedy answers, 500 questions): {said}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = height(share)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{share:.2f}</text>')
    for place, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + 130 * place
        parts.append(f'<rect x="{x}" y="27" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="36">{name}</text>')
    rows = table(page)
    span = (WIDTH - LEFT - 10) / len(rows)
    for number, row in enumerate(rows):
        start = LEFT + number * span
        for place, (name, colour) in enumerate(COLOURS.items()):
            parts += bar(start + 16 + place * 42, row[name].partition("/")[0].strip(), colour)
        parts.append(f'<text x="{start + span / 2:.0f}" y="{BASE + 20}" text-anchor="middle">seed {row["seed"]}</text>')
    return "\n".join([*parts, "</svg>", ""])


def bar(x: float, value: str, colour: str) -> list[str]:
    """A bar with its number above it; nothing where there was no run."""
    if value == "–":
        return []
    y = height(float(value))
    return [
        f'<rect x="{x:.0f}" y="{y}" width="36" height="{BASE - y}" fill="{colour}"/>',
        f'<text x="{x + 18:.0f}" y="{y - 3}" text-anchor="middle" font-size="11">{float(value):.2f}</text>',
    ]


def height(share: float) -> int:
    """Where a share lies, in pixels from the top."""
    return round(BASE - share * (BASE - TOP - 12))


if __name__ == "__main__":
    (RESULTS / "main_job.svg").write_text(figure((RESULTS / "main_job.md").read_text()))
