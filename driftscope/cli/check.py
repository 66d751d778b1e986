"""``driftscope check RUN``: the verdict as an exit code, for CI. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from driftscope._journal_reader import Run
from driftscope._text import printable
from driftscope.errors import EXIT_CLEAN, EXIT_FINDINGS, EXIT_USAGE
from driftscope.reading import Summary, read_any
from driftscope.records import SEVERITIES
from driftscope.verdict import NOT_JUDGED, FindingSummary, Verdict, judge


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--fail-on",
    type=click.Choice(SEVERITIES),
    default="warning",
    show_default=True,
    help="Exit with 1 from this severity on.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def check(run: Path, fail_on: str, as_json: bool) -> int:
    """Judge the recorded RUN (a run directory or its records.jsonl).

    Exit code 0: nothing at or over the level; 1: findings; 2: the records cannot be read, or nothing was measured.
    """
    recorded = read_any(run)
    verdict = judge(recorded)
    code = exit_code(verdict, fail_on)
    if as_json:
        click.echo(json.dumps(as_dict(recorded, verdict, fail_on, code), indent=2))
    else:
        _print(verdict)
    if code == EXIT_USAGE:
        click.echo(f"driftscope: {run}: nothing was measured, so there is nothing to judge.", err=True)
    return code


def exit_code(verdict: Verdict, fail_on: str) -> int:
    """0, 1 or 2 for a verdict at that level."""
    if verdict.level == "unavailable":
        return EXIT_USAGE
    limit = SEVERITIES.index(fail_on)
    failing = any(SEVERITIES.index(f.severity) >= limit for f in verdict.findings if f.rule not in NOT_JUDGED)
    return EXIT_FINDINGS if failing else EXIT_CLEAN


def as_dict(run: Run | Summary, verdict: Verdict, fail_on: str, code: int) -> dict[str, object]:
    """The verdict as the JSON object that ``--json`` prints."""
    return {
        "run_id": run.info.run_id if run.info is not None else None,
        **asdict(verdict),
        "fail_on": fail_on,
        "exit_code": code,
        "steps": len(run.steps) if isinstance(run, Run) else run.records,
        "problems": run.problems,
    }


def _print(verdict: Verdict) -> None:
    click.echo(f"{verdict.level.upper()}: {printable(verdict.headline)}")
    for line in verdict.summary:
        click.echo(f"  {printable(line)}")
    if verdict.first_action:
        click.echo(f"What to do: {printable(verdict.first_action)}")
    for finding in verdict.findings:
        click.echo(_line(finding))


def _line(finding: FindingSummary) -> str:
    steps = f"{finding.count} step{'' if finding.count == 1 else 's'}, first {finding.first_step}"
    where = "" if finding.rule in NOT_JUDGED else f" [{steps}]"
    return printable(f"{finding.severity:<8} {finding.rule} {finding.title}{where}: {finding.evidence}")
