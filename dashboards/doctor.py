"""What ``driftscope doctor`` prints: the findings, the stack's table, and what could not be measured."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from driftscope.dashboards.console import FILE_WIDTH, MAX_WIDTH, MIN_WIDTH, STYLES
from driftscope.dashboards.wording import cause_label, clean, count, factor, path_label, rule_page
from driftscope.doctor.facts import Facts, FeatureRow, StackTable
from driftscope.doctor.foresee import Diagnosis
from driftscope.rules.base import Finding

STATUS_STYLES = {"honoured": "green", "dropped": "bold red", "differs": "bold red", "refused": "yellow"}


def show(diagnosis: Diagnosis, console: Console | None = None) -> None:
    """Print a diagnosis, by default to standard output."""
    out = console if console is not None else Console(highlight=False)
    width = max(MIN_WIDTH, min(out.width - 1, MAX_WIDTH)) if out.is_terminal else FILE_WIDTH
    out.width = max(width, out.width)
    _print(out, [Text(headline(diagnosis), style="bold")])
    for finding in diagnosis:
        _print(out, finding_lines(finding, width))
    if diagnosis.facts.stack is not None:
        out.print()
        out.print(stack_table(diagnosis.facts.stack), width=width)
    _print(out, [Text(line) for line in notes(diagnosis, width)])


def headline(diagnosis: Diagnosis) -> str:
    """The result in a sentence: how many findings, or what was looked at without any."""
    subject = _subject(diagnosis.facts)
    if not diagnosis:
        missing = f"; {count(len(diagnosis.facts.unavailable), 'measurement')} could not be had" if (
            diagnosis.facts.unavailable
        ) else ""  # fmt: skip
        return f"driftscope doctor: nothing found{subject}{missing}"
    severities = [f.severity for f in diagnosis]
    parts = [f"{severities.count(s)} {s}" for s in ("critical", "warning", "info") if s in severities]
    return f"driftscope doctor: {count(len(diagnosis), 'finding')} ({', '.join(parts)}){subject}"


def finding_lines(finding: Finding, width: int) -> list[Text]:
    """A finding as lines of at most ``width`` characters (a longer word is never cut)."""
    head = Text(f"\n{finding.severity.upper()} ", style=STYLES[finding.severity])
    lines = [head + Text(f"{clean(finding.rule)} {_one_line(finding.title)}", style="bold")]
    for name, text in (("evidence", finding.evidence), ("remedy", finding.remedy), ("docs", rule_page(finding.rule))):
        lines += [Text(line) for line in _wrapped(f"{name}: {_one_line(text)}", width)]
    return lines


def stack_table(table: StackTable) -> Table:
    """Feature by path: honoured, dropped, refused, with the factor on the gradient's norm."""
    known = {row.path for row in table.rows if row.status != "unavailable"}
    paths = sorted(known, key=lambda path: (path != table.live, path))
    versions = ", ".join(f"{clean(k)} {clean(v)}" for k, v in table.versions.items())
    caption = f"measured on a synthetic batch in {table.seconds:.1f} s; * = on in this configuration"
    shown = Table(title=versions, caption=caption, box=box.SIMPLE, title_justify="left", caption_justify="left")
    shown.add_column("feature", overflow="fold")
    for path in paths:
        shown.add_column(path_label(path) + (" (trains)" if path == table.live else ""), overflow="fold")
    for feature in dict.fromkeys(row.feature for row in table.rows if row.path in known):
        rows = {row.path: row for row in table.rows if row.feature == feature}
        mark = "*" if any(row.in_use for row in rows.values()) else ""
        shown.add_row(Text(cause_label(feature) + mark), *(_cell(rows.get(path)) for path in paths))
    return shown


def notes(diagnosis: Diagnosis, width: int) -> Iterator[str]:
    """What was measured on a stand-in, what could not be measured, and which rules failed."""
    facts = diagnosis.facts
    if facts.model is not None and facts.model.copy:
        yield from _wrapped(
            f"Gradient flow and head were measured on a small random {clean(facts.model.model_type)} model with this "
            "configuration. driftscope.diagnose(trainer) measures on your own model.",
            width,
        )
    if facts.stack is not None:
        shown = {row.path for row in facts.stack.rows if row.status != "unavailable"}
        for row in facts.stack.rows:
            if row.path not in shown:
                yield from _wrapped(f"{path_label(row.path)}: {_one_line(row.message)}", width)
    for name, why in facts.unavailable.items():
        yield from _wrapped(f"unavailable: {clean(name)}: {_one_line(why)}", width)
    for rule, why in diagnosis.failed.items():
        yield from _wrapped(f"rule {clean(rule)} could not judge: {_one_line(why)}", width)


def _cell(row: FeatureRow | None) -> Text:
    if row is None:
        return Text("–")
    words: str = row.status
    if row.status in ("dropped", "differs") and row.factor is not None:
        words += f", gradient {factor(row.factor)}"
    elif row.status in ("refused", "unavailable") and row.message:
        words += f": {textwrap.shorten(_one_line(row.message), 70, placeholder=' ...')}"
    return Text(words, style=STATUS_STYLES.get(row.status, ""))


def _subject(facts: Facts) -> str:
    if facts.settings is None or not facts.settings.source:
        return ""
    return f" in {clean(facts.settings.source)}"


def _one_line(text: str) -> str:
    return " ".join(clean(text).split())


def _wrapped(words: str, width: int) -> list[str]:
    return textwrap.wrap(
        words, width, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _print(console: Console, lines: Sequence[Text]) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)
