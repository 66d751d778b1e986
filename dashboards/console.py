"""Alerts during the run, readable on a terminal, in a log file and under a progress bar.

Run data are printed as text: rich markup, emoji codes and terminal escapes in them are never obeyed.
"""

from __future__ import annotations

import contextlib
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from driftscope.dashboards.throttle import AlertThrottle, Decision
from driftscope.dashboards.wording import clean, count, rule_page, step_span
from driftscope.records import SEVERITIES, AlertRecord, NoteRecord, RunInfo

PREFIX = "driftscope"
STYLES = {"info": "bold blue", "warning": "bold yellow", "critical": "bold red"}
FILE_WIDTH, MIN_WIDTH, MAX_WIDTH = 110, 40, 120
REPEATED_NOTES = 3


class ConsoleReporter:
    """Prints alerts and notes as they come, by default to standard error.

    ``min_interval_s`` is the least time between two showings of a rule; ``max_per_rule`` the number of times that a
    rule is shown in all (a rise in severity always is). Printing never raises: a broken stream is left alone.
    """

    def __init__(
        self,
        console: Console | None = None,
        min_interval_s: float = 0.0,
        max_per_rule: int = 20,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console if console is not None else Console(stderr=True)
        self.throttle = AlertThrottle(min_interval_s=min_interval_s, max_per_rule=max_per_rule, clock=clock)
        self._notes: dict[tuple[str, str], int] = {}

    def alert(self, alert: AlertRecord) -> None:
        """Show ``alert`` in full, as a one-line repeat, or not at all (see ``AlertThrottle``)."""
        self._print(alert_lines(alert, self.throttle.decide(alert), self._width()))

    def note(self, note: NoteRecord) -> None:
        """Show a note about Driftscope itself; the same note at most three times."""
        key = (note.stage, note.message)
        self._notes[key] = self._notes.get(key, 0) + 1
        if self._notes[key] <= REPEATED_NOTES:
            message = f"{clean(note.stage)}: {clean(note.message)}"
            if self._notes[key] == REPEATED_NOTES:
                message += " (further notes of this kind go to the records only)"
            self._print(_paragraph(_head(note.step, note.rank), message, self._width(), style="dim"))

    def started(self, info: RunInfo) -> None:
        """Say once what is watched."""
        versions = ", ".join(f"{clean(n)} {clean(v)}" for n, v in info.versions.items() if v)
        words = f"{clean(info.driftscope)} watches run {clean(info.run_id)}" + (f" ({versions})" if versions else "")
        self._print(_paragraph(PREFIX, words, self._width()))

    def saved(self, capsule: str | Path) -> None:
        """Say where the batch behind a finding was saved."""
        words = f"the batch behind this is saved; driftscope replay {_one_line(str(capsule))} computes it again"
        self._print(_paragraph(PREFIX, words, self._width()))

    def finished(self, summary: str, run_dir: str | Path, sampling: str | None = None) -> None:
        """Say how the run ended: the verdict, what makes the ratio, the findings by rule, where the records are.

        sampling: the importance sampling ratio and its causes in a line, as ``Verdict.sampling`` holds it.
        """
        width = self._width()
        lines = _paragraph(PREFIX, clean(summary), width, style="bold")
        if sampling:
            lines += _paragraph("", clean(sampling), width)
        lines += finding_lines(self.throttle, width)
        lines += _paragraph("", f"records: {clean(str(run_dir))}", width)
        self._print(lines)

    def _width(self) -> int:
        if not self.console.is_terminal:
            return FILE_WIDTH
        return max(MIN_WIDTH, min(self.console.width - 1, MAX_WIDTH))

    def _print(self, lines: list[Text]) -> None:
        if not lines:
            return
        with contextlib.suppress(OSError, ValueError, RuntimeError), _progress_bars_aside(self.console):
            for line in lines:
                line.plain = _encodable(line.plain, self.console.encoding)
                self.console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)


def alert_lines(alert: AlertRecord, decision: Decision, width: int) -> list[Text]:
    """An alert as lines of at most ``width`` characters (a longer word is never cut); none where it is hidden."""
    if decision.show == "hide":
        return []
    head = _head(alert.step, alert.rank)
    title = f"{alert.severity.upper()} {clean(alert.rule)} {_one_line(alert.title)}"
    if decision.show == "repeat":
        title += f" (again: {count(decision.total, 'time')} so far)"
        if decision.last:
            title += " (no longer shown: further ones go to the records only)"
        lines = _paragraph(head, title, width)
    else:
        lines = _paragraph(head, title, width)
        for name, text in (("evidence", alert.evidence), ("remedy", alert.remedy), ("docs", rule_page(alert.rule))):
            lines += _paragraph("", f"{name}: {_one_line(text)}", width)
    start = lines[0].plain.find(alert.severity.upper())
    if start >= 0:
        lines[0].stylize(STYLES[alert.severity], start, start + len(alert.severity))
    return lines


def finding_lines(throttle: AlertThrottle, width: int) -> list[Text]:
    """One line per rule that fired, the most severe first."""
    rules = sorted(throttle.rules.items(), key=lambda r: (-SEVERITIES.index(r[1].severity), r[0]))
    lines: list[Text] = []
    for rule, seen in rules:
        when = step_span([seen.first_step, seen.last_step])
        words = f"{seen.severity} {clean(rule)}: {count(seen.total, 'alert')}, {when}"
        lines += _paragraph("", words, width)
    return lines


def _head(step: int, rank: int) -> str:
    return f"{PREFIX} step {step:,}" + (f" rank {rank}" if rank else "")


def _one_line(text: str) -> str:
    return " ".join(clean(text).split())


def _paragraph(head: str, words: str, width: int, style: str = "") -> list[Text]:
    """``[head] words``, wrapped at spaces; further lines are indented."""
    first = f"[{head}] " if head else "    "
    wrapped = textwrap.wrap(
        _one_line(words), width, initial_indent=first, subsequent_indent="    " if head else "      ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [Text(line, style=style) for line in wrapped or [first.rstrip()]]


def _encodable(text: str, encoding: str) -> str:
    """``text`` as the stream can take it: what its encoding lacks is written as a backslash escape."""
    try:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    except LookupError:
        return text.encode("ascii", "backslashreplace").decode("ascii")


@contextlib.contextmanager
def _progress_bars_aside(console: Console) -> Iterator[None]:
    """Clear tqdm's bars while printing and draw them again afterwards, if this process uses tqdm at all."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    aside = getattr(bars, "external_write_mode", None)
    if aside is None:
        yield
        return
    with aside(file=console.file):
        yield
