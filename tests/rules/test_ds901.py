from __future__ import annotations

from driftscope.journal import Run
from driftscope.rules import note_finding
from driftscope.verdict import judge
from tests.record_factory import honest_ratio, note, step


def test_a_failed_stage_is_a_warning_that_names_it():
    finding = note_finding(note("OutOfMemoryError: 3 GiB", stage="deep"))
    assert finding.severity == "warning"
    assert "deep" in finding.title
    assert "OutOfMemoryError: 3 GiB" in finding.evidence


def test_a_run_without_notes_has_no_such_finding():
    steps = [step(is_ratio=honest_ratio())]
    assert judge(Run(None, steps, [], [])).level == "clean"
    assert judge(Run(None, steps, [], [note()])).level == "warning"
