"""The trainer callback: attaches by itself where it is given to a trainer, and paces the accumulation windows."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from driftscope.config import DriftscopeConfig
from driftscope.errors import DriftscopeError

if TYPE_CHECKING:
    from driftscope.hooks.scope import Scope


class DriftscopeCallback(TrainerCallback):  # type: ignore[misc]
    """``GRPOTrainer(..., callbacks=[DriftscopeCallback(run_dir="runs/mine")])`` and nothing else to change.

    Takes the fields of ``DriftscopeConfig``. On a trainer it does not support it warns once and does nothing.
    """

    def __init__(self, run_dir: Any = None, **settings: Any) -> None:
        if run_dir is not None:
            settings["run_dir"] = run_dir
        self.config = DriftscopeConfig(**settings)
        self.scope: Scope | None = None
        self._bound = False

    def bind(self, scope: Scope) -> None:
        """Use a scope that was opened by ``attach``; it then lives until its ``detach``."""
        self.scope, self._bound = scope, True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.scope is None:
            try:
                from driftscope.hooks.scope import open_scope

                self.scope = open_scope(self._find_trainer(), self.config)
                self.scope.callback = None
            except Exception as error:  # noqa: BLE001 - a diagnostic that cannot attach must not end the training
                clear = isinstance(error, DriftscopeError)
                why = str(error) if clear else f"{type(error).__name__}: {error}"
                warnings.warn(f"Driftscope is not attached, the training goes on without it. {why}", stacklevel=2)
                return
        self.scope.begin_run()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.scope is not None:
            self.scope.together_or_alone(self.scope.begin_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.scope is not None:
            self.scope.together_or_alone(self.scope.finish_step, control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.scope is not None:
            self.scope.keep()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.scope is None:
            return
        self.scope.end_run()
        if not self._bound:
            self.scope.detach()
            self.scope = None

    def _find_trainer(self) -> Any:
        """The trainer that is calling: the nearest frame whose ``self`` holds this callback."""
        frame = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            handler = getattr(owner, "callback_handler", None)
            if handler is not None and self in getattr(handler, "callbacks", ()):
                return owner
            frame = frame.f_back  # type: ignore[assignment]
        raise DriftscopeError(
            "The trainer that runs this callback was not found on the call stack; "
            "use driftscope.attach(trainer) instead."
        )
