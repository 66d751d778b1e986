"""TRL's YAML file and the ``trl`` command line, read as TRL reads them and checked before anything runs.

Plain Python: which settings exist, and of which types, is told by the dataclasses that the caller hands in. Source of
the semantics: ``trl.scripts.utils.TrlParser`` (the file gives defaults, the command line overrides them, ``env:`` is
no setting, what no dataclass has goes to ``accelerate launch``) and ``transformers.HfArgumentParser`` (flags,
``--no_x``).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driftscope._text import printable
from driftscope.doctor.config_fields import KnownField, convert
from driftscope.errors import UsageError

LAUNCHERS = ("accelerate", "launch", "python", "python3", "torchrun", "-m", "trl")


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A ``trl`` command, taken apart. ``options``: what follows it, without ``--config`` and its file."""

    trainer: str | None = None
    config: Path | None = None
    options: tuple[str, ...] = ()
    launch: tuple[str, ...] = ()
    """Options of ``accelerate launch`` that stood before the command."""


@dataclass(frozen=True, kw_only=True)
class GivenSettings:
    """What was set. ``values``: settings of the trainer; ``launch``: options of ``accelerate launch``."""

    values: Mapping[str, Any]
    launch: Mapping[str, Any]


def split_command(arguments: Sequence[str], commands: Collection[str]) -> CommandLine:
    """The parts of ``trl grpo --config run.yaml --top_p 0.8``; options of ``accelerate launch`` may stand before it.

    commands: the names of TRL's trainers. Without a command all arguments are options.
    Raises ``UsageError`` for a command that TRL lacks and for ``--config`` without a file.
    """
    words = list(arguments)
    trainer, before = None, []
    if words and not words[0].startswith("--"):
        at = next((i for i, word in enumerate(words) if _command(word) in commands), None)
        if at is None:
            named = next((word for word in words if word not in LAUNCHERS and not word.startswith("-")), words[0])
            raise UsageError(
                f"{printable(named)!r} is no trainer of the installed TRL; its commands are "
                f"{', '.join(sorted(commands))}.{_nearest(named, commands)}"
            )
        trainer = _command(words[at])
        before = [word for word in words[:at] if word not in LAUNCHERS]
        words = words[at + 1 :]
    options: list[str] = []
    config: Path | None = None
    rest = iter(words)
    for word in rest:
        if word == "--config" or word.startswith("--config="):
            file = word.partition("=")[2] or next(rest, "")
            if not file or file.startswith("--"):
                raise UsageError("--config names TRL's YAML file: give its path after it, --config run.yaml.")
            config = Path(file)
        else:
            options.append(word)
    return CommandLine(trainer=trainer, config=config, options=tuple(options), launch=tuple(before))


def _command(word: str) -> str:
    """``grpo`` of ``grpo``, ``trl.scripts.grpo`` and ``trl/scripts/grpo.py``."""
    return word.replace("\\", "/").rpartition("/")[2].removesuffix(".py").removeprefix("trl.scripts.")


def read_file(path: Path) -> dict[str, Any]:
    """The settings of a YAML file, unchecked, without its ``env:``.

    Raises ``UsageError`` where it is missing, cannot be read, does not parse (with line and column) or is no mapping.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"--config {path}: there is no such file.") from None
    except UnicodeDecodeError:
        raise UsageError(f"--config {path}: the file is no UTF-8 text; TRL's configuration is a YAML file.") from None
    except OSError as error:
        raise UsageError(f"--config {path}: the file cannot be read ({error.strerror or error}).") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"--config {path}{place}: not valid YAML: {printable(problem)}.") from None
    if not isinstance(loaded, dict):
        what = "empty" if loaded is None else f"a {type(loaded).__name__}"
        raise UsageError(f"--config {path}: the file is {what}, TRL needs a mapping of settings (name: value lines).")
    if not isinstance(loaded.get("env", {}), dict):
        raise UsageError(f"--config {path}: env is {loaded['env']!r}; TRL needs a mapping of environment variables.")
    return {str(name): value for name, value in loaded.items() if name != "env"}


def option_names(options: Sequence[str]) -> list[str]:
    """The names of the settings that options set, ``top_p`` of ``--top-p=0.8``."""
    return [name for name, _ in _pairs(options)]


def check(
    file: Mapping[str, Any],
    line: CommandLine,
    fields: Mapping[str, KnownField],
    launch: Mapping[str, bool],
    source: str = "--config",
) -> GivenSettings:
    """The settings of file and command line with the types that TRL gives them; the command line wins.

    file: as ``read_file`` returns it. launch: options of ``accelerate launch`` -> whether they take a value.
    Raises ``UsageError`` for a name that neither TRL nor accelerate knows, with the nearest known one, and for a value
    of the wrong type, with the type that is expected.
    """
    values: dict[str, Any] = {}
    launched: dict[str, Any] = {}
    for name, value in file.items():
        if name in fields:
            values[name] = convert(fields[name], value, source)
        elif name in launch or name == "accelerate_config":
            launched[name] = value
        else:
            raise _unknown(name, fields, launch, source)
    for name, words in _pairs(line.launch):
        launched[name] = words[0] if words else True
    for name, words in _pairs(line.options):
        if name in fields:
            values[name] = _from_words(fields[name], words)
        elif (of := name.removeprefix("no_")) != name and of in fields and fields[of].kinds == {"bool"} and not words:
            values[of] = False
        elif name in launch or name == "accelerate_config":
            launched[name] = words[0] if words else True
        else:
            raise _unknown(name, fields, launch, "command line", dashes="--")
    return GivenSettings(values=values, launch=launched)


def _pairs(options: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each ``--name`` with the words up to the next one."""
    name: str | None = None
    words: list[str] = []
    for word in options:
        if word.startswith("--") and len(word) > 2:
            if name is not None:
                yield name, words
            head, equals, tail = word[2:].partition("=")
            name, words = head.replace("-", "_"), [tail] if equals else []
        elif name is not None:
            words.append(word)
        else:
            raise UsageError(f"command line: {printable(word)!r} belongs to no option; options begin with --.")
    if name is not None:
        yield name, words


def _from_words(field: KnownField, words: list[str]) -> Any:
    """The value of an option from its words: none for a flag, several for a list."""
    if not words:
        if "bool" in field.kinds:
            return True
        raise UsageError(f"command line: --{field.name} needs a value: {field.expected}.")
    if "list" in field.kinds and not (len(words) == 1 and "str" in field.kinds):
        return convert(field, words, "command line")
    if len(words) > 1:
        raise UsageError(
            f"command line: --{field.name} takes one value ({field.expected}), {printable(' '.join(words[1:]))!r} is "
            "left over."
        )
    return convert(field, words[0], "command line")


def _unknown(
    name: str, fields: Mapping[str, KnownField], launch: Mapping[str, bool], source: str, dashes: str = ""
) -> UsageError:
    owners = sorted({field.owner for field in fields.values()})
    return UsageError(
        f"{source}: {dashes}{printable(name)} is no setting of {', '.join(owners)} in the installed TRL, and no "
        f"option of accelerate launch.{_nearest(name, [*fields, *launch], dashes)}"
    )


def _nearest(name: str, known: Collection[str], dashes: str = "") -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f" Did you mean {dashes}{near[0]}?" if near else ""
