"""Where measurements go: the journal, the rules, the console, the trainer's own trackers, at the end the report."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from pathlib import Path
from typing import Any

from driftscope._journal_reader import RECORDS_NAME
from driftscope.config import DriftscopeConfig
from driftscope.errors import RecordError, RunDirectoryError
from driftscope.hooks.guard import Guard
from driftscope.hooks.runinfo import describe_run
from driftscope.records import SEVERITIES, AlertRecord, NoteRecord, RunInfo, StepRecord


class Recorder:
    """Writes and shows what the probe found. Only rank 0 writes."""

    def __init__(self, trainer: Any, config: DriftscopeConfig) -> None:
        from driftscope.dashboards.console import ConsoleReporter

        self.trainer, self.config = trainer, config
        self._asked_dir = Path(config.run_dir)
        self.info: RunInfo | None = None
        self.main = trainer.accelerator.is_main_process
        self.console = ConsoleReporter() if config.console and self.main else None
        self.journal: Any = None
        self.keeper: Any = None
        self._fired: frozenset[str] = frozenset()  # rules of the last window
        self.own_journal: Any = None
        self._early: list[NoteRecord] | None = []  # notes from before the training begins

    def begin(self) -> None:
        """Open the journal, write run.json and say hello. A resumed run goes on in the records it has."""
        from driftscope import __version__

        before = self._open(self.trainer.state.global_step) if self.main else None
        early, self._early = self._early or [], None
        for note in early:
            self._keep(note)
        if self.config.rank_journals and self.trainer.accelerator.num_processes > 1:
            self._open_own()
        if not self.main:
            return
        self.info = describe_run(self.trainer, self.config, __version__)
        if before is not None:
            self.info.run_id, self.info.created = before.run_id, before.created
        self._write_info()
        if self.console is not None:
            self.console.started(self.info)

    def _open(self, resumed_at: int) -> RunInfo | None:
        """Open the journal; returns the run that is resumed, where it is known.

        Where another run holds the directory, ``config.run_dir`` is the one beside it from here on.
        """
        from driftscope.journal import open_journal
        from driftscope.reading import Keeper

        if self.journal is not None:  # the same trainer trains again
            self.journal.close()
            self.journal = None
        try:
            opened = open_journal(self._asked_dir, resumed_at=resumed_at, told=self._tell)
        except RunDirectoryError as error:
            self._tell(f"{error} The run goes on without records.")
            return None
        self.journal = opened.journal
        self.keeper = Keeper(opened.journal.run_dir / RECORDS_NAME)
        self.config = dataclasses.replace(self.config, run_dir=opened.journal.run_dir)
        return opened.before

    def _open_own(self) -> None:
        """Open this rank's own journal, beside the run's."""
        from driftscope.journal import open_journal

        at = self.trainer.accelerator.process_index
        directory = self._asked_dir / "ranks" / f"rank{at}"
        self.own_journal = open_journal(directory, resumed_at=self.trainer.state.global_step, told=self._tell).journal

    def write_own(self, window: list[StepRecord]) -> None:
        """Journal this rank's records as it measured them, where that was asked for."""
        if self.own_journal is not None:
            for record in window:
                self.own_journal.write(record)

    def _tell(self, words: str) -> None:
        """Show what happens to the journal itself; where nothing is printed, through ``logging``."""
        if self.console is not None:
            self.console.note(NoteRecord(step=self.trainer.state.global_step, stage="journal", message=words))
        else:
            logging.getLogger("driftscope").warning("journal: %s", words)

    def write(self, window: list[StepRecord], guard: Guard) -> list[AlertRecord]:
        """Journal one window's records, evaluate the rules, tell; returns the window's alerts."""
        for record in window:
            _mark_nonfinite(record)
        alerts = guard.run("rules", self._judge, window)
        fired = frozenset(alert.rule for alert in alerts or [])
        fresh, self._fired = bool(fired - self._fired), fired
        for record in window:
            record.judged = alerts is not None
            guard.run("journal", self._journal, record, fresh)
        alerts = alerts or []
        for alert in alerts:
            guard.run("journal", self._journal, alert)
            if self.console is not None:
                guard.run("console", self.console.alert, alert)
        if self.keeper is not None:
            guard.run("journal", self.keeper.poll)
        if self.config.log_metrics:
            guard.run("metrics", self._log_metrics, window)
        return alerts

    def alert(self, alert: AlertRecord) -> None:
        """Journal and show a finding that is not from a step's record."""
        self._journal(alert)
        if self.console is not None:
            self.console.alert(alert)

    def _judge(self, window: list[StepRecord]) -> list[AlertRecord]:
        from driftscope.rules import Thresholds, evaluate

        limits = Thresholds(gap_warning=self.config.gap_warning, gap_critical=self.config.gap_critical)
        worst: dict[str, AlertRecord] = {}
        for record in window:
            for alert in evaluate(record, limits):
                known = worst.get(alert.rule)
                if known is None or SEVERITIES.index(alert.severity) > SEVERITIES.index(known.severity):
                    worst[alert.rule] = alert
        return sorted(worst.values(), key=lambda alert: (-SEVERITIES.index(alert.severity), alert.rule))

    def _log_metrics(self, window: list[StepRecord]) -> None:
        """Hand the window's figures to TRL's own metrics, which it averages and reports with its next log."""
        metrics = self.trainer._metrics["train"]
        for record in window:
            for name, value in metric_values(record).items():
                if value is not None and math.isfinite(value):
                    metrics[f"driftscope/{name}"].append(value)

    def note(self, step: int, stage: str, why: str, rank: int | None = None) -> None:
        """Record and show that a stage of Driftscope failed and was switched off."""
        at = self.trainer.accelerator.process_index if rank is None else rank
        note = NoteRecord(time=time.time(), step=step, stage=stage, message=why, rank=at)
        self._keep(note)
        if self.console is not None:
            self.console.note(note)
        elif self.main and self.journal is None and self._early is None:
            self._tell(f"{stage}: {why}")  # nothing else keeps it

    def _keep(self, note: NoteRecord) -> None:
        if self.journal is not None:
            self.journal.write(note)
        elif self._early is not None:
            self._early.append(note)

    def earlier(self, count: int) -> list[StepRecord]:
        """The last records of a run that goes on, at most ``count``."""
        from driftscope.reading import last_steps

        try:
            return last_steps(Path(self.config.run_dir), count) if self.journal is not None else []
        except RecordError:  # resumed in a directory that holds no records
            return []

    def describe_spec(self, spec: dict[str, Any]) -> None:
        """Add the configured loss to run.json, once it is known from the first batch."""
        if self.info is not None and not self.info.spec:
            self.info.spec = spec
            self._write_info()

    def finish(self) -> None:
        """Complete run.json and write the report."""
        if self.info is None or self.journal is None:
            return
        self.info.finished, self.info.status = time.time(), "finished"
        self._write_info()
        from driftscope.reading import read_any
        from driftscope.verdict import judge

        run_dir = Path(self.config.run_dir)
        if self.config.report:
            from driftscope.dashboards.report import render

            render(run_dir)
        if self.console is not None:
            verdict = judge(read_any(run_dir))
            self.console.finished(verdict.headline, run_dir, verdict.sampling)

    def close(self) -> None:
        """Close both journals. A run whose training has not come to its end is on record as failed."""
        if self.own_journal is not None:
            self.own_journal.close()
            self.own_journal = None
        self._close()

    def _close(self) -> None:
        if self.keeper is not None:
            self.keeper.close()
        if self.journal is not None:
            if self.info is not None and self.info.status == "running":
                self.info.finished, self.info.status = time.time(), "failed"
                self._write_info()
            self.journal.close()
            self.journal = None

    def rest(self) -> None:
        """The training has ended: leave the run directory to other runs."""
        if self.keeper is not None:
            self.keeper.close()
        for journal in (self.journal, self.own_journal):
            if journal is not None:
                journal.rest()

    def _journal(self, record: StepRecord | AlertRecord, fresh_alarm: bool = False) -> None:
        if self.journal is not None:
            self.journal.write(record, fresh_alarm=fresh_alarm)  # tells its own troubles, and tries again

    def _write_info(self) -> None:
        if self.journal is not None and self.info is not None:
            self.journal.write_info(self.info)


