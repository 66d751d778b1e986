"""``driftscope replay CAPSULE``: a saved batch computed again, without the model, a trainer or TRL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from driftscope._text import path_words, printable, sig
from driftscope.cli.check import exit_code
from driftscope.errors import EXIT_CLEAN, EXIT_FINDINGS, UsageError
from driftscope.records import SEVERITIES

if TYPE_CHECKING:
    from driftscope.capsule import Capsule, Replay
    from driftscope.verdict import Verdict


@click.command()
@click.argument("capsule", type=click.Path(path_type=Path))
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write a page to attach to an issue, one HTML file.",
)
@click.option(
    "--fail-on",
    type=click.Choice(SEVERITIES),
    default="warning",
    show_default=True,
    help="Exit with 1 from this severity on.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def replay(capsule: Path, report: Path | None, fail_on: str, as_json: bool) -> int:
    """Compute every path and every finding of a saved CAPSULE (its directory) again, and compare with the record.

    Needs torch and safetensors; neither the model nor TRL.

    Exit code 0: the same numbers, and nothing at or over the level; 1: findings, or numbers that differ; 2: the
    capsule cannot be read.
    """
    saved, again, verdict = _replay(capsule)
    code = exit_code(verdict, fail_on)
    if code == EXIT_CLEAN and not again.same:
        code = EXIT_FINDINGS
    from driftscope.capsule.document import as_document

    document = as_document(saved, again, verdict, fail_on=fail_on, exit_code=code)
    if report is not None:
        from driftscope.dashboards.capsule import render_capsule

        page = render_capsule(document, again.record, saved.info, report)
        click.echo(str(page), err=as_json)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _print(document)
    return code


def _replay(path: Path) -> tuple[Capsule, Replay, Verdict]:
    try:
        from driftscope.capsule import read_capsule
        from driftscope.capsule import replay as compute
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise UsageError(
            "driftscope replay computes with torch, which is not installed here: pip install torch."
        ) from error
    from driftscope.verdict import judge

    saved = read_capsule(path)
    again = compute(saved)
    verdict = judge(saved.run(again.record, [*again.findings, *again.carried]))
    return saved, again, verdict


def _print(document: dict[str, Any]) -> None:
    click.echo(f"{document['level'].upper()}: {printable(document['headline'])}")
    where = f"step {document['step']}, micro-batch {document['micro_step'] + 1}"
    click.echo(printable(f"Capsule of {where} of run {document['run_id']}, saved: {document['why']}."))
    for name, path in document["record"]["paths"].items():
        numbers = f"loss {sig(path['loss'])}, hidden gradient norm {sig(path['hidden_grad_norm'], 4)}"
        click.echo(printable(f"  {path_words(name)}: {numbers}; {document['how'].get(name, 'as saved')}"))
    click.echo(printable(agreement(document)))
    for f in document["figures"]["furthest"]:
        if not f["same"]:
            click.echo(printable(f"  {f['name']}: saved {f['saved']}, again {f['again']}, allowed {f['allowed']:.2g}"))
    for stage, why in document["failed"].items():
        click.echo(printable(f"  not computed again: {stage} ({why})"))
    for line, codes in (("not found again", document["lost"]), ("found now only", document["new"])):
        if codes:
            click.echo(printable(f"  {line}: {', '.join(codes)}"))
    for note in document["notes"]:
        click.echo(printable(f"  note: {note}"))
    if document["first_action"]:
        click.echo(f"What to do: {printable(document['first_action'])}")
    for finding in document["findings"]:
        click.echo(printable(f"{finding['severity']:<8} {finding['rule']} {finding['title']}: {finding['evidence']}"))


def agreement(document: dict[str, Any]) -> str:
    """How the replay and the record agree, in a sentence."""
    figures = document["figures"]
    if document["same"]:
        furthest = figures["furthest"][0] if figures["furthest"] else None
        far = f" (furthest: {furthest['name']}, {furthest['difference']:.1e} apart)" if furthest else ""
        return f"{figures['compared']} figures and every finding came out the same to rounding{far}."
    return f"NOT THE SAME: {figures['differing']} of {figures['compared']} figures differ by more than rounding."
