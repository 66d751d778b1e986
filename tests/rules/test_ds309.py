from __future__ import annotations

import math

import pytest

from tests.rules.reward_facts import facts, found


def test_a_padded_batch_that_raises():
    error = "ValueError: Cannot handle batch sizes > 1 if no padding token is defined."
    finding = found("DS309", facts(pad_token_id=None, padding_shift=None, padding_error=error))
    assert finding.severity == "critical"
    assert "pad_token_id=None" in finding.evidence
    assert "Cannot handle batch sizes" in finding.evidence
    assert "pad_token_id = tokenizer.pad_token_id" in finding.remedy


def test_an_id_without_an_embedding():
    error = "the pad token's id 512 is outside the embedding, which has 512 rows"
    assert "resize_token_embeddings" in found("DS309", facts(pad_token_id=512, padding_error=error)).remedy


@pytest.mark.parametrize(("shift", "words"), [(0.6, "by 60%"), (math.nan, "no finite amount")])
def test_a_reward_that_padding_changes(shift, words):
    finding = found("DS309", facts(padding_shift=shift))
    assert finding.severity == "critical"
    assert words in finding.evidence


def test_rounding_and_what_was_not_measured_are_left_alone():
    assert found("DS309", facts()) is None
    assert found("DS309", facts(padding_shift=0.01)) is None  # bfloat16
    assert found("DS309", facts(padding_shift=None)) is None
