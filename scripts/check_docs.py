"""Check that every relative link and anchor in the Markdown pages leads somewhere: ``make docs``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+\s+(.+?)\s*#*$", re.MULTILINE)
ELSEWHERE = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def pages() -> list[Path]:
    """The Markdown files at the top and in docs/, examples/ and benchmarks/."""
    found = list(ROOT.glob("*.md"))
    for folder in ("docs", "examples", "benchmarks"):
        found += (ROOT / folder).rglob("*.md")
    return sorted(found)


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    names: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        base = re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", plain))
        name, n = base, 0
        while name in names:
            n += 1
            name = f"{base}-{n}"
        names.add(name)
    return names


def broken(page: Path) -> list[str]:
    """What each broken link of a page says."""
    found = []
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if ELSEWHERE.match(target):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        if not goal.exists():
            found.append(f"{page.relative_to(ROOT)}: {target} does not exist")
        elif anchor and goal.suffix == ".md" and anchor not in anchors(goal):
            found.append(f"{page.relative_to(ROOT)}: {target} has no such heading")
    return found


def main() -> int:
    """Print broken links; exit code 1 where there is one."""
    every = pages()
    problems = [problem for page in every for problem in broken(page)]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"docs: {len(every)} pages, {len(problems)} broken links")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
