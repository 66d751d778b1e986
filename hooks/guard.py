"""The promise that a diagnostic never ends a run: an error in a stage is caught, told once, and switches it off.

Out of memory is another case: what the stage held is let go first, since the training needs it, and a stage that may
run twice is tried once more in a smaller workspace before it is switched off.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# Their result does not depend on a first try that failed: they only set what they fill.
RETRIED = frozenset({"head", "reference", "oracle", "mismatch", "fused_call", "corrected", "param_norm"})
_WORDS = ("out of memory", "can't allocate memory", "alloc_failed")


class Guard:
    """Runs the stages of Driftscope. ``off``: stage -> why it was switched off.

    let_go: drops what is held between stages. shrink: makes the workspace smaller, ``False`` where it is at its least;
    without one a stage is tried again as it is. retried: stage -> how often it ran out of memory and ran again.
    """

    def __init__(self, told: Callable[[str, str], None]) -> None:
        self.off: dict[str, str] = {}
        self.retried: dict[str, int] = {}
        self.shrink: Callable[[], bool] | None = None
        self.let_go: Callable[[], None] | None = None
        self._told = told

    def run(self, stage: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """The function's result, or ``None`` where the stage is off or fails now."""
        if stage in self.off:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
            if not (is_out_of_memory(error) and stage in RETRIED and self._smaller(error)):
                self.fail(stage, error)
                return None
        # Outside of the handler: the error, and with it every frame of the first try, is gone.
        self._free()
        self.retried[stage] = self.retried.get(stage, 0) + 1
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - as above
            self.fail(stage, error)
            return None

    def fail(self, stage: str, error: BaseException) -> None:
        """Switch a stage off and tell about it, once; telling must not fail either."""
        if is_out_of_memory(error):
            release(error)
            self._free()
        if stage in self.off:
            return
        self.off[stage] = f"{type(error).__name__}: {error}"
        try:
            self._told(stage, self.off[stage])
        except Exception as second:  # noqa: BLE001 - as above
            self.off["tell"] = f"{type(second).__name__}: {second}"

    def _smaller(self, error: BaseException) -> bool:
        """Let go of what the first try held, and make the workspace smaller."""
        release(error)
        try:
            return self.shrink is None or self.shrink()
        except Exception:  # noqa: BLE001 - as above
            return False

    def _free(self) -> None:
        """Give memory that nothing uses any more back to the device, so that other allocations fit."""
        with contextlib.suppress(Exception):
            if self.let_go is not None:
                self.let_go()
        gc.collect()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: of a device (by torch, CUDA or cuBLAS) or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)


def release(error: BaseException) -> None:
    """Clear the local variables of the frames that an error came through: they keep tensors alive."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        waiting += [one.__cause__, one.__context__]
