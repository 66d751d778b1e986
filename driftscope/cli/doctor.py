"""``driftscope doctor``: what will go wrong, before the run. Imports TRL when it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from driftscope.errors import EXIT_CLEAN, EXIT_FINDINGS, UsageError
from driftscope.records import SEVERITIES

if TYPE_CHECKING:
    from driftscope.doctor.foresee import Diagnosis

TRAINING_STACK = ("torch", "trl", "transformers", "accelerate", "datasets", "peft", "yaml")


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("trl_arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--config", type=click.Path(path_type=Path), help="TRL's YAML file of the run.")
@click.option("--model", metavar="DIR", help="Local model, in place of the configuration's model_name_or_path.")
@click.option("--select", multiple=True, metavar="CODE", help="Only these rules or groups (DS301, DS3).")
@click.option("--ignore", multiple=True, metavar="CODE", help="Not these rules or groups.")
@click.option("--explain", metavar="CODE", help="Print the page of a rule, and do nothing else.")
@click.option("--no-stack", is_flag=True, help="Do not run TRL's and Liger's loss code.")
@click.option(
    "--fail-on",
    type=click.Choice(SEVERITIES),
    default="warning",
    show_default=True,
    help="Exit with 1 from this severity on.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def doctor(
    trl_arguments: tuple[str, ...],
    config: Path | None,
    model: str | None,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    explain: str | None,
    no_stack: bool,
    fail_on: str,
    as_json: bool,
) -> int:
    """Find what will go wrong, before the run does.

    Measures what the installed TRL and Liger-Kernel do with the configuration of --config, or with the arguments of
    the trl command line: driftscope doctor trl grpo --config run.yaml --top_p 0.8

    Exit code 0: nothing at or over the level; 1: findings; 2: the configuration cannot be read.
    """
    if explain is not None:
        return _explain(explain)
    diagnosis = _diagnose(trl_arguments, config, model, select, ignore, no_stack)
    limit = SEVERITIES.index(fail_on)
    code = EXIT_FINDINGS if any(SEVERITIES.index(f.severity) >= limit for f in diagnosis) else EXIT_CLEAN
    if as_json:
        from driftscope.doctor.document import as_document

        click.echo(json.dumps(as_document(diagnosis, fail_on=fail_on, exit_code=code), indent=2))
    else:
        from driftscope.dashboards.doctor import show

        show(diagnosis)
    return code


def _diagnose(
    arguments: tuple[str, ...],
    config: Path | None,
    model: str | None,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    no_stack: bool,
) -> Diagnosis:
    from driftscope.doctor.foresee import chosen_rules

    chosen_rules(select, ignore)  # a wrong code is told before anything is measured
    try:
        from driftscope.hooks.doctor.diagnose import diagnose_config
        from driftscope.hooks.doctor.settings import load_settings

        settings = load_settings(config, arguments)
        return diagnose_config(settings, select=select, ignore=ignore, stack=not no_stack, model=model)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in TRAINING_STACK:
            raise
        raise UsageError(
            f"driftscope doctor runs the installed TRL, and {missing!r} is not installed here. "
            'Install the extra: pip install "driftscope[trl]".'
        ) from error


def _explain(code: str) -> int:
    """The page of one rule."""
    from driftscope.rules import registry
    from driftscope.rules.docs import page

    rule = next((r for r in registry() if r.code == code.upper()), None)
    if rule is None:
        raise UsageError(f"--explain {code!r}: no such rule. Known: {', '.join(r.code for r in registry())}.")
    click.echo(page(rule), nl=False)
    return EXIT_CLEAN
