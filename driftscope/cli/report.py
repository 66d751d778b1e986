"""``driftscope report RUN``: the HTML report of a recorded run."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write [default: RUN/report.html]."
)
def report(run: Path, out: Path | None) -> None:
    """Write the report of the recorded RUN (a run directory or its records.jsonl) as one HTML file."""
    from driftscope.journal import records_path

    directory = records_path(run).parent if run.name == "records.jsonl" else run
    records_path(directory)
    from driftscope.dashboards.report import render  # plotly, only where it is needed

    click.echo(str(render(directory, out)))
