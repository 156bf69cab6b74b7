"""A preview as text: its conversations, and tables of rewards, times and counts."""

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ptf.episode_preview.report import Preview, PreviewEpisode
from ptf.episode_preview.words import count_lines, problem_lines, reward_lines, time_rows, title


def show(preview: Preview, console: Console, *, conversations: bool = True) -> None:
    """Print the preview, the conversations of its episodes first."""
    console.print(f"policy: {preview.policy}", markup=False)
    if conversations:
        mark = "green" if console.is_terminal else "in ⟦ ⟧"
        console.print(f"what the policy answered is {mark}", style="dim", markup=False)
        for number, episode in enumerate(preview.episodes):
            _conversation(number, episode, console)
    console.print(_times(preview))
    for line in (*reward_lines(preview), *count_lines(preview)):
        console.print(line, markup=False, soft_wrap=True)
    for line in problem_lines(preview):
        console.print(line, style="yellow", markup=False, soft_wrap=True)
    verdict = "yes" if preview.repeatable else "no" if preview.has_result else "not known: no episode has a result"
    console.print(f"repeatable: {verdict}", style="green" if preview.repeatable else "yellow", markup=False)


def _conversation(number: int, episode: PreviewEpisode, console: Console) -> None:
    console.print(f"\n{title(number, episode)}", style="bold", markup=False)
    if episode.reason is not None:
        console.print(episode.reason, style="red", markup=False, soft_wrap=True)
    for document in episode.documents:
        out = Text()
        for piece in document:
            text = piece.text.replace("\x1b", "␛")  # the other side's text does not control the terminal
            shown = text if console.is_terminal or not piece.sampled else f"⟦{text}⟧"
            out.append(shown, style="black on green" if piece.sampled else "dim")
        console.print(out, soft_wrap=True)


def _times(preview: Preview) -> Table:
    table = Table("seconds of", "median", "max", box=SIMPLE)
    for row in time_rows(preview):
        table.add_row(*row)
    return table
