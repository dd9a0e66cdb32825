"""What a test left behind: processes, shared memory segments and temporary files of vLLM.

Enters: nothing. Leaves: lists of text, empty where the test ended clean. pytest is made the
sub-reaper of all it starts, so a server that a test forgot is found, however well it detached
itself; children of other sessions on the same machine are never looked at.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from scripts.reaper import PR_SET_CHILD_SUBREAPER

SHM = Path("/dev/shm")
TEMP = Path(tempfile.gettempdir())
TEMP_NAMES = "vllm-*"  # a server's folder, a journal's copy
SEGMENT_NAMES = ("psm_*", "sem.mp-*", "vllm_dist_*")
# Python's own helpers, which live as long as the process that first needed them.
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
SETTLE_S = 10.0  # time that a process which is ending may take


@dataclass(frozen=True)
class Process:
    """One live process as /proc shows it."""

    pid: int
    parent: int
    session: int
    command: str


def adopt_orphans() -> None:
    """Make this process the parent of every orphan among its descendants."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def live_processes() -> list[Process]:
    """All processes that are not zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent, _, session = (
                    (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                )
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").strip()
                if state != "Z":
                    command = words.decode(errors="replace")
                    found.append(Process(int(entry.name), int(parent), int(session), command))
    return found


def below(root: int, processes: list[Process], *, skip: frozenset[int]) -> list[Process]:
    """Descendants of `root`; what is in `skip`, and what descends from it, is left out."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    todo = [root]
    while todo:
        for process in children.get(todo.pop(), []):
            if process.pid not in skip:
                found.append(process)
                todo.append(process.pid)
    return found


class Snapshot:
    """What was there before a test; `leftovers` is what is there more after it."""

    def __init__(self) -> None:
        self._before = below(os.getpid(), live_processes(), skip=frozenset())
        self._segments = segments()
        self._temporary = temporary()

    def leftovers(self, settle: float = SETTLE_S) -> list[str]:
        """What the test left, after it had `settle` seconds to go."""
        deadline = time.monotonic() + settle
        while (
            found := self._processes() or self._shm() or self._files()
        ) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def end_processes(self) -> None:
        """KILL what is left, so that it does not disturb the next test."""
        for process in self._new():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def _new(self) -> list[Process]:
        pids = frozenset(process.pid for process in self._before)
        sessions = {process.session for process in self._before} - {os.getsid(0)}
        return [
            process
            for process in below(os.getpid(), live_processes(), skip=pids)
            if process.session not in sessions
            and not any(helper in process.command for helper in HELPERS)
        ]

    def _processes(self) -> list[str]:
        return [
            f"process {process.pid} (session {process.session}): {process.command}"
            for process in self._new()
        ]

    def _shm(self) -> list[str]:
        new = segments() - self._segments
        return [f"segment {SHM / name}" for name in sorted(new - in_use(new))] if new else []

    def _files(self) -> list[str]:
        new = temporary() - self._temporary
        return [f"temporary {TEMP / name}" for name in sorted(new - named(new))] if new else []


def temporary() -> set[str]:
    """Names in the temporary folder of the kinds that this package makes."""
    return {path.name for path in TEMP.glob(TEMP_NAMES)}


def named(names: set[str]) -> set[str]:
    """Those of `names` that stand in the environment of some live process: another server's."""
    found = set()
    for process in live_processes():
        with contextlib.suppress(OSError):
            environ = Path(f"/proc/{process.pid}/environ").read_text(errors="replace")
            found |= {name for name in names if name in environ}
    return found


def segments() -> set[str]:
    """Names in /dev/shm of the kinds that vLLM makes."""
    return {path.name for pattern in SEGMENT_NAMES for path in SHM.glob(pattern)}


def in_use(names: set[str]) -> set[str]:
    """Those of `names` that some live process has mapped or open: not left, or not by us."""
    used = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            held = (entry / "maps").read_text()
            for link in (entry / "fd").iterdir():
                with contextlib.suppress(OSError):
                    held += f"{link.readlink()}\n"
            used |= {name for name in names if f"{SHM}/{name}" in held}
    return used
