"""All rules, and their evaluation on a step."""

from __future__ import annotations

from collections.abc import Callable

from driftscope.records import AlertRecord, StepRecord
from driftscope.rules import (
    ds101_grad_norm_gap,
    ds102_is_correction,
    ds103_normalizer,
    ds104_tool_mask,
    ds105_kl_bias_correction,
    ds106_delta_clamp,
    ds107_logit_transform,
    ds108_head_adapter,
    ds109_unexplained,
    ds110_reported_norm,
    ds111_refused_options,
    ds112_reference_error,
    ds201_truncated_support,
    ds202_ratio_collapsed,
    ds203_all_masked,
    ds401_nonfinite,
    ds402_nothing_to_train,
    ds901_probe_failed,
)
from driftscope.rules.base import Rule, Thresholds

_MODULES = (
    ds101_grad_norm_gap,
    ds102_is_correction,
    ds103_normalizer,
    ds104_tool_mask,
    ds105_kl_bias_correction,
    ds106_delta_clamp,
    ds107_logit_transform,
    ds108_head_adapter,
    ds109_unexplained,
    ds110_reported_norm,
    ds111_refused_options,
    ds112_reference_error,
    ds201_truncated_support,
    ds202_ratio_collapsed,
    ds203_all_masked,
    ds401_nonfinite,
    ds402_nothing_to_train,
    ds901_probe_failed,
)


def registry() -> tuple[Rule, ...]:
    """All rules, ordered by code."""
    return tuple(sorted((module.RULE for module in _MODULES), key=lambda rule: rule.code))


def evaluate(
    record: StepRecord,
    thresholds: Thresholds | None = None,
    on_error: Callable[[str, Exception], None] | None = None,
) -> list[AlertRecord]:
    """The findings of every rule on one step, ordered by code.

    on_error: told the code and the exception of a rule that fails, so that the others still speak; without it the
    exception is raised.
    """
    limits = thresholds or Thresholds()
    alerts = []
    for rule in registry():
        if rule.check is None:
            continue
        try:
            finding = rule.check(record, limits)
        except Exception as error:
            if on_error is None:
                raise
            on_error(rule.code, error)
            continue
        if finding is not None:
            alerts.append(
                AlertRecord(
                    time=record.time,
                    step=record.step,
                    rank=record.rank,
                    rule=rule.code,
                    severity=finding.severity,
                    title=finding.title,
                    evidence=finding.evidence,
                    remedy=finding.remedy,
                )
            )
    return alerts
