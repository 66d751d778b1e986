"""``driftscope compare RUN RUN...``: several runs side by side. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

import click

from driftscope.comparison import as_document, compare, load
from driftscope.comparison.model import Comparison, RunColumn, Skipped
from driftscope.errors import EXIT_CLEAN, EXIT_FINDINGS, EXIT_USAGE, RecordError, UsageError
from driftscope.records import SEVERITIES


@click.command(name="compare")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN RUN...")
@click.option("--baseline", type=click.IntRange(min=1), metavar="N", help="Position of the baseline [default: 1].")
@click.option(
    "--fail-on",
    type=click.Choice(SEVERITIES),
    help="Exit with 1 where a run has a finding of this severity on that the baseline has not [default: never].",
)
@click.option(
    "--html", "page", type=click.Path(path_type=Path, dir_okay=False), help="Also write a page, one HTML file."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def compare_runs(
    runs: tuple[Path, ...], baseline: int | None, fail_on: str | None, page: Path | None, as_json: bool
) -> int:
    """Put recorded RUNs (run directories or their records.jsonl) side by side.

    Each is compared with the first, or with that of --baseline. A difference is marked only where it exceeds what
    moves within the runs.

    Exit code 0: compared; 1: new findings at or over --fail-on; 2: fewer than two runs could be read, or, with
    --fail-on, some run could not be judged.
    """
    if len(runs) < 2:
        raise UsageError(
            "driftscope compare needs two runs or more. For one run: driftscope check, driftscope report."
        )
    if baseline is not None and baseline > len(runs):
        raise UsageError(f"--baseline {baseline}: only {len(runs)} runs are given; use 1 to {len(runs)}.")
    comparison = _compare(runs, (baseline or 1) - 1)
    code = exit_code(comparison, fail_on)
    if page is not None:
        from driftscope.dashboards.compare import render_compare  # plotly, only where it is needed

        written = render_compare(comparison, page)
        click.echo(str(written), err=as_json)
    if as_json:
        click.echo(json.dumps(as_document(comparison, fail_on=fail_on, exit_code=code), indent=2))
    else:
        from driftscope.dashboards.compare_text import show

        show(comparison)
    if code == EXIT_USAGE:
        click.echo("driftscope: --fail-on: some run could not be judged (see above).", err=True)
    return code


def _compare(paths: tuple[Path, ...], baseline: int) -> Comparison:
    """All runs that can be read, one at a time. Raises ``RecordError`` where fewer than two can."""
    columns: list[RunColumn] = []
    skipped: list[Skipped] = []
    known: dict[Path, RunColumn] = {}
    base = None
    for index, path in enumerate(paths):
        where = path.absolute()
        try:
            columns.append(known[where] if where in known else load(path))
        except RecordError as error:
            skipped.append(Skipped(str(path), str(error)))
            continue
        known[where] = columns[-1]
        if index == baseline:
            base = len(columns) - 1
    if base is None:
        columns, skipped = columns, _baseline_first(skipped, str(paths[baseline]))
    if len(columns) < 2:
        reasons = "\n".join(f"  {s.why}" for s in skipped)
        raise RecordError(
            f"{len(columns)} of {len(paths)} runs can be read, so there is nothing to compare:\n{reasons}"
        )
    return compare(columns, base or 0, skipped)


def _baseline_first(skipped: list[Skipped], path: str) -> list[Skipped]:
    """The baseline among the runs that were skipped, told first and as what it is."""
    said = [Skipped(s.path, f"This was to be the baseline; the first readable run is. {s.why}") for s in skipped]
    return [b for b, s in zip(said, skipped, strict=True) if s.path == path] + [s for s in skipped if s.path != path]


def exit_code(comparison: Comparison, fail_on: str | None) -> int:
    """0, 1 or 2. A run that could not be judged never passes a level that was asked for."""
    if fail_on is None:
        return EXIT_CLEAN
    limit = SEVERITIES.index(fail_on)

    def fails(run: RunColumn) -> set[str]:
        return {f.rule for f in run.findings if f.judged and SEVERITIES.index(f.severity) >= limit}

    known = fails(comparison.runs[comparison.baseline])
    if any(fails(run) - known for run in comparison.runs):
        return EXIT_FINDINGS
    unjudged = any(run.level == "unavailable" for run in comparison.runs)
    return EXIT_USAGE if comparison.skipped or unjudged else EXIT_CLEAN
