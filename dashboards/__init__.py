"""What shows records: figures (plotly), the HTML report, the console. Never imports torch.

Names load on first use, so that a training run which only prints alerts never pays for plotly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from driftscope.dashboards.console import ConsoleReporter as ConsoleReporter
    from driftscope.dashboards.report import render as render
    from driftscope.dashboards.report import render_html as render_html

_HOME = {
    "ConsoleReporter": "driftscope.dashboards.console",
    "render": "driftscope.dashboards.report",
    "render_html": "driftscope.dashboards.report",
}
__all__ = ["ConsoleReporter", "render", "render_html"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
