"""What ``driftscope compare`` prints: a verdict in a sentence, then tables as wide as the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from driftscope.comparison.model import Comparison
from driftscope.dashboards.compare_view import (
    HOW,
    Box,
    Grid,
    figures_grid,
    findings_grid,
    overview,
    settings_grid,
)
from driftscope.dashboards.console import FILE_WIDTH, MAX_WIDTH, MIN_WIDTH
from driftscope.dashboards.wording import clean, count

DETAILED = 8  # runs whose every figure is printed
COLUMN = 22
MARK_STYLES = {"better": "green", "worse": "bold red", "differs": "yellow", "other": "yellow"} | {
    "critical": "bold red", "warning": "bold yellow", "clean": "green",
}  # fmt: skip


def show(c: Comparison, console: Console | None = None) -> None:
    """Print a comparison, by default to standard output."""
    out = console if console is not None else Console(highlight=False)
    width = max(MIN_WIDTH, min(out.width - 1, MAX_WIDTH)) if out.is_terminal else FILE_WIDTH
    out.width = max(width, out.width)
    _print(out, [Text(line, style="bold") for line in _wrapped(c.headline, width, first="")])
    _print(out, (Text(line) for sentence in c.sentences for line in _wrapped(sentence, width)))
    out.print()
    out.print(_table(overview(c)), width=width)
    if len(c.runs) <= DETAILED:
        for grid in (settings_grid(c), figures_grid(c), findings_grid(c)):
            for part in _parts(grid, c.baseline, width):
                out.print(_table(part), width=width)
    else:
        what = "Every figure, setting and finding by run: --html FILE, or --json."
        _print(out, [Text(f"{count(len(c.runs), 'run')}, so no table a figure. {what}")])
    _print(out, (Text(line) for line in _endnotes(c, width)))


def _endnotes(c: Comparison, width: int) -> Iterator[str]:
    for skipped in c.skipped:
        yield from _wrapped(f"not compared: {skipped.path}: {skipped.why}", width)
    for note in c.notes:
        yield from _wrapped(f"note: {note}", width)
    yield from _wrapped(f"marks: {HOW}", width)


def _parts(grid: Grid | None, baseline: int, width: int) -> Iterator[Grid]:
    """The grid in as many parts as the width asks for, the baseline in each."""
    if grid is None:
        return
    room = max(2, (width - 30) // COLUMN)
    others = [i for i in range(len(grid.columns)) if i != baseline]
    if len(grid.columns) <= room:
        yield grid
        return
    for start in range(0, len(others), room - 1):
        yield grid.part([baseline, *others[start : start + room - 1]])


def _table(grid: Grid) -> Table:
    shown = Table(title=grid.caption, box=box.SIMPLE, title_justify="left")
    shown.add_column(grid.corner, overflow="fold")
    for column in grid.columns:
        shown.add_column(Text(column), overflow="fold", justify="right" if grid.numeric else "left")
    for heading, row in zip(grid.headings, grid.rows, strict=True):
        shown.add_row(Text(heading), *(_cell(cell) for cell in row))
    return shown


def _cell(cell: Box) -> Text:
    style = MARK_STYLES.get(cell.mark, "")
    return Text(cell.text + (f"\n{cell.detail}" if cell.detail else ""), style=style)


def _wrapped(words: str, width: int, first: str = "  ") -> list[str]:
    return textwrap.wrap(
        " ".join(clean(words).split()), width, initial_indent=first, subsequent_indent=first + "  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _print(console: Console, lines: Iterable[Text]) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)
