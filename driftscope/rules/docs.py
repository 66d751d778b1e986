"""``python -m driftscope.rules.docs docs/rules``: one page for each rule and an index, from the rules themselves."""

from __future__ import annotations

import sys
from pathlib import Path

from driftscope.rules.base import Rule
from driftscope.rules.registry import registry

_SOURCES = {
    "step": "each analysed step",
    "run": "the run's settings",
    "note": "the run's notes",
    "doctor": "the doctor's facts",
}


def page(rule: Rule) -> str:
    """The Markdown page of a rule."""
    foreseen = f"Before a run (`driftscope doctor`): {rule.foreseen}\n\n" if rule.foreseen else ""
    return (
        f"# {rule.code}: {rule.title}\n\n"
        f"`{rule.name}`, group: {rule.group}, judged from {_sources(rule)}\n\n"
        f"## Why it matters\n\n{rule.why}\n\n"
        f"## When it fires\n\n{rule.condition}\n\n{foreseen}"
        f"## What to do\n\n{rule.remedy}\n"
    )


def _sources(rule: Rule) -> str:
    """What the rule judges, in words."""
    both = rule.predict is not None and rule.source != "doctor"
    return _SOURCES[rule.source] + (f" and {_SOURCES['doctor']}" if both else "")


def index() -> str:
    """The Markdown index of all rules."""
    rows = "".join(f"| [{r.code}]({r.code}.md) | {r.title} | {r.group} |\n" for r in registry())
    return (
        "# Rules\n\n"
        "Each finding carries the code of its rule. These pages are generated from the rules by\n"
        "`python -m driftscope.rules.docs docs/rules`.\n\n"
        "| code | finding | group |\n| --- | --- | --- |\n" + rows
    )


def pages() -> dict[str, str]:
    """File name to content of every page."""
    return {"README.md": index(), **{f"{rule.code}.md": page(rule) for rule in registry()}}


def main(arguments: list[str]) -> int:
    """Write the pages into the directory that is named."""
    if len(arguments) != 1:
        print("usage: python -m driftscope.rules.docs DIRECTORY", file=sys.stderr)
        return 2
    target = Path(arguments[0])
    target.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (target / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
