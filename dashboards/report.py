"""The HTML report: one file, no network, byte-identical for the same records.

Run data reach the page in two ways only: as autoescaped text, and through ``json_for_script``, the one door for data
that scripts read. The page's own two scripts are allowed by their hashes, so that a script in run data could not run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from driftscope.dashboards.pages import write_page
from driftscope.dashboards.view import build
from driftscope.dashboards.wording import clean

if TYPE_CHECKING:
    from driftscope.journal import Run
    from driftscope.reading.summary import Summary
    from driftscope.verdict import Verdict

TEMPLATES = Path(__file__).parent / "templates"
REPORT_NAME = "report.html"
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&'\u2028\u2029"}


def render(run_dir: Path, out: Path | None = None) -> Path:
    """Read the run in ``run_dir`` and write its report to ``out`` (default ``run_dir/report.html``); returns the path.

    Raises ``RecordError`` for records that cannot be read, ``RunDirectoryError`` where the report cannot be written.
    """
    from driftscope.reading import read_any
    from driftscope.verdict import judge

    run_dir = Path(run_dir)
    run = read_any(run_dir)
    home = run_dir.parent if run_dir.is_file() else run_dir  # the records file itself may be named
    target = Path(out) if out is not None else home / REPORT_NAME
    return write_page(render_html(run, judge(run)), target, "out")


def render_html(run: Run | Summary, verdict: Verdict) -> str:
    """The report of ``run`` as one HTML page; a pure function of its arguments.

    A ``Summary`` stands for a run of any size: the lines are thinned, with every extreme and alarm kept.
    """
    plotly_js, page_js = _plotly_js(), (TEMPLATES / "report.js").read_text(encoding="utf-8")
    hashes = " ".join(f"'{_csp_hash(code)}'" for code in (plotly_js, page_js))
    template = _environment().get_template("report.html.j2")
    return template.render(
        **build(run, verdict),
        csp=f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'",
        css=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),
        plotly_js=Markup(plotly_js),
        page_js=Markup(page_js),
    )


def json_for_script(value: Any) -> Markup:
    """``value`` as JSON that can stand inside a script element: nothing in it can close the element or start another.

    NaN and infinity become null, floats keep seven significant digits, keys are sorted.
    """
    text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return Markup(text.translate(_ESCAPES))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return clean(value) if isinstance(value, str) else value


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda v: clean(v) if type(v) is str else v,
    )  # fmt: skip
    environment.filters["figure_json"] = lambda figure: json_for_script(figure.to_plotly_json())
    return environment


@functools.cache
def _plotly_js() -> str:
    """The plotly.js that the installed plotly package brings."""
    from plotly.offline import get_plotlyjs

    code = str(get_plotlyjs())
    return code.replace("</script", "<\\/script")


def _csp_hash(code: str) -> str:
    digest = hashlib.sha256(code.encode("utf-8")).digest()
    return "sha256-" + base64.b64encode(digest).decode("ascii")
