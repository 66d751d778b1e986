"""Attach to a live trainer: instance-level wrappers that observe, and nothing that stays after ``detach``."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec

import torch

from driftscope.config import DriftscopeConfig
from driftscope.errors import UsageError
from driftscope.hooks import adapters, bias_file
from driftscope.hooks.callback import DriftscopeCallback
from driftscope.hooks.capture import Capture, MicroBatch
from driftscope.hooks.drift import DriftWatch
from driftscope.hooks.guard import Guard
from driftscope.hooks.head import backbone_name
from driftscope.hooks.probe import Probe
from driftscope.hooks.recorder import Recorder
from driftscope.hooks.shadow import token_counts
from driftscope.hooks.step_end import close_window, gradient_size, whole_records
from driftscope.hooks.together import Step, Together
from driftscope.hooks.window import Window, measured_micro_steps
from driftscope.hooks.workspace import halve
from driftscope.records import StepRecord
from driftscope.rules.base import Thresholds
from driftscope.schedule import Cadence, spent

P = ParamSpec("P")
_ABSENT = object()
RESUMED_STEPS = 2000
"""Records of a run that goes on from which the drift detectors learn again."""
STARVED = (
    "light steps alone cost more than max_overhead={budget:g} of the run's time, so no further step is analysed once "
    "the savings are gone. Raise max_overhead, or set max_overhead=0 to keep the cadence whatever it costs."
)


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
        self.cadence = Cadence(
            spectrum_every=config.spectrum_every, deep_every=config.deep_every, max_overhead=config.budget
        )
        self.together = Together(trainer, config, self._told)
        self._capture: Capture | None = None
        self._window = Window(0, "light", ())
        self._in_step = False
        self._carried_ms = 0.0  # what was spent since the last record
        self._after_ms = 0.0  # what the end of the last step cost
        self._originals: dict[str, Any] = {}
        self._starved = False
        self._undo: list[tuple[Any, str, Any, Any]] = []
        if config.mode == "correct":
            self._correct()  # what the user asked for either works or is refused
        self.guard.run("attach", self._install)

    # -- what is put in place, and taken away -------------------------------------------------------------------

    def _install(self) -> None:
        trainer = self.trainer
        self.probe = probe = Probe(trainer, self.config, self.guard)
        self.guard.shrink = partial(halve, probe.heads)
        self.guard.let_go = lambda: probe.deep.windows.clear()
        backbone = self.probe.inner._modules[backbone_name(self.probe.inner)]
        self._capture = Capture(
            backbone,
            trainer.accelerator.device,
            timed=self.together.ranks.several,
            failed=partial(self.guard.fail, "capture"),
        )
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
        self.together.ranks.close()
        self.recorder.close()

    def __enter__(self) -> Scope:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    # -- what the trainer calls ---------------------------------------------------------------------------------

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        self._in_step = True
        batch = self.guard.run("capture", self._begin)
        started = time.perf_counter()
        inside = self._window.own_ms
        try:
            loss = self._originals["training_step"](*args, **kwargs)
        except RuntimeError as error:
            if "does not require grad" in str(error):
                self.guard.run("gradient_flow", self._explain, error)
            raise
        finally:
            self._in_step = False
            if self._capture is not None:
                self._capture.current = None
        ended = time.perf_counter()
        inside = self._window.own_ms - inside
        record = None
        if batch is not None:
            record = self.guard.run("record", self._analyse, batch, (ended - started) * 1e3 - inside)
        spent = (time.perf_counter() - ended + started - begun) * 1e3
        self._window.own_ms += spent
        self._carried_ms += spent + inside
        if record is not None:
            record.overhead_ms, self._carried_ms = self._carried_ms, 0.0
        self._window.micro_step += 1
        return loss

    def _explain(self, error: RuntimeError) -> None:
        """The loss had no graph: record why, and say it in the error that goes on."""
        from driftscope.hooks.doctor.explain import explain

        self.recorder.alert(explain(self.trainer, error, self._window.step))

    def _compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self._capture.current if self._capture is not None else None
        if batch is not None:
            self.guard.run("capture", self._keep_inputs, batch, inputs)
        if self._in_step and self._window.measures and self.together.ranks.open:
            self.together_or_alone(self._agree, batch)
        loss = self._originals["compute_loss"](model, inputs, *args, **kwargs)
        if batch is not None and isinstance(loss, torch.Tensor):
            batch.loss = loss.detach()
        return loss

    def _clip_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        self.guard.run("param_norm", lambda: self.probe.deep.clipping() if self.probe is not None else None)
        norm = self._originals["clip_grad_norm_"](*args, **kwargs)
        self._window.grad_norm = norm
        return norm

    # -- what happens around it ---------------------------------------------------------------------------------

    def _agree(self, batch: MicroBatch | None) -> None:
        """With the other ranks, before the loss of a measured micro-batch; every rank comes here, whatever it has."""
        begun = time.perf_counter()
        inputs = batch.inputs if batch is not None else None
        counts = self.guard.run("counts", token_counts, inputs) if inputs is not None else None
        ready = self.probe is not None and self.guard.run("gather", self._ready, self.probe) is True
        means, all_ready = self.together.agree(counts, ready)
        if batch is not None:
            batch.rank_mean_tokens = means
        if all_ready and self.probe is not None:
            self.guard.run("gather", self.probe.heads.gather)
        self._window.own_ms += (time.perf_counter() - begun) * 1e3

    @staticmethod
    def _ready(probe: Probe) -> bool:
        probe.heads.reserve()
        return True

    def _begin(self) -> MicroBatch | None:
        if self._capture is None:
            return None
        self._capture.current = MicroBatch(self._window.batch_tier())
        return self._capture.current

    def _keep_inputs(self, batch: MicroBatch, inputs: Any) -> None:
        batch.entropy_coef = adapters.entropy_coef(self.trainer)
        batch.inputs = dict(inputs)

    def _analyse(self, batch: MicroBatch, step_ms: float) -> StepRecord | None:
        assert self.probe is not None
        window = self._window
        window.forward_spans += batch.forward_spans
        if window.micro_step not in window.chosen:
            return None
        record = self.blank(window.micro_step)
        record.step_ms = step_ms
        window.records[window.micro_step] = record
        window.locals[window.micro_step] = batch.local
        window.failed.add(window.micro_step)
        self.probe.analyse(batch, record)
        window.failed.remove(window.micro_step)
        record.unavailable.update(self.guard.off)
        return record

    def blank(self, micro_step: int) -> StepRecord:
        """A record of the window in hand with nothing measured."""
        live = self.probe.live if self.probe is not None else adapters.own_path(self.trainer)
        return StepRecord(
            time=time.time(),
            step=self._window.step,
            micro_step=micro_step,
            accumulation=adapters.accumulation_steps(self.trainer),
            rank=self.trainer.accelerator.process_index,
            tier=self._window.tier,
            live=live,
            live_head=adapters.live_head(self.trainer, live),
        )

    # -- around an optimizer step -------------------------------------------------------------------------------

    def together_or_alone(self, place: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Come to a place where the ranks meet; where that fails, let the others know and go on alone."""
        try:
            place(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the run goes on, whatever it is
            self.together.ranks.close()
            self.guard.fail("ranks", error)

    def begin_step(self) -> None:
        """A new accumulation window starts."""
        step = self.trainer.state.global_step + 1
        accumulation, limit = adapters.accumulation_steps(self.trainer), self.config.micro_batches
        tier = self.cadence.tier(step)
        self._window = Window(step, tier, measured_micro_steps(step, tier, accumulation, limit))
        self.guard.run("window", self.begin_window)

    def begin_window(self) -> None:
        """Let go of what was held of the last window."""
        if self.probe is not None:
            self.probe.deep.windows.clear()
            self.guard.run("capsule", self.probe.capsules.begin)

    def finish_step(self, control: Any) -> None:
        """The optimizer has stepped. Every rank comes to the exchange in here, whatever has failed on it before."""
        begun, window = time.perf_counter(), self._window
        size = gradient_size(self.probe, window, self.together.ranks)
        gradient = self.guard.run("window", close_window, self.probe, window, self.guard, size)
        if gradient is None:
            gradient = torch.zeros(size, dtype=torch.float64)
        own_ms = window.own_ms + self._after_ms + (time.perf_counter() - begun) * 1e3
        told = self.together.exchange(window, own_ms, self.guard.off, gradient, partial(self.guard.run, "pack"))
        self.guard.run("window", self.end_window, control, told)
        if told is not None and told.stop:
            control.should_training_stop = True
        step_ms = told.step_ms if told is not None else max(window.passed_ms() - window.own_ms, 0.0)
        self.cadence.spend(window.step, window.tier, told.own_ms if told is not None else own_ms, step_ms)
        self._after_ms = (time.perf_counter() - begun) * 1e3
        self._carried_ms += self._after_ms

    def end_window(self, control: Any, told: Step | None) -> None:
        """Complete the window's records, write them, judge them. Rank 0 does it for all."""
        window = self._window
        self.guard.run("rank_journal", self.recorder.write_own, window.recorded)
        if not self.recorder.main or not (window.records or told):
            return
        records = whole_records(self, window, told)
        if not records:
            return
        last = records[-1]
        last.cadence = self.cadence.record()
        if self.cadence.starved and not self._starved:
            self._starved = True
            self.guard.run("cadence", self._told, "cadence", STARVED.format(budget=self.config.budget))
        if self.probe is not None and self.probe.spec is not None:
            self.guard.run("run_info", self.recorder.describe_spec, self.probe.spec.as_dict())
        self.guard.run("drift", self.drift.update, last)
        alerts = self.guard.run("records", self.recorder.write, records, self.guard) or []
        if self.probe is not None:
            saved = self.guard.run("capsule", self.probe.capsules.after_window, last.step, alerts, self.recorder.info)
            if saved is not None and self.recorder.console is not None:
                self.guard.run("console", self.recorder.console.saved, saved)
        if self.config.on_divergence == "stop" and any(a.severity == "critical" for a in alerts):
            self.together.stop = True  # with several ranks, all stop after the next step
            if not self.together.ranks.several:
                control.should_training_stop = True

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
        self.together_or_alone(partial(self.together.connect, ready=self._capture is not None))
        self.guard.run("run_info", self.recorder.begin)
        if self.probe is not None:
            self.probe.capsules.config = self.recorder.config  # another run may hold the directory that was asked for
        if self.trainer.state.global_step > 0:
            self.guard.run("drift", self._resume)
            self.guard.run("bias_load", self._resume_bias)

    def _resume(self) -> None:
        """Learn from the records of the run that goes on; the cadence that ranks share starts anew on all of them."""
        earlier = self.recorder.earlier(RESUMED_STEPS)
        self.drift.resume(earlier)
        if not self.together.ranks.several:
            self.cadence.resume(spent(earlier))

    def _resume_bias(self) -> None:
        info, step = self.recorder.info, self.trainer.state.global_step
        if self.probe is not None and info is not None:
            deep, run_dir = self.probe.deep, Path(self.recorder.config.run_dir)
            layout = deep.layout
            deep.bias = bias_file.load(run_dir, info.run_id, step, layout)

    def keep(self) -> None:
        """The trainer has saved a checkpoint: keep what a run that goes on from it cannot measure again."""
        info, bias = self.recorder.info, self.probe.deep.bias if self.probe is not None else None
        if info is not None and bias is not None and self.recorder.journal is not None:
            begun, run_dir = time.perf_counter(), Path(self.recorder.config.run_dir)
            self.guard.run("bias", bias_file.save, run_dir, info.run_id, self.trainer.state.global_step, bias)
            spent_ms = (time.perf_counter() - begun) * 1e3
            self._after_ms += spent_ms
            self._carried_ms += spent_ms

    def end_run(self) -> None:
        """Training has ended: finish run.json, write the report, leave the line to the other ranks."""
        self.guard.run("report", self.recorder.finish)
        self.recorder.rest()
        self.together.ranks.close()

    def _told(self, stage: str, why: str) -> None:
        self.recorder.note(self._window.step, stage, why)


def open_scope(trainer: Any, config: DriftscopeConfig) -> Scope:
    """A scope for a trainer that a callback has found. Raises like ``attach``."""
    adapters.require_grpo(trainer)
    return Scope(trainer, config)
