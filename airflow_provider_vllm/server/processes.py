"""Processes by identity: a pid goes in, its identity, its relatives and what it maps come out.

A pid alone names nobody: pids are used again. Here a process is its pid **and** its start time, in
clock ticks since boot (field 22 of /proc/PID/stat, proc(5)). A zombie counts as dead.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


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
        if not self.alive:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
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
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name stands in parentheses and may itself hold spaces and parentheses.
    head, _, tail = text.rpartition(")")
    rest = tail.split()
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
        for child in children.get(todo.pop(0), []):
            found.append(child)
            todo.append(child.pid)
    return found


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
    recorded: Iterable[ProcessId], session: int | None, log_paths: Iterable[Path]
) -> list[Stat]:
    """The live processes of one server.

    A process belongs to it when it was recorded by pid and start time, when it writes to the
    server's own log, or when it is below such a process. The session is used only together with
    one of the two: a session's number is used again after its last member is gone.
    """
    table = every_process()
    known = set(recorded)
    logs = [Path(os.path.realpath(path)) for path in log_paths]
    mine = {
        stat.pid: stat
        for stat in table
        if stat.identity in known or any(writes_to(stat.pid, log) for log in logs)
    }
    if session is not None and any(stat.session == session for stat in mine.values()):
        mine.update({stat.pid: stat for stat in table if stat.session == session})
    for pid in list(mine):
        mine.update({stat.pid: stat for stat in descendants(pid, table)})
    mine.pop(os.getpid(), None)
    return list(mine.values())


def kill(processes: Iterable[ProcessId], *, timeout: float) -> list[ProcessId]:
    """SIGKILL each and wait until they are gone; returns those still alive after `timeout` seconds."""
    left = [process for process in processes if process.signal(signal.SIGKILL)]
    deadline = time.monotonic() + timeout
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [process for process in left if process.alive]
    return left
