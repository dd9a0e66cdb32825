"""Processes by identity: a pid goes in, its identity, its relatives and what it maps come out.

A pid alone names nobody: pids are used again. Here a process is its pid **and** its start time, in
clock ticks since boot (field 22 of /proc/PID/stat, proc(5)). A zombie counts as dead.

Invariant: no process that is stuck in the kernel holds up the end of the others. What /proc reads from
another process's memory (cmdline, environ, maps) waits for that process's memory lock, so it is asked for in
threads and without it where it does not come; stat and the links in fd never wait.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from airflow_provider_vllm.environment import START_MARK

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)

# How long a resource tracker may take to clean up after the processes that it worked for.
TRACKERS_S = 1.0
# How long one process may take to give what takes a fraction of a millisecond, and all of them together.
ANSWER_S = 0.5
ANSWERS_S = 2.0

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessId:
    """One process: pid and start time in clock ticks since boot."""

    pid: int
    start: int

    def to_json(self) -> list[int]:
        return [self.pid, self.start]

    @classmethod
    def from_json(cls, value: object) -> ProcessId | None:
        if (
            isinstance(value, (list, tuple))
            and len(value) == 2
            and all(isinstance(v, int) for v in value)
        ):
            return cls(value[0], value[1])
        return None

    @property
    def alive(self) -> bool:
        stat = read_stat(self.pid)
        return stat is not None and stat.start == self.start and stat.state not in "ZX"

    def signal(self, number: int) -> bool:
        """Send a signal if it is still the same process; whether it was sent."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        except OSError:  # Linux before 5.3, or a sandbox without it
            return self.alive and _sent(os.kill, self.pid, number)
        try:
            # What the descriptor names can't change between this look and the signal.
            return self.alive and _sent(signal.pidfd_send_signal, fd, number)
        finally:
            os.close(fd)


