"""One writer a run directory: a lock that the kernel lets go when its process dies, however it dies."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import weakref
from pathlib import Path

LOCK_NAME = ".driftscope.lock"
_BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_TRIES = 20


class RunLock:
    """An exclusive ``flock`` on a file in the run directory, which is removed when the lock is let go.

    ``unsupported``: why the file system gave no lock, where it did not; the run then goes on without one.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = Path(run_dir) / LOCK_NAME
        self.unsupported: str | None = None
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        """Whether this process holds the lock."""
        return self._fd is not None

    def acquire(self) -> bool:
        """Take the lock; ``False`` where another run holds it. Raises ``OSError`` where its file cannot be opened."""
        if self._fd is not None and _is_at(self._fd, self.path):
            return True
        self._drop()
        try:
            import fcntl
        except ImportError:
            self.unsupported = "this system has no flock"
            return True
        for _ in range(_TRIES):
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                self.unsupported = error.strerror
                return True
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(fd)
                if error.errno in _BUSY:
                    return False
                self.unsupported = error.strerror or str(error)
                return True
            if _is_at(fd, self.path):
                self._keep(fd)
                return True
            os.close(fd)  # its holder has removed the file between our open and our lock
        return False

    def owner(self) -> str:
        """Who holds the lock, in words."""
        with contextlib.suppress(OSError, ValueError):
            text = self.path.read_bytes()[:200].decode("utf-8", "replace").split()
            if len(text) == 2 and text[0].isdigit():
                here = text[0] == str(os.getpid()) and text[1] == socket.gethostname()
                return "this process" if here else f"process {text[0]} on {text[1]}"
        return "another process"

    def release(self) -> None:
        """Let the lock go and remove its file."""
        if self._fd is not None and _is_at(self._fd, self.path):
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._drop()

    def _keep(self, fd: int) -> None:
        self._fd = fd
        _HELD.add(self)
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name in it
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)

    def _drop(self) -> None:
        fd, self._fd = self._fd, None
        _HELD.discard(self)
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __del__(self) -> None:
        self._drop()


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file is the one that stands at ``path``."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False


_HELD: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _drop_in_child() -> None:
    """A forked child (a data loader's worker) must not keep its parent's lock alive after the parent has died.

    Closing its copy of the descriptor does not unlock; ``LOCK_UN`` would.
    """
    for lock in list(_HELD):
        lock._drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)