def metric_values(record: StepRecord) -> dict[str, float | None]:
    """The figures of one record for experiment trackers, by ``<group>/<stat>``."""
    out: dict[str, float | None] = {"overhead/ms": record.overhead_ms, "live/residual": record.residual}
    if record.gap is not None:
        out["gap/grad_norm_ratio"] = record.gap.grad_norm_ratio
        out["gap/param_grad_norm_ratio"] = record.gap.param_grad_norm_ratio
        out["gap/cosine"] = record.gap.cosine
    for name, path in record.paths.items():
        out[f"{name}/hidden_grad_norm"] = path.hidden_grad_norm
        out[f"{name}/coef_error"] = path.coef_error
    if record.is_ratio is not None and record.is_ratio.raw is not None:
        out["is_ratio/raw_mean"] = record.is_ratio.raw.mean
        out["is_ratio/ess"] = record.is_ratio.raw.ess
        out["is_ratio/kept_mass"] = record.is_ratio.kept_mass
    if record.mismatch is not None:
        out["mismatch/k1"] = record.mismatch.divergence.k1
        out["mismatch/k3"] = record.mismatch.divergence.k3
        out["mismatch/logp_abs_diff"] = record.mismatch.log_difference.abs_mean
    if record.canary is not None:
        out["canary/rms"] = record.canary.rms
        out["canary/unexplained_rms"] = record.canary.rest_rms
        out["canary/noise_floor"] = record.canary.noise_floor
    return out


def _mark_nonfinite(record: StepRecord) -> None:
    """Name the figures of a record that are NaN or infinite."""
    values = {"live_grad_norm": record.live_grad_norm, "residual": record.residual}
    for name, path in record.paths.items():
        values[f"paths.{name}.loss"] = path.loss
        values[f"paths.{name}.hidden_grad_norm"] = path.hidden_grad_norm
        values[f"paths.{name}.param_grad_norm"] = path.param_grad_norm
    for name, value in values.items():
        if value is not None and not math.isfinite(value) and name not in record.nonfinite:
            record.nonfinite.append(name)