def _sent(send: Callable[[int, int], None], target: int, number: int) -> bool:
    try:
        send(target, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


@dataclass(frozen=True)
class Stat:
    """What /proc/PID/stat says that we use."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    start: int

    @property
    def identity(self) -> ProcessId:
        return ProcessId(self.pid, self.start)


def read_stat(pid: int) -> Stat | None:
    """The Stat of a process, or None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name stands in parentheses and may itself hold spaces and parentheses.
    head, _, tail = text.rpartition(")")
    rest = tail.split()
    if len(rest) < 20:
        return None  # it ended while we read
    return Stat(
        pid=pid,
        name=head.partition("(")[2],
        state=rest[0],
        parent=int(rest[1]),
        group=int(rest[2]),
        session=int(rest[3]),
        start=int(rest[19]),
    )


def identity_of(pid: int) -> ProcessId | None:
    stat = read_stat(pid)
    return stat.identity if stat else None


def this_process() -> ProcessId:
    found = identity_of(os.getpid())
    assert found is not None
    return found


def every_process() -> list[Stat]:
    """A Stat for each live process that /proc shows; zombies are left out."""
    found = (read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [stat for stat in found if stat and stat.state not in "ZX"]


def descendants(root: int, table: Iterable[Stat] | None = None) -> list[Stat]:
    """The live processes below `root`, nearest first."""
    children: dict[int, list[Stat]] = {}
    for stat in every_process() if table is None else table:
        children.setdefault(stat.parent, []).append(stat)
    found: list[Stat] = []
    todo = [root]
    while todo:
        # Taken out: the table was read while pids were used again, and may hold a circle.
        for child in children.pop(todo.pop(0), []):
            found.append(child)
            todo.append(child.pid)
    return found


def adopt_orphans() -> None:
    """Make this process the parent of every orphan among its descendants (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def ask_each(
    pids: Iterable[int],
    question: Callable[[int], T],
    *,
    patience: float = ANSWER_S,
    timeout: float = ANSWERS_S,
) -> dict[int, T]:
    """The answers by pid, without those of the processes that take longer than `patience` seconds each, or come
    later than `timeout` seconds. `question` must not raise."""
    deadline = time.monotonic() + timeout
    todo = iter(list(pids))
    answers: dict[int, T] = {}

    def ask() -> None:
        for pid in todo:
            answers[pid] = question(pid)

    while True:
        # It leaves the rest to the next one where it is stuck.
        thread = threading.Thread(target=ask, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads for this user or container
            return dict(answers)
        had = -1
        while thread.is_alive() and had < len(answers):
            had = len(answers)
            thread.join(max(0.0, min(patience, deadline - time.monotonic())))
        if not thread.is_alive() or time.monotonic() >= deadline:
            return dict(answers)


def read_memory_file(pid: int, name: str) -> bytes:
    """/proc/PID/NAME, b"" where there is none. It may wait for ever: see `ask_each`."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def marked(pids: Iterable[int], nonce: str) -> set[int]:
    """Those processes that were started with the mark of this start of a server in their environment."""
    mark = f"{START_MARK}={nonce}".encode()
    found = ask_each(pids, lambda pid: mark in read_memory_file(pid, "environ").split(b"\0"))
    return {pid for pid, has_it in found.items() if has_it}


def writes_to(pid: int, path: Path) -> bool:
    """Whether stdout or stderr of a process is the file `path`, also when it was moved or removed."""
    for number in (1, 2):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue
        if target.removesuffix(" (deleted)") == str(path):
            return True
    return False


def tree_of(
    recorded: Iterable[ProcessId],
    session: int | None,
    log_paths: Iterable[Path],
    nonce: str | None = None,
) -> list[Stat]:
    """The live processes of one server.

    A process belongs to it when it was recorded by pid and start time, when it writes to the
    server's own log, when it carries the mark of this start in its environment (one that has closed
    its streams and made a session of its own does; vLLM's renamed processes do not), or when it is below
    such a process. The session is used only together with one of these: a session's number is used again
    after its last member is gone.
    """
    table = every_process()
    known = set(recorded)
    logs = [Path(os.path.realpath(path)) for path in log_paths]
    with_mark = marked((stat.pid for stat in table), nonce) if nonce is not None else set()
    mine = {
        stat.pid: stat
        for stat in table
        if stat.identity in known
        or any(writes_to(stat.pid, log) for log in logs)
        or stat.pid in with_mark
    }
    if session is not None and any(stat.session == session for stat in mine.values()):
        mine.update({stat.pid: stat for stat in table if stat.session == session})
    for pid in list(mine):
        mine.update({stat.pid: stat for stat in descendants(pid, table)})
    mine.pop(os.getpid(), None)
    return list(mine.values())


def kill(processes: Iterable[ProcessId], *, timeout: float) -> list[ProcessId]:
    """SIGKILL each and wait until they are gone; returns those still alive after `timeout` seconds.

    Python's resource trackers come last: each removes the shared memory and semaphores of those it
    worked for, and ends by itself, as soon as they are gone.
    """
    deadline = time.monotonic() + timeout
    left = list(processes)
    is_tracker = ask_each((process.pid for process in left), _is_tracker)
    trackers = [process for process in left if is_tracker.get(process.pid)]
    others = [process for process in left if process not in trackers]
    for process in others:
        process.signal(signal.SIGKILL)
    others = _wait_for_end(others, deadline)
    trackers = _wait_for_end(trackers, min(deadline, time.monotonic() + TRACKERS_S))
    for process in trackers:
        process.signal(signal.SIGKILL)
    return others + _wait_for_end(trackers, deadline)


def _wait_for_end(processes: list[ProcessId], deadline: float) -> list[ProcessId]:
    left = [process for process in processes if process.alive]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [process for process in left if process.alive]
    return left


def _is_tracker(pid: int) -> bool:
    return b"multiprocessing.resource_tracker" in read_memory_file(pid, "cmdline")
