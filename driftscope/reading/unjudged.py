"""What the rules say of records that nobody had judged: a run that died before it did, or an older journal."""

from __future__ import annotations

from driftscope.reading.alerts import Alerts
from driftscope.records import RunInfo, StepRecord
from driftscope.rules import Thresholds, evaluate


class Unjudged:
    """Evaluates the rules, with the run's own thresholds, on records that are not marked as judged."""

    def __init__(self, info: RunInfo | None, alerts: Alerts) -> None:
        self._thresholds = Thresholds.from_settings(info.settings if info is not None else {})
        self._alerts = alerts

    def evaluate(self, record: StepRecord) -> None:
        """Put the findings on one record among the alerts, unless it was judged; a rule that fails is passed over."""
        if record.judged:
            return
        for alert in evaluate(record, self._thresholds, on_error=lambda code, error: None):
            self._alerts.add_evaluated(alert)
