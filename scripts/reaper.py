"""A small process that starts others and leaves none of them behind.

Enters, on stdin, one JSON object a line: `{"argv": [...], "env": {...}, "log": PATH, "user": UID or
null, "end_signal": N}` starts a command in its own session with both streams appended to PATH;
`{"end": SECONDS}`, or the end of stdin, ends everything. Leaves, on stdout, one JSON line for each:
`{"pid": N}` or `{"error": TEXT}` for a start; at the end `{"left": [...]}`, the command lines of
what the started commands had left outside of their own trees when they had ended, or had been given
SECONDS to.

Invariants: it is the sub-reaper of all it starts, so whatever their children do (new sessions,
double forks), no process of the tree outlives it. Its stdin is a pipe whose other end only the
starter holds: when that one is killed, the pipe closes and everything ends.

Run as `python -I reaper.py`, it needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
POLITE_S = 30.0  # for what is left after the started commands have ended
DEFAULT_END_S = 10.0  # when stdin closes without a word


class Reaper:
    """Starts commands, collects every child that dies, and ends them all."""

    def __init__(self) -> None:
        # pid -> log and end signal, of the commands that were asked for and live
        self._started: dict[int, tuple[Path, int]] = {}

    def start(
        self, argv: list[str], env: dict[str, str], log: str, user: int | None, end_signal: int
    ) -> dict[str, Any]:
        """Start one command; the answer to print."""
        try:
            with Path(log).open("ab") as out:
                process = subprocess.Popen(
                    argv,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    user=user,
                    cwd="/" if user is not None else None,  # it may not be let in here
                    start_new_session=True,
                )
        except OSError as error:
            return {"error": f"{argv[0]} did not start: {error}"}
        process.returncode = 0  # collected by `reap`, not by Popen
        self._started[process.pid] = (Path(log), end_signal)
        return {"pid": process.pid}

    def reap(self) -> None:
        """Collect the dead; note in a command's own log how it ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._started:
                log, _ = self._started.pop(pid)
                with contextlib.suppress(OSError), log.open("a") as out:
                    out.write(f"\n[pid {pid} ended: {_how(status)}]\n")

    def end(self, grace: float) -> dict[str, Any]:
        """Ask the started to end, wait `grace` seconds, then end what is left; the answer to print."""
        for pid, (_, number) in self._started.items():
            _signal([pid], number)
        self._wait(grace, lambda: not self._started)
        left = strays(os.getpid(), self._started)
        said = [command_line(pid) for pid in left]
        # The started had their time. What lives outside of them may be a server: its supervisor is asked, which knows
        # in which order the others end; those that hold shared memory remove it last.
        _signal([pid for pid in descendants(os.getpid()) if pid not in left], signal.SIGKILL)
        asked: set[int] = set()

        def over() -> bool:
            of = children()
            # Those of a supervisor that has died come to us.
            tops = [pid for pid in of.get(os.getpid(), []) if pid in left and pid not in asked]
            _signal(tops, signal.SIGTERM)
            asked.update(tops)
            return not of.get(os.getpid())

        self._wait(POLITE_S if left else 0.0, over)
        while alive := descendants(os.getpid()):
            _signal(alive, signal.SIGKILL)
            self._wait(0.2, lambda: not descendants(os.getpid()))
        self.reap()
        return {"left": said}

    def _wait(self, seconds: float, over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        self.reap()
        while not over() and time.monotonic() < deadline:
            time.sleep(0.05)
            self.reap()


def children() -> dict[int, list[int]]:
    """The pids that each process has started, the dead not yet collected left out."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # After the command's name, which may itself hold spaces and brackets.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found.setdefault(int(parent), []).append(int(entry.name))
    return found


def descendants(root: int) -> list[int]:
    """Pids of all that descend from `root`."""
    of, found, todo = children(), [], [root]
    while todo:
        below = of.get(todo.pop(), [])
        found += below
        todo += below
    return found


def strays(root: int, started: Iterable[int]) -> list[int]:
    """Pids below `root` that are neither in `started` nor descend from one of them."""
    inside = set(started)
    for pid in started:
        inside.update(descendants(pid))
    return [pid for pid in descendants(root) if pid not in inside]


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def command_line(pid: int) -> str:
    """The pid and the words of its command, the pid alone where the process has gone."""
    with contextlib.suppress(OSError):
        words = (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")
        return f"{pid} {b' '.join(words).decode(errors='replace').strip()}"
    return str(pid)


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"status {os.WEXITSTATUS(status)}"


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Ctrl-C goes to the starter, who then says how to end; TERM would leave the tree behind.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reaper = Reaper()
    pending = b""
    grace = DEFAULT_END_S
    stdin = sys.stdin.fileno()
    ending = False
    while not ending:
        if select.select([stdin], [], [], 0.2)[0]:
            chunk = os.read(stdin, 65536)
            ending = not chunk
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if "end" in request:
                    grace, ending = float(request["end"]), True
                    break
                print(json.dumps(reaper.start(**request)), flush=True)
        reaper.reap()
    answer = reaper.end(grace)
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
