"""The page of ``driftscope compare``: one file, no network, byte-identical for the same runs.

Run data reach it as in the report: as autoescaped text, and as figures through the one door for data.
"""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from driftscope.comparison.model import Comparison
from driftscope.dashboards.compare_figures import panels, style
from driftscope.dashboards.compare_view import (
    HOW,
    LEVEL_WORDS,
    Grid,
    figures_grid,
    findings_grid,
    labels,
    overview,
    settings_grid,
)
from driftscope.dashboards.pages import write_page
from driftscope.dashboards.report import TEMPLATES, _csp_hash, _environment, _plotly_js
from driftscope.dashboards.wording import count

WIDE = 5  # more runs than that stand one to a row
SHAPES = {  # the markers of the key, in a box of 8 by 8 around (22, 7)
    "circle": "M18 7a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
    "square": "M18 3h8v8h-8z",
    "diamond": "M22 2l5 5l-5 5l-5 -5z",
    "triangle-up": "M22 2l5 9h-10z",
    "triangle-down": "M22 12l5 -9h-10z",
    "x": "M18 5l2 -2l2 2l2 -2l2 2l-2 2l2 2l-2 2l-2 -2l-2 2l-2 -2l2 -2z",
    "star": "M22 1l1.5 4h4l-3 2.6l1.2 4.2l-3.7 -2.6l-3.7 2.6l1.2 -4.2l-3 -2.6h4z",
}


def render_compare(comparison: Comparison, out: Path) -> Path:
    """Write the page to ``out``; returns the path. Raises ``RunDirectoryError`` where it cannot be written."""
    return write_page(render_html(comparison), Path(out), "--html")


def render_html(c: Comparison) -> str:
    """The page as text; a pure function of its argument."""
    plotly_js = _plotly_js()
    scripts = [(TEMPLATES / name).read_text(encoding="utf-8") for name in ("report.js", "compare.js")]
    hashes = " ".join(f"'{_csp_hash(code)}'" for code in (plotly_js, *scripts))
    looks = [style(i, c.baseline) for i in range(len(c.runs))]
    level = worst_level(c)
    return _environment().get_template("compare.html.j2").render(
        c=c,
        level=level,
        badge="Nothing measured" if level == "unavailable" else f"Worst: {LEVEL_WORDS[level].lower()}",
        subtitle=f"{count(len(c.runs), 'run')} side by side · baseline: {c.runs[c.baseline].label}",
        key=[(name, look, SHAPES[look.symbol]) for name, look in zip(labels(c), looks, strict=True)],
        overview=overview(c),
        settings=_turned(settings_grid(c)),
        figures=_turned(figures_grid(c)),
        findings=_turned(findings_grid(c)),
        panels=panels(c),
        how=HOW,
        csp=f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'",
        css=Markup("".join((TEMPLATES / name).read_text(encoding="utf-8") for name in ("report.css", "compare.css"))),
        plotly_js=Markup(plotly_js),
        scripts=[Markup(code) for code in scripts],
    )  # fmt: skip


def worst_level(c: Comparison) -> str:
    """The level of the worst run that could be judged."""
    known = [run.level for run in c.runs if run.level in LEVEL_WORDS and run.level != "unavailable"]
    order = list(LEVEL_WORDS)
    return max(known, key=order.index, default="unavailable")


def _turned(grid: Grid | None) -> Grid | None:
    """Many runs read better one to a row."""
    return grid.turned() if grid is not None and len(grid.columns) > WIDE else grid
