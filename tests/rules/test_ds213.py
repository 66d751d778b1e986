from __future__ import annotations

import pytest

from driftscope.records import CanaryRecord
from tests.canary_steps import found
from tests.record_factory import honest_ratio, step


def looked(tokenizer):
    return step(is_ratio=honest_ratio(), canary=CanaryRecord(tokenizer=tokenizer))


@pytest.mark.parametrize(
    ("words", "severity"),
    [
        ("end of sequence: token 2 in the engine, 5 in the trainer", "warning"),
        ("vocabulary: 512 tokens in the engine, 520 in the trainer", "warning"),
        ("a prompt of 40 characters: 0 tokens in the engine, 9 in the trainer", "info"),
    ],
)
def test_a_difference_is_told(words, severity):
    alert = found(looked([words]), "DS213")
    assert alert.severity == severity
    assert words in alert.evidence


def test_agreement_and_silence_are_no_finding():
    assert found(looked([]), "DS213") is None
    assert found(looked(None), "DS213") is None
    assert found(step(), "DS213") is None
