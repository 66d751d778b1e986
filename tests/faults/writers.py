"""Run by the tests beside it as a process of its own: journals that are killed while they are written.

``zygote DIR``: for every line ``NUMBER PAYLOAD RESUMED`` on stdin it forks a writer, which records into DIR/NUMBER as
fast as it can, with PAYLOAD bytes of extra text a record, and reports every step whose write() has returned on a pipe.
A negative PAYLOAD: lines of that size are made once, so that nearly all the time goes into write(2) itself.
``hold DIR [fork]``: opens the journal of DIR, says where its records go, and waits; with ``fork`` a child waits too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from driftscope import journal as journal_module
from driftscope.journal import encode, open_journal
from tests.record_factory import info, note, seed_step


def write_for_ever(directory: Path, payload: int, resumed_at: int, reports: int) -> None:
    said: list[str] = []
    journal = open_journal(directory, resumed_at=resumed_at, told=said.append).journal
    journal.write_info(info(run_id="killed", model={"text": "x" * payload}))
    step = resumed_at
    if payload < 0:
        quick = prepared(-payload)
        journal_module.JournalWriter._encoded = lambda _, record, __: quick(record)
    while True:
        step += 1
        for micro_step in range(2):
            journal.write(seed_step(step, micro_step=micro_step, head={"text": "x" * payload}))
            assert journal.failed is None, journal.failed
        os.write(reports, f"{step}\n".encode())
        if step % 3 == 0:
            journal.write_info(info(run_id="killed", model={"text": "x" * payload, "step": step}))


def prepared(size: int) -> Any:
    """The writer's encoder for step records of one size, which costs next to nothing."""
    line = json.dumps(encode(seed_step(987654321, micro_step=123456789, head={"text": "x" * size}))).encode() + b"\n"
    head, tail = line[:2000], line[2000:]  # step and micro_step stand at the beginning

    def quick(record: Any) -> bytes:
        begin = head.replace(b"987654321", b"%d" % record.step).replace(b"123456789", b"%d" % record.micro_step)
        return begin + tail

    return quick


def zygote(directory: Path) -> None:
    for line in sys.stdin:
        number, payload, resumed_at = map(int, line.split())
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            write_for_ever(directory / str(number), payload, resumed_at, write)
        os.close(write)
        print(pid, flush=True)
        reports = b""
        while part := os.read(read, 1 << 16):
            reports += part
        os.close(read)
        _, status = os.waitpid(pid, 0)
        steps = reports.decode().split()
        print(steps[-1] if steps else 0, os.waitstatus_to_exitcode(status), flush=True)


def hold(directory: Path, fork: bool) -> None:
    said: list[str] = []
    journal = open_journal(directory, told=said.append).journal
    journal.write(seed_step(1))
    ready, tell = os.pipe()
    child = os.fork() if fork else -1
    if child == 0:
        journal.write(note("from the child"))
        journal.close()
        os.write(tell, b"!")
        time.sleep(60)
        os._exit(0)
    if fork:
        os.read(ready, 1)  # a parent that is killed before the child has run would leave the lock to it
    print(journal.run_dir, child, flush=True)
    print(" ".join(said), flush=True)
    sys.stdin.read()
    journal.close()


if __name__ == "__main__":
    where = Path(sys.argv[2])
    if sys.argv[1] == "zygote":
        zygote(where)
    else:
        hold(where, sys.argv[3:] == ["fork"])
