"""Attach to a live trainer: instance-level wrappers that observe, and nothing that stays after ``detach``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from driftscope.config import DriftscopeConfig
from driftscope.errors import UsageError
from driftscope.hooks import adapters
from driftscope.hooks.callback import DriftscopeCallback
from driftscope.hooks.capture import Capture, MicroBatch
from driftscope.hooks.drift import DriftWatch
from driftscope.hooks.guard import Guard
from driftscope.hooks.head import backbone_name
from driftscope.hooks.probe import Probe
from driftscope.hooks.recorder import Recorder
from driftscope.records import StepRecord
from driftscope.rules.base import Thresholds
from driftscope.schedule import tier

_ABSENT = object()
RESUMED_STEPS = 2000
"""Records of a run that goes on from which the drift detectors learn again."""


def attach(trainer: Any, run_dir: Any = None, **settings: Any) -> Scope:
    """Attach Driftscope to a GRPO trainer, before ``trainer.train()``.

    ``settings`` are the fields of ``DriftscopeConfig``. Returns the scope; ``scope.detach()`` leaves no trace.
    Raises UnsupportedTrainerError for what is not a supported GRPO trainer, UsageError for a bad setting or a second
    attach. A run directory that cannot be written is told and does without records: the training goes on.
    """
    adapters.require_grpo(trainer)
    if any(isinstance(cb, DriftscopeCallback) for cb in trainer.callback_handler.callbacks):
        raise UsageError(
            "Driftscope is attached to this trainer already; call detach() on the first scope, or drop one of the two."
        )
    if run_dir is not None:
        settings["run_dir"] = run_dir
    callback = DriftscopeCallback(**settings)
    scope = Scope(trainer, callback.config)
    callback.bind(scope)
    scope.callback = callback
    trainer.add_callback(callback)
    return scope


class Scope:
    """Driftscope on one trainer: its wrappers, its probe, its recorder."""

    def __init__(self, trainer: Any, config: DriftscopeConfig) -> None:
        self.trainer, self.config = trainer, config
        self.callback: DriftscopeCallback | None = None
        self.recorder = Recorder(trainer, config)
        self.guard = Guard(self._told)
        self.probe: Probe | None = None
        self.drift = DriftWatch(Thresholds(gap_warning=config.gap_warning, gap_critical=config.gap_critical))
        self._capture: Capture | None = None
        self._window: list[StepRecord] = []
        self._micro_step = 0
        self._step = 0
        self._grad_norm: Any = None
        self._carried_ms = 0.0  # what the end of the last window cost
        self._originals: dict[str, Any] = {}
        self._undo: list[tuple[Any, str, Any, Any]] = []
        if config.mode == "correct":
            self._correct()  # what the user asked for either works or is refused
        self.guard.run("attach", self._install)

    # -- what is put in place, and taken away -------------------------------------------------------------------

    def _install(self) -> None:
        trainer = self.trainer
        self.probe = Probe(trainer, self.config, self.guard)
        backbone = self.probe.inner._modules[backbone_name(self.probe.inner)]
        self._capture = Capture(backbone, trainer.accelerator.device)
        self._replace(trainer, "training_step", self._training_step)
        self._replace(trainer, "compute_loss", self._compute_loss)
        self._replace(trainer.accelerator, "clip_grad_norm_", self._clip_grad_norm)

    def _correct(self) -> None:
        """Train with the corrected loss: log-probs from the fused head, TRL's own algebra on them."""
        from driftscope.hooks.correct import CorrectedLoss

        corrected = CorrectedLoss(self.trainer)
        self._replace(self.trainer, "_get_per_token_logps_and_entropies", corrected.logps)
        self._replace(self.trainer, "compute_loss", corrected.loss)

    def _replace(self, owner: Any, name: str, wrapper: Any) -> None:
        """Put a wrapper over a method on the instance alone."""
        self._originals[name] = getattr(owner, name)
        self._undo.append((owner, name, owner.__dict__.get(name, _ABSENT), wrapper))
        setattr(owner, name, wrapper)

    def detach(self) -> None:
        """Take every wrapper, hook and callback away, and close the journal."""
        trainer = self.trainer
        if self._capture is not None:
            self._capture.remove()
            self._capture = None
        for owner, name, before, put in reversed(self._undo):
            if owner.__dict__.get(name) is not put:
                continue  # somebody has wrapped it since
            if before is _ABSENT:
                del owner.__dict__[name]
            else:
                setattr(owner, name, before)
        self._undo.clear()
        if self.callback is not None and self.callback in trainer.callback_handler.callbacks:
            trainer.remove_callback(self.callback)
        self.recorder.close()

    def __enter__(self) -> Scope:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    # -- what the trainer calls ---------------------------------------------------------------------------------

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        batch = self.guard.run("capture", self._begin)
        started = time.perf_counter()
        try:
            loss = self._originals["training_step"](*args, **kwargs)
        except RuntimeError as error:
            if "does not require grad" in str(error):
                self.guard.run("gradient_flow", self._explain, error)
            raise
        finally:
            if self._capture is not None:
                self._capture.current = None
        ended = time.perf_counter()
        if batch is not None:
            record = self.guard.run("record", self._analyse, batch, (ended - started) * 1e3)
            if record is not None:
                record.overhead_ms = (time.perf_counter() - ended + started - begun) * 1e3 + self._carried_ms
                self._carried_ms = 0.0
        self._micro_step += 1
        return loss

    def _explain(self, error: RuntimeError) -> None:
        """The loss had no graph: record why, and say it in the error that goes on."""
        from driftscope.hooks.doctor.explain import explain

        self.recorder.alert(explain(self.trainer, error, self._step))

    def _compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self._capture.current if self._capture is not None else None
        if batch is not None:
            self.guard.run("capture", self._keep_inputs, batch, inputs)
        loss = self._originals["compute_loss"](model, inputs, *args, **kwargs)
        if batch is not None and isinstance(loss, torch.Tensor):
            batch.loss = loss.detach()
        return loss

    def _clip_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = self._originals["clip_grad_norm_"](*args, **kwargs)
        self._grad_norm = norm
        return norm

    # -- what happens around it ---------------------------------------------------------------------------------

    def _begin(self) -> MicroBatch | None:
        if self._capture is None:
            return None
        due = tier(self._step, spectrum_every=self.config.spectrum_every, deep_every=self.config.deep_every)
        self._capture.current = MicroBatch(due)
        return self._capture.current

    def _keep_inputs(self, batch: MicroBatch, inputs: Any) -> None:
        batch.entropy_coef = adapters.entropy_coef(self.trainer)
        batch.inputs = dict(inputs)

    def _analyse(self, batch: MicroBatch, step_ms: float) -> StepRecord | None:
        assert self.probe is not None
        accumulation = adapters.accumulation_steps(self.trainer)
        if batch.tier == "light" and self._micro_step + 1 < accumulation:
            return None
        record = StepRecord(
            time=time.time(),
            step=self._step,
            micro_step=self._micro_step,
            accumulation=accumulation,
            rank=self.trainer.accelerator.process_index,
            tier=batch.tier,
            live=self.probe.live,
            live_head=adapters.live_head(self.trainer, self.probe.live),
            step_ms=step_ms,
        )
        self._window.append(record)
        self.probe.analyse(batch, record)
        record.unavailable.update(self.guard.off)
        return record

    def begin_window(self) -> None:
        """A new accumulation window starts."""
        self._window, self._micro_step, self._grad_norm = [], 0, None
        self._step = self.trainer.state.global_step + 1
        if self.probe is not None:
            self.probe.deep.windows.clear()
            self.guard.run("capsule", self.probe.capsules.begin)

    def end_window(self, control: Any) -> None:
        """The optimizer has stepped: complete the window's records, write them, judge them."""
        begun = time.perf_counter()
        window, self._window = self._window, []
        if not window:
            return
        last = window[-1]
        if self._grad_norm is not None:
            last.live_grad_norm = float(self._grad_norm)
        if self.probe is not None:
            self.guard.run("param_norm", self.probe.deep.close, last, self._micro_step)
            if self.probe.spec is not None:
                self.guard.run("run_info", self.recorder.describe_spec, self.probe.spec.as_dict())
        self.guard.run("drift", self.drift.update, last)
        alerts = self.guard.run("records", self.recorder.write, window, self.guard) or []
        if self.probe is not None:
            saved = self.guard.run("capsule", self.probe.capsules.after_window, last.step, alerts, self.recorder.info)
            if saved is not None and self.recorder.console is not None:
                self.guard.run("console", self.recorder.console.saved, saved)
        if self.config.on_divergence == "stop" and any(a.severity == "critical" for a in alerts):
            control.should_training_stop = True
        self._carried_ms += (time.perf_counter() - begun) * 1e3

    def save_capsule(self, directory: str | Path | None = None, *, texts: bool = False) -> Path:
        """Save the worst micro-batch of the last analysed step for ``driftscope replay``; returns its directory.

        Complete until the next step begins, without hidden states afterwards. directory: where, instead of a folder in
        ``run_dir/capsules``. texts: also the decoded completions (their token ids are always in it).

        Raises ``UsageError`` where no batch is held, ``CapsuleError`` where it cannot be written.
        """
        if self.probe is None:
            raise UsageError(f"save_capsule() has no batch: Driftscope is not attached ({self.guard.off}).")
        target = Path(directory) if directory is not None else None
        return self.probe.capsules.on_demand(self.recorder.info, target, texts=texts)

    def begin_run(self) -> None:
        """Training starts."""
        self.guard.run("run_info", self.recorder.begin)
        if self.trainer.state.global_step > 0:
            self.guard.run("drift", self.drift.resume, self.recorder.earlier(RESUMED_STEPS))

    def end_run(self) -> None:
        """Training has ended: finish run.json, write the report."""
        self.guard.run("report", self.recorder.finish)

    def _told(self, stage: str, why: str) -> None:
        self.recorder.note(self._step, stage, why)


def open_scope(trainer: Any, config: DriftscopeConfig) -> Scope:
    """A scope for a trainer that a callback has found. Raises like ``attach``."""
    adapters.require_grpo(trainer)
    return Scope(trainer, config)
