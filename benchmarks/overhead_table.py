"""The result of benchmarks/overhead.py as the Markdown tables of docs/overhead.md.

Use: python benchmarks/overhead_table.py FILE [FILE ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEAD = (
    "| case | step, ms | light | spectrum | deep | extra peak, MB (spectrum, deep) | as asked | under the budget |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
)


def table(result: dict[str, Any]) -> list[str]:
    """One row a case: a step's overhead by tier with its interval, memory, and the share of a long run."""
    cases = result.get("cases") or {result["settings"].get("shape", "case"): result}
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("torch", "transformers", "trl"))
    processes = result.get("processes", 1)
    return [f"{processes} x {result['device']}, {versions}", "", *HEAD, *(row(name, cases[name]) for name in cases)]


def row(name: str, case: dict[str, Any]) -> str:
    """A case's row; a case without figures says why."""
    if "tiers" not in case:
        return f"| {name} | {case.get('failed') or case.get('left_out')} | | | | | | |"
    tiers, whole = case["tiers"], case.get("composed")
    step_ms = next(iter(tiers.values()))["median_step_ms"]["asleep"]
    cells = [name, f"{step_ms:.0f}", *(_overhead(tiers.get(tier)) for tier in ("light", "spectrum", "deep"))]
    cells.append(", ".join(_memory(tiers.get(tier)) for tier in ("spectrum", "deep")))
    cells += [_asked(whole), _kept(whole)]
    return "| " + " | ".join(cells) + " |"


def _overhead(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    told = found["overhead"]
    off = f" (off: {', '.join(found['off'])})" if found["off"] else ""
    return f"{told['median']:+.1%} ({told['low']:+.1%} to {told['high']:+.1%}){off}"


def _memory(found: dict[str, Any] | None) -> str:
    if found is None or "extra_peak_bytes" not in found:
        return "-"
    return f"{found['extra_peak_bytes']['largest'] / 2**20:.0f}"


def _asked(whole: dict[str, Any] | None) -> str:
    if whole is None:
        return ""
    told = whole["share_as_asked"]
    return f"{told['median']:.2%} ({told['low']:.2%} to {told['high']:.2%})"


def _kept(whole: dict[str, Any] | None) -> str:
    if whole is None:
        return ""
    told = whole["under_budget"]
    since = told["within_budget_from_step"]
    when = f"from step {since}" if since is not None else "not within it"
    return f"{told['share']:.2%}, {when}, every {told['spectrum_every']} and {told['deep_every']}"


def main() -> None:
    """Print the tables of the files given."""
    if len(sys.argv) < 2:
        sys.exit((__doc__ or "").strip())
    for path in sys.argv[1:]:
        print("\n".join(table(json.loads(Path(path).read_text()))), end="\n\n")


if __name__ == "__main__":
    main()
