"""DS213: trainer and sampling engine do not read text alike."""

from __future__ import annotations

from driftscope._text import printable
from driftscope.records import Severity, StepRecord
from driftscope.rules.base import Finding, Rule, Thresholds


def check(record: StepRecord, thresholds: Thresholds) -> Finding | None:
    """Fires on what the canary found when it asked the engine's tokenizer."""
    found = record.canary.tokenizer if record.canary is not None else None
    if not found:
        return None
    ends = any(text.startswith(("end of sequence", "vocabulary")) for text in found)
    severity: Severity = "warning" if ends else "info"
    return Finding(severity, RULE.title, printable("; ".join(found)), RULE.remedy)


RULE = Rule(
    code="DS213",
    name="tokenizer-disagreement",
    title="Trainer and sampling engine have different tokenizers",
    group="sampling",
    why=(
        "An engine with another end of sequence stops where the trainer does not, or never; with another vocabulary "
        "its token ids mean something else. A prompt that is sent as text becomes another prompt. The ratio shows "
        "none of this: both sides score the ids that the engine returned."
    ),
    condition=(
        "The colocated engine's tokenizer differs from the trainer's in the number of tokens or the end of sequence "
        "(warning), or only in how it splits a prompt of the batch (info: it matters where TRL sends text, not token "
        "ids). Unavailable with an engine in another process."
    ),
    remedy=(
        "Give both the same tokenizer: save processing_class beside the model that the engine loads, with the same "
        "transformers version, and set eos_token_id alike in tokenizer and generation_config.json."
    ),
    check=check,
)
