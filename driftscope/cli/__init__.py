"""The command line: a verb a file. Results go to stdout, errors to stderr.

Exit codes: 0 clean, 1 findings at or over the level, 2 wrong use or unreadable input, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from driftscope import __version__
from driftscope.cli.bench import bench
from driftscope.cli.check import check
from driftscope.cli.compare import compare_runs
from driftscope.cli.demo import demo
from driftscope.cli.doctor import doctor
from driftscope.cli.replay import replay
from driftscope.cli.report import report
from driftscope.errors import EXIT_CLEAN, EXIT_USAGE, DriftscopeError

EXIT_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="driftscope")
def commands() -> None:
    """Is the loss that a GRPO run optimises the loss that was configured?"""


for _verb in (bench, check, compare_runs, demo, doctor, replay, report):
    commands.add_command(_verb)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; never shows a traceback for an error raised on purpose."""
    try:
        result = commands.main(
            args=list(arguments) if arguments is not None else None, prog_name="driftscope", standalone_mode=False
        )
        sys.stdout.flush()
    except DriftscopeError as error:
        click.echo(f"driftscope: {error}", err=True)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        click.echo("driftscope: interrupted", err=True)
        return EXIT_INTERRUPTED
    except (BrokenPipeError, SystemExit):  # the reader of stdout went away, as ``| head`` does; click exits on it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CLEAN
    return result if isinstance(result, int) else EXIT_CLEAN


__all__ = ["commands", "main"]
