"""What the doctor prints."""

from __future__ import annotations

import io

from rich.console import Console

from driftscope.dashboards.doctor import headline, show
from driftscope.doctor import Diagnosis, Facts, FeatureRow, ModelFacts, Settings, StackTable
from driftscope.rules import Finding

ROWS = (
    FeatureRow(feature="is_correction", path="liger", status="dropped", factor=127.0, in_use=True),
    FeatureRow(feature="is_correction", path="reference", status="honoured", factor=1.0, in_use=True),
    FeatureRow(feature="delta", path="liger", status="refused", message="Liger does not [bold]support[/bold] delta"),
)
FACTS = Facts(
    settings=Settings(source="run\x1b[2J.yaml"),
    stack=StackTable(rows=ROWS, live="liger", versions={"trl": "9.9"}, seconds=2.0),
    model=ModelFacts(model_type="qwen2", copy=True),
    unavailable={"reward": "no [red]batch[/red]"},
)
FINDING = Finding("critical", "A title", "12 of 12 adapters, measured " + "word " * 40, "Set a=1.", "DS301")


def printed(diagnosis: Diagnosis) -> str:
    stream = io.StringIO()
    show(diagnosis, Console(file=stream, width=100, color_system=None))
    return stream.getvalue()


def test_findings_table_and_gaps_are_shown_as_text():
    text = printed(Diagnosis((FINDING,), FACTS, {"DS999": "RuntimeError: on purpose"}))
    assert "1 finding (1 critical) in run\ufffd[2J.yaml" in text
    assert "CRITICAL DS301 A title" in text
    assert "remedy: Set a=1." in text
    assert "docs/rules/DS301.md" in text
    assert "importance sampling correction*" in text
    assert "dropped, gradient 127×" in text
    assert "[bold]support[/bold]" in text  # upstream's words are text, no markup
    assert "unavailable: reward: no [red]batch[/red]" in text
    assert "DS999 could not judge" in text
    assert "small random qwen2 model" in text
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 120


def test_the_path_that_trains_comes_first():
    header = next(line for line in printed(Diagnosis((), FACTS)).splitlines() if "feature" in line)
    assert header.index("Liger") < header.index("TRL reference")
    assert "Liger (fused) (trains)" in header


def test_nothing_found_still_says_what_is_missing():
    assert headline(Diagnosis((), Facts())) == "driftscope doctor: nothing found"
    assert headline(Diagnosis((), FACTS)).endswith("1 measurement could not be had")
