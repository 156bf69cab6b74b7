"""Charts of metrics.jsonl: related columns share one chart, and the size of a chart does not grow with the run."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptf.workspace.json_lines import json_lines

POINTS = 500  # most points in one chart, since the page contains the data
# column → chart; the chart of any other column is its name up to the first slash
SHARES = {
    "reward_std": "reward",
    "approx_kl": "kl",
    "kl_reference": "kl",
    "kl_teacher": "kl",
    **dict.fromkeys(("logprob_diff_mean", "logprob_diff_share", "logprob_diff_max"), "logprob_diff"),
}
FIRST = (  # charts that come first, in this order
    "loss",
    "reward",
    "kl",
    "entropy",
    "clip_share",
    "logprob_diff",
    "response_length",
    "grad_norm",
    "lr",
    "tokens_per_s",
    "step_tokens_per_s",
    "mfu",
    "seconds",
)
NEVER = ("step", "time")  # not drawn: the axis, and the time of day

Row = Mapping[str, float]


def read(path: Path) -> list[Row]:
    """Return the finite numbers of each row that has a step."""
    rows = [
        {key: value for key, value in row.items() if type(value) in (int, float) and math.isfinite(value)}
        for row in json_lines(path)
    ]
    return [row for row in rows if "step" in row]


def charts(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Return the Vega-Lite specification of each chart by title, in the order of `FIRST`, then of appearance."""
    groups: dict[str, list[str]] = {}
    for column in dict.fromkeys(key for row in rows for key in row if key not in NEVER):
        groups.setdefault(SHARES.get(column, column.partition("/")[0]), []).append(column)
    order = sorted(groups, key=lambda title: FIRST.index(title) if title in FIRST else len(FIRST))
    return {title: spec(title, groups[title], rows) for title in order}


def spec(title: str, columns: list[str], rows: list[Row]) -> dict[str, Any]:
    """Return the Vega-Lite specification of one chart."""
    curves = {key: thin([row for row in rows if key in row], max(1, POINTS // len(columns))) for key in columns}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": title,
        "data": {
            "values": [
                {"step": row["step"], "value": row[key], "of": key} for key, curve in curves.items() for row in curve
            ]
        },
        "mark": {"type": "line", "point": len(rows) < 50, "tooltip": True},
        "encoding": {
            "x": {"field": "step", "type": "quantitative"},
            "y": {"field": "value", "type": "quantitative", "title": None, "scale": {"zero": False}},
            "color": {
                "field": "of",
                "type": "nominal",
                "title": None,
                "legend": {"orient": "bottom"} if len(columns) > 1 else None,
            },
        },
        "width": 340,
        "height": 200,
    }


def timeline(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the Vega-Lite specification of when each role of a run computed, of rows of its `timeline.jsonl`."""
    values, starts, begin = [], [], 0.0
    for row in rows:
        starts.append({"at": begin, "step": row["step"]})
        values += [
            {"role": role, "phase": phase, "from": begin + start, "to": begin + end, "step": row["step"]}
            for role, phase, start, end in row["phases"]
        ]
        begin += row["seconds"]
    x = {"type": "quantitative", "title": "seconds"}
    bars = {
        "data": {"values": values},
        "mark": {"type": "bar", "tooltip": True},
        "encoding": {
            "x": {"field": "from", **x},
            "x2": {"field": "to"},
            "y": {"field": "role", "type": "nominal", "title": None},
            "color": {"field": "phase", "type": "nominal", "title": None, "legend": {"orient": "bottom"}},
        },
    }
    steps = {"data": {"values": starts}, "mark": "rule", "encoding": {"x": {"field": "at", **x}}}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": f"timeline, steps {rows[0]['step']} to {rows[-1]['step']}",
        "layer": [bars, steps],
        "width": 720,
        "height": 40 * len({value["role"] for value in values}),
    }


def thin(rows: list[Row], most: int) -> list[Row]:
    """Return at most `most` rows, evenly spaced, including the last one."""
    return rows[:: -max(1, math.ceil(len(rows) / most))][::-1]
