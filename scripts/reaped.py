"""Processes that cannot outlive this one: the starter's side of reaper.py.

Enters: commands. Leaves: their pids, and at the end what they had left behind.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.reaper import command_line, strays


class StartRefused(Exception):
    """A command could not be started; the message says why."""


class Reaped:
    """Commands started under one reaper. Safe to end before the first start, and twice."""

    def __init__(self) -> None:
        self._reaper: subprocess.Popen[str] | None = None

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        user: int | None = None,
        end_signal: signal.Signals = signal.SIGTERM,
    ) -> int:
        """Start a command in its own session, both streams appended to `log`; its pid.

        `user` is a uid to run as, `end_signal` what asks it to end. Raises StartRefused.
        """
        answer = self._ask(
            {
                "argv": list(argv),
                "env": dict(env),
                "log": str(log),
                "user": user,
                "end_signal": int(end_signal),
            }
        )
        if "error" in answer:
            raise StartRefused(answer["error"])
        return answer["pid"]

    def strays(self, started: Sequence[int]) -> list[str]:
        """Command lines of what lives under the reaper, but not below one of the pids `started`."""
        if self._reaper is None:
            return []
        return [command_line(pid) for pid in strays(self._reaper.pid, started)]

    def end(self, grace: float) -> list[str]:
        """End all, by force what takes longer than `grace` seconds. The command lines of what the
        commands had left behind outside of their own process trees."""
        reaper, self._reaper = self._reaper, None
        if reaper is None:
            return []
        answer, _ = reaper.communicate(json.dumps({"end": grace}) + "\n")
        return json.loads(answer.splitlines()[-1])["left"] if answer else []

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._reaper is None:
            self._reaper = subprocess.Popen(
                [sys.executable, "-I", str(Path(__file__).with_name("reaper.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self._reaper.stdin is not None
        assert self._reaper.stdout is not None
        self._reaper.stdin.write(json.dumps(request) + "\n")
        self._reaper.stdin.flush()
        return json.loads(self._reaper.stdout.readline())
