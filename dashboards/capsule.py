"""The page of a replayed capsule: one HTML file without scripts, to attach to an upstream issue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from driftscope.dashboards import tables
from driftscope.dashboards.figures import summarize_causes
from driftscope.dashboards.pages import write_page
from driftscope.dashboards.report import TEMPLATES, _environment
from driftscope.dashboards.tables import Table
from driftscope.dashboards.view import LEVEL_WORDS, setups
from driftscope.dashboards.wording import UNAVAILABLE, clean, number, path_label
from driftscope.records import RunInfo, StepRecord


def render_capsule(document: dict[str, Any], record: StepRecord, info: RunInfo | None, out: Path) -> Path:
    """Write the page of a replay (``driftscope.capsule.document.as_document``) to ``out``; returns the path.

    Raises ``RunDirectoryError`` where it cannot be written.
    """
    return write_page(render_html(document, record, info), out, "--report")


def render_html(document: dict[str, Any], record: StepRecord, info: RunInfo | None) -> str:
    """The page as text; a pure function of its arguments."""
    return _environment().get_template("capsule.html.j2").render(
        doc=document,
        level_words=LEVEL_WORDS.get(document["level"], document["level"]),
        tables=[t for t in _tables(document, record) if t is not None],
        setups=setups(info),
        versions=_versions(info),
        csp="default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'",
        css=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
    )  # fmt: skip


def _tables(document: dict[str, Any], record: StepRecord) -> list[Table | None]:
    return [
        tables.path_table([record]),
        _how(document),
        tables.cause_table(summarize_causes([record])),
        tables.ratio_table([record]),
        tables.ratio_causes_table([record]),
        _figures(document),
        _tensors(document),
    ]


def _how(document: dict[str, Any]) -> Table:
    rows = [[path_label(name), clean(how)] for name, how in document["how"].items()]
    rows += [[path_label(name), f"Not computed again: {clean(why)}"] for name, why in document["failed"].items()]
    return Table("How each path and signal was computed again", ["Path or signal", "How"], rows)


def _figures(document: dict[str, Any]) -> Table:
    figures = document["figures"]
    rows = [
        [
            clean(f["name"]), number(f["saved"], 6), number(f["again"], 6), number(f["difference"], 2),
            number(f["allowed"], 2), "yes" if f["same"] else "NO",
        ]
        for f in figures["furthest"]
    ]  # fmt: skip
    caption = f"Replay against record: the furthest of {figures['compared']} figures, {figures['differing']} differ"
    columns = ["Figure", "Saved", "Again", "Difference", "Allowed", "Same"]
    return Table(caption, columns, rows, {1, 2, 3, 4})


def _tensors(document: dict[str, Any]) -> Table:
    rows = [[clean(name), clean(shape)] for name, shape in sorted(document["tensors"]["list"].items())]
    return Table("Tensors in the capsule", ["Name", "Type and shape"], rows)


def _versions(info: RunInfo | None) -> str:
    """The stack in a line, for the top of the page."""
    if info is None:
        return UNAVAILABLE
    named = [f"{clean(name)} {clean(version)}" for name, version in info.versions.items() if version]
    return ", ".join([*named, f"device {clean(info.device or 'unknown')}", f"driftscope {clean(info.driftscope)}"])
