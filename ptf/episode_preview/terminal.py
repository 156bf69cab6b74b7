"""A preview as text: its conversations, and tables of rewards, times and counts."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ptf.episode_preview.report import Preview, PreviewEpisode, median_and_max
from ptf.inspection.terminal import marked

BAR = 40  # characters of the longest bar
BINS = 10
MOST_LISTED = 10  # reasons and differences


def show(preview: Preview, console: Console, *, conversations: bool = True) -> None:
    """Print the preview, the conversations of its episodes first."""
    console.print(f"policy: {preview.policy}", markup=False)
    if conversations:
        console.print(
            f"what the policy answered is {'green' if console.is_terminal else 'in ⟦ ⟧'}", style="dim", markup=False
        )
        for number, episode in enumerate(preview.episodes):
            _conversation(number, episode, console)
    console.print(_times(preview))
    scoring = f", scoring {preview.scoring_seconds:.3g} s" if preview.scoring_seconds >= 0.001 else ""
    counts = ", ".join(f"{name} {value:g}" for name, value in preview.counts.items())
    counted = f"{len(preview.episodes)} episodes in {preview.seconds:.3g} s{scoring}\ncounts of all episodes: {counts}"
    for line in (*_reward_lines(preview.rewards), counted):
        console.print(line, markup=False, soft_wrap=True)
    for line in _problem_lines(preview):
        console.print(line, style="yellow", markup=False, soft_wrap=True)
    verdict = "yes" if preview.repeatable else "no" if preview.has_result else "not known: no episode has a result"
    console.print(f"repeatable: {verdict}", style="green" if preview.repeatable else "yellow", markup=False)


def _conversation(number: int, episode: PreviewEpisode, console: Console) -> None:
    prompt, outcome = episode.prompt, "not scored" if episode.reward is None else f"reward {episode.reward:g}"
    outcome = outcome if episode.reason is None else "no result"
    turns = "1 turn" if len(episode.turns) == 1 else f"{len(episode.turns)} turns"
    title = f"episode {number}: {prompt.source}, prompt {prompt.index}, {outcome}, {turns} in {episode.seconds:.3g} s"
    cut = "" if episode.complete or episode.reason else ", truncated at a limit"
    console.print(f"\n{title}{cut}", style="bold", markup=False)
    if episode.reason is not None:
        console.print(episode.reason, style="red", markup=False, soft_wrap=True)
    for document in episode.documents:
        console.print(marked(document, console.is_terminal), soft_wrap=True)


def _times(preview: Preview) -> Table:
    seconds = {
        "a turn": [turn.seconds for turn in preview.turns],
        "of it without the policy": [turn.other_seconds for turn in preview.turns],
        "until the first turn": [episode.start_seconds for episode in preview.episodes],
        "an episode": [episode.seconds for episode in preview.episodes],
    }
    table = Table("seconds of", "median", "max", box=SIMPLE)
    for name, values in seconds.items():
        if found := median_and_max(values):
            table.add_row(name, f"{found['median']:.3g}", f"{found['max']:.3g}")
    return table


def _reward_lines(rewards: Sequence[float]) -> Iterator[str]:
    """Yield the mean of the rewards and their distribution: each value if there are few, otherwise ranges of equal
    width."""
    if not rewards:
        yield "no episode has a reward"
        return
    yield f"rewards: mean {np.mean(rewards):.4g}, standard deviation {np.std(rewards):.4g}"
    values, counts = np.unique(rewards, return_counts=True)
    names = [f"{value:g}" for value in values]
    if len(values) > BINS:
        counts, edges = np.histogram(rewards, BINS)
        names = [f"{low:.3g} – {high:.3g}" for low, high in pairwise(edges)]
    for name, count in zip(names, counts.tolist(), strict=True):
        yield f"{name:>17} {count:>5} {'█' * max(count > 0, round(BAR * count / counts.max()))}"


def _problem_lines(preview: Preview) -> list[str]:
    """Return lines about episodes without a result, responses that should get no reward, and what does not repeat."""
    lines = [f"warning: {line}" for line in preview.warnings]
    listed = {
        f"{len(preview.no_result)} of {len(preview.episodes)} episodes have no result:": preview.no_result,
        "played again with the same seeds, these differ, so a resumed run does not repeat to the bit:": (
            preview.differences
        ),
    }
    for title, found in listed.items():
        if found:
            lines += [title, *(f"  {line}" for line in found[:MOST_LISTED])]
        if len(found) > MOST_LISTED:
            lines.append(f"  and {len(found) - MOST_LISTED} more")
    return lines
