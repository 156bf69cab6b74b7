"""Sentences and numbers about a preview, for the terminal and for the page."""

from collections.abc import Iterator, Sequence

import numpy as np

from ptf.episode_preview.report import Preview, PreviewEpisode, median_and_max

BAR = 40  # characters of the longest bar
BINS = 10
MOST_LISTED = 10  # reasons and differences


def title(number: int, episode: PreviewEpisode) -> str:
    """Return the heading of an episode: its prompt, outcome, turns and time."""
    outcome = "not scored" if episode.reward is None else f"reward {episode.reward:g}"
    parts = [f"episode {number}: {episode.where}", outcome if episode.reason is None else "no result"]
    turns = "1 turn" if len(episode.turns) == 1 else f"{len(episode.turns)} turns"
    parts.append(f"{turns} in {episode.seconds:.3g} s")
    return ", ".join([*parts, *([] if episode.complete or episode.reason else ["truncated at a limit"])])


def time_rows(preview: Preview) -> Iterator[tuple[str, str, str]]:
    """Yield what takes time, with its median and its largest seconds."""
    seconds = {
        "a turn": [turn.seconds for turn in preview.turns],
        "of it without the policy": [turn.other_seconds for turn in preview.turns],
        "until the first turn": [episode.start_seconds for episode in preview.episodes],
        "an episode": [episode.seconds for episode in preview.episodes],
    }
    for name, values in seconds.items():
        found = median_and_max(values)
        if found:
            yield name, f"{found['median']:.3g}", f"{found['max']:.3g}"


def reward_bins(preview: Preview) -> list[tuple[str, int]]:
    """Return the distribution of the rewards: each value if there are few, otherwise ranges of equal width."""
    values, counts = np.unique(preview.rewards, return_counts=True)
    if len(values) <= BINS:
        return [(f"{value:g}", int(count)) for value, count in zip(values, counts, strict=True)]
    counts, edges = np.histogram(preview.rewards, BINS)
    return [(f"{edges[i]:.3g} – {edges[i + 1]:.3g}", int(count)) for i, count in enumerate(counts)]


def reward_lines(preview: Preview) -> list[str]:
    """Return lines about the rewards."""
    rewards = preview.rewards
    if not rewards:
        return ["no episode has a reward"]
    lines = [f"rewards: mean {np.mean(rewards):.4g}, standard deviation {np.std(rewards):.4g}"]
    most = max(count for _, count in reward_bins(preview))
    return lines + [
        f"{name:>17} {count:>5} {'█' * max(count > 0, round(BAR * count / most))}"
        for name, count in reward_bins(preview)
    ]


def count_lines(preview: Preview) -> list[str]:
    """Return lines about the length of the play, and what was counted."""
    counts = ", ".join(f"{name} {value:g}" for name, value in preview.counts.items())
    scoring = f", scoring {preview.scoring_seconds:.3g} s" if preview.scoring_seconds >= 0.001 else ""
    return [
        f"{len(preview.episodes)} episodes in {preview.seconds:.3g} s{scoring}",
        f"counts of all episodes: {counts}",
    ]


def problem_lines(preview: Preview) -> list[str]:
    """Return lines about episodes without a result, responses that should get no reward, and what does not repeat."""
    lines = [f"warning: {line}" for line in preview.warnings]
    if preview.no_result:
        lines.append(f"{len(preview.no_result)} of {len(preview.episodes)} episodes have no result:")
        lines += _first(preview.no_result)
    if preview.differences:
        lines.append("played again with the same seeds, these differ, so a resumed run does not repeat to the bit:")
        lines += _first(preview.differences)
    return lines


def _first(lines: Sequence[str]) -> list[str]:
    more = [f"  and {len(lines) - MOST_LISTED} more"] if len(lines) > MOST_LISTED else []
    return [f"  {line}" for line in lines[:MOST_LISTED]] + more
