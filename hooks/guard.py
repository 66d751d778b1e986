"""The promise that a diagnostic never ends a run: an error in a stage is caught, told once, and switches it off."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Guard:
    """Runs the stages of Driftscope. ``off``: stage -> why it was switched off."""

    def __init__(self, told: Callable[[str, str], None]) -> None:
        self.off: dict[str, str] = {}
        self._told = told

    def run(self, stage: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """The function's result, or ``None`` where the stage is off or fails now."""
        if stage in self.off:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
            self.fail(stage, error)
            return None

    def fail(self, stage: str, error: BaseException) -> None:
        """Switch a stage off and tell about it; telling must not fail either."""
        self.off[stage] = f"{type(error).__name__}: {error}"
        try:
            self._told(stage, self.off[stage])
        except Exception as second:  # noqa: BLE001 - as above
            self.off["tell"] = f"{type(second).__name__}: {second}"
