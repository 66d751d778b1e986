"""What shows records: figures (plotly), the HTML report, the console. Never imports torch.

Names load on first use, so that a training run which only prints alerts never pays for plotly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftscope._lazy import lazy_names

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

__getattr__, __dir__ = lazy_names(globals(), _HOME)
