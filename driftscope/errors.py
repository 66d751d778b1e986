"""Every error Driftscope raises on purpose. Each says the setting, the mechanism and the remedy.

DriftscopeError                 base; carries the exit code of the command line
├── UsageError                  a wrong argument or option
├── UnsupportedTrainerError     not a GRPO trainer, or a TRL version whose internals are not known
├── RunDirectoryError           a run directory that cannot be written or read
├── RecordError                 a records file that is missing, empty, foreign or of an unknown schema
└── CapsuleError                a replay capsule that is missing, damaged, foreign or of a newer schema
"""

from __future__ import annotations

EXIT_CLEAN = 0
EXIT_FINDINGS = 1
EXIT_USAGE = 2


class DriftscopeError(Exception):
    """Base of all errors that Driftscope raises on purpose; ``exit_code`` is what the command line returns."""

    exit_code = EXIT_USAGE


class UsageError(DriftscopeError):
    """A wrong argument or option."""


class UnsupportedTrainerError(DriftscopeError):
    """The object is not a GRPO trainer, or its TRL version lacks a seam that Driftscope needs."""


class RunDirectoryError(DriftscopeError):
    """The run directory cannot be written or read."""


class RecordError(DriftscopeError):
    """A records file is missing, empty, foreign, or of an unknown schema version."""


class CapsuleError(DriftscopeError):
    """A replay capsule cannot be written, or is missing, damaged, foreign or of a newer schema version."""
