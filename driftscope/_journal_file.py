"""The records file as the writer sees it: whole lines or nothing, whatever happens to the file meanwhile."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

HEAD_BYTES = 1 << 20


class RecordsFile:
    """An append-only file of lines. Unbuffered: what ``write`` has returned from survives the death of the process.

    Before every line it looks whether the file is still the one it knows: one that has vanished is made again, one
    that was cut or replaced is continued on a line of its own. ``happened`` is told about that, in words; ``claim``
    is asked before another file is taken for this one, and raises ``OSError`` where another run owns it.
    """

    def __init__(self, path: Path, happened: Callable[[str], None], claim: Callable[[], None]) -> None:
        self.path = path
        self._happened, self._claim = happened, claim
        self._fd: int | None = None
        self._identity: tuple[int, int] | None = None
        self._size = 0
        self._torn = False  # the file does not end in a newline
        self._left = False  # only the very same file is taken up again
        self._home = _device(path.parent.parent)

    def open(self) -> None:
        """Open the file for appending, make it where there is none. Raises ``OSError``."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        try:
            fd = os.open(self.path, flags, 0o666)
        except PermissionError:  # a file that may be written but not read
            fd = os.open(self.path, (flags & ~os.O_RDWR) | os.O_WRONLY, 0o666)
        self.close()
        found = os.fstat(fd)
        self._fd, self._identity = fd, (found.st_dev, found.st_ino)
        self._size = found.st_size
        self._torn, self._left = self._ends_torn(found), False

    def write(self, line: bytes) -> int:
        """Append one line. Raises ``OSError``, and has then written nothing that could join the next line."""
        self._look()
        assert self._fd is not None
        block = b"\n" + line if self._torn else line
        done = 0
        try:
            while done < len(block):
                done += os.write(self._fd, block[done:])
        except OSError:
            self._take_back(done)
            raise
        self._size += done
        self._torn = False
        return len(line)

    def flush(self) -> None:
        """Nothing is buffered in this process."""

    def sync(self) -> None:
        """Have the kernel bring the file to its disk. Raises ``OSError``."""
        if self._fd is not None:
            try:
                os.fsync(self._fd)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a device, a pipe
                    raise

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def leave(self) -> None:
        """Close the file for good, unless it is still the same when a later write comes."""
        self._left = True
        self.close()

    def _look(self) -> None:
        """Make sure that the open file is the one at the path, and know how it ends."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            if self._left:
                raise
            self._make_again()
            return
        if self._fd is None or (found.st_dev, found.st_ino) != self._identity:
            self._change_over(found)
        elif found.st_size != self._size and stat.S_ISREG(found.st_mode):
            if found.st_size < self._size:
                self._happened(
                    f"{self.path.name} was cut from {self._size} to {found.st_size} bytes by something else"
                )
            self._size, self._torn = found.st_size, self._ends_torn(found)

    def _make_again(self) -> None:
        """Make a file that has vanished, and its directory; not where a whole file system may have gone."""
        folder = self.path.parent
        known, what = self._identity is not None, "records.jsonl" if folder.is_dir() else "the run directory"
        if self._home is not None and _device(folder.parent) != self._home:
            raise FileNotFoundError(errno.ENOENT, f"{folder.parent} is gone or is another file system now")
        folder.mkdir(exist_ok=True)
        self._claim()
        self.open()
        if known:
            self._happened(f"{what} had vanished and was made again")

    def _change_over(self, found: os.stat_result) -> None:
        """Go on in another file at the same path, where it is empty or holds records."""
        known = self._identity is not None and (found.st_dev, found.st_ino) != self._identity
        if known and self._left:
            raise FileExistsError(errno.EEXIST, f"{self.path.name} belongs to a run that began there since")
        if known and not (stat.S_ISREG(found.st_mode) and _holds_records(self.path)):
            raise FileExistsError(errno.EEXIST, f"{self.path.name} is something else now and is left alone")
        self._claim()
        self.open()
        if known:
            self._happened(f"{self.path.name} was replaced by another file, which is continued")

    def _take_back(self, done: int) -> None:
        """Remove the half of a line that got into the file before an error."""
        if done == 0 or self._fd is None:
            return
        with contextlib.suppress(OSError):
            if os.fstat(self._fd).st_size == self._size + done:  # nobody has written after it
                os.ftruncate(self._fd, self._size)
                return
        self._size, self._torn = -1, True  # the next look sees how it ends

    def _ends_torn(self, found: os.stat_result) -> bool:
        """Whether the file ends within a line; taken for granted where it cannot be read."""
        if found.st_size == 0 or not stat.S_ISREG(found.st_mode) or self._fd is None:
            return False
        try:
            return os.pread(self._fd, 1, found.st_size - 1) != b"\n"
        except OSError:
            return True


def _device(folder: Path) -> int | None:
    try:
        return os.stat(folder).st_dev
    except OSError:
        return None


def _holds_records(path: Path) -> bool:
    """Whether a file is empty or begins with a record (of any kind and version), so that it may be appended to."""
    with path.open("rb") as stream:
        line = stream.readline(HEAD_BYTES)
    if not line:
        return True
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and isinstance(data.get("kind"), str) and isinstance(data.get("schema"), int)
