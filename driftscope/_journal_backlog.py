"""Lines that could not be written yet, within a bound of memory, and the count of those that had to be dropped."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_BYTES = 4 * 2**20


@dataclass
class Lost:
    """Records that no file holds."""

    count: int = 0
    first: int = 0
    last: int = 0

    def add(self, step: int) -> None:
        """One more, of that step."""
        self.first, self.last = (min(self.first, step), max(self.last, step)) if self.count else (step, step)
        self.count += 1

    def words(self) -> str:
        """``3 records of steps 4 to 6``; empty where there are none."""
        if self.count == 0:
            return ""
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return f"{self.count} record{'' if self.count == 1 else 's'} of {steps}"


class Backlog:
    """A queue of lines in the order in which they belong in the file; over ``max_bytes`` the oldest go."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.lost = Lost()
        self._lines: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, step: int, line: bytes) -> None:
        """Put a line at the end. The last line is always kept, however long."""
        self._lines.append((step, line))
        self._bytes += len(line)
        while self._bytes > self.max_bytes and len(self._lines) > 1:
            self._drop()

    def first(self) -> bytes:
        """The line to be written next."""
        return self._lines[0][1]

    def done(self) -> int:
        """The first line has been written; returns its step."""
        step, line = self._lines.popleft()
        self._bytes -= len(line)
        return step

    def waiting(self) -> Lost:
        """What waits, as what would be lost if it were given up now."""
        waiting = Lost()
        for step, _ in self._lines:
            waiting.add(step)
        return waiting

    def _drop(self) -> None:
        step, line = self._lines.popleft()
        self._bytes -= len(line)
        self.lost.add(step)
