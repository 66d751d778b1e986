"""DS901: a probe failed and was switched off. Known from a note, not from a step."""

from __future__ import annotations

from driftscope._text import printable
from driftscope.records import NoteRecord
from driftscope.rules.base import Finding, Rule


def note_finding(note: NoteRecord) -> Finding:
    """What a note about Driftscope itself means: something could not be measured from then on."""
    stage = printable(note.stage)
    title = f"Driftscope's stage {stage!r} failed and was switched off"
    if note.stage == "journal":
        title = "The journal has a gap"  # it goes on where it can be written again
    return Finding("warning", title, f"{stage}: {printable(note.message)} (step {note.step})", RULE.remedy)


RULE = Rule(
    code="DS901",
    name="probe-failed",
    title="A probe failed and was switched off",
    group="Driftscope itself",
    why=(
        "An error inside Driftscope never ends a run: it is caught, told once, recorded as a note, and the probe that "
        "failed is switched off. From then on its signals are unavailable, which is not the same as fine."
    ),
    condition="The run has a note: Driftscope writes one when something of its own failed. Always a warning.",
    remedy=(
        "Read the note: a memory error calls for a smaller workspace_bytes, an unknown attribute for a TRL or Liger "
        "version that this Driftscope does not know. Report the note with the versions in run.json."
    ),
    check=None,
    source="note",
)
