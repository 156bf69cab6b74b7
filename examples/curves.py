"""Curves of a run as a picture that Jupyter shows, drawn as SVG so that nothing else has to be installed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COLOURS = ("#1f5fa8", "#d8824a", "#4a9a5b", "#a04a9a")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BASE = 640, 260, 56, 630, 30, 230  # pixels; BASE is where the lowest value lies


@dataclass(frozen=True)
class Curves:
    """The values of some columns of a run's metrics over its steps."""

    points: dict[str, list[tuple[float, float]]]
    """Column → (step, value), of each step that has a value of it."""

    @classmethod
    def of(cls, metrics: Path, columns: Sequence[str]) -> "Curves":
        """Read columns of a metrics.jsonl. Raises ValueError for a column without any value."""
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        points = {name: [(row["step"], row[name]) for row in rows if name in row] for name in columns}
        if missing := [name for name, values in points.items() if not values]:
            raise ValueError(f"{metrics} has no values of {', '.join(missing)}; it has {', '.join(sorted(rows[-1]))}")
        return cls(points)

    def _repr_svg_(self) -> str:
        """Return the picture; Jupyter calls this for the last value of a cell."""
        steps = [step for values in self.points.values() for step, _ in values]
        heights = [value for values in self.points.values() for _, value in values]
        first, last, low, high = min(steps), max(steps), min(heights), max(heights)

        def x(step: float) -> float:
            return LEFT + (RIGHT - LEFT) * (step - first) / ((last - first) or 1)

        def y(value: float) -> float:
            return BASE - (BASE - TOP) * (value - low) / ((high - low) or 1)

        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" viewBox="0 0 {WIDTH} {HEIGHT}"'
            ' font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        ]
        for value in (low, (low + high) / 2, high):
            parts.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#dddddd"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        for step, anchor in ((first, "start"), (last, "end")):
            parts.append(f'<text x="{x(step):.1f}" y="{BASE + 18}" text-anchor="{anchor}">step {step:g}</text>')
        for place, ((name, values), colour) in enumerate(zip(self.points.items(), COLOURS, strict=False)):
            line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in values)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            for step, value in values if len(values) < 20 else []:
                parts.append(f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="3" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + 150 * place}" y="18" fill="{colour}">{name}</text>')
        return "\n".join([*parts, "</svg>"])
