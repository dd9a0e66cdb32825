"""vLLM under its guard: a command goes in, its identity, its end and the guard's end come out.

Used by the supervisor only. Nothing here decides; it starts, listens, beats and kills.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from airflow_provider_vllm.server.heartbeat import BEAT_S, Heartbeat
from airflow_provider_vllm.server.processes import ProcessId, identity_of

GUARD = Path(__file__).with_name("guard.py")
# Without a beat for this long the guard ends the tree; with a round, a look and the trackers' second it has
# to fit into 10 s.
SILENCE_S = 7.5
# Beats without an echo after which the guard counts as frozen: it is woken, and given up in the end.
BEATS_UNTIL_WOKEN = 5
BEATS_UNTIL_KILLED = 20

log = logging.getLogger(__name__)


class GuardedProcess:
    """One vLLM tree. `exited` and `guard_gone` are set when it is so."""

    def __init__(self) -> None:
        self.exited = asyncio.Event()
        self.guard_gone = asyncio.Event()
        self.exit_status: int | None = None
        self.engine: ProcessId | None = None
        self.guard: ProcessId | None = None
        self._started = asyncio.Event()
        self._killed: asyncio.Future[int] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._heartbeat: Heartbeat | None = None
        # Counted in beats of our own, not in seconds: when the machine or the event loop stood still,
        # the guard is not to blame.
        self._unanswered = 0

    async def start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        log_path: Path,
        lock_fds: Sequence[int],
    ) -> None:
        """Start the guard and wait until it has started the command. Raises OSError."""
        control_read, control_write = os.pipe()
        status_read, status_write = os.pipe()
        self._heartbeat = Heartbeat(control_write)
        own = (control_read, status_write)
        try:
            self._process = self._start_guard(command, environ, log_path, own, lock_fds)
        except BaseException:
            self._heartbeat.close()
            os.close(status_read)
            raise
        finally:
            for fd in own:
                os.close(fd)
        self.guard = identity_of(self._process.pid)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(status_read, "rb", 0)
        )
        self._tasks = [loop.create_task(self._listen(reader)), loop.create_task(self._watch())]
        # A guard that is frozen before it says this is woken or killed by `_watch`.
        await self._first_of(self._started, self.guard_gone)
        if not self._started.is_set():
            raise OSError(f"the guard ended before it started {command[0]}; see {log_path}")

    def _start_guard(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        log_path: Path,
        own: tuple[int, int],
        lock_fds: Sequence[int],
    ) -> subprocess.Popen[bytes]:
        log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        numbers = [str(number) for number in (*own, log_fd, SILENCE_S)]
        try:
            # A session of its own, so that no signal to the supervisor's group reaches it.
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), *numbers, *command],
                env=dict(environ),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log_fd,
                pass_fds=(*own, log_fd, *lock_fds),
                start_new_session=True,
            )
        finally:
            os.close(log_fd)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            self._unanswered = 0
            word, _, value = line.decode().strip().partition(" ")
            if word == "started":
                self.engine = identity_of(int(value))
                self._started.set()
            elif word == "exit":
                self.exit_status = int(value)
                self.exited.set()
            elif word == "killed" and self._killed and not self._killed.done():
                self._killed.set_result(int(value))
        await asyncio.to_thread(self._process.wait)
        self.guard_gone.set()

    async def _watch(self) -> None:
        """Tell the heartbeat that the loop runs; wake a frozen guard, and end one that stays so."""
        assert self._heartbeat
        while not self.guard_gone.is_set():
            self._heartbeat.tick()
            self._unanswered += 1
            if self._unanswered > BEATS_UNTIL_KILLED:
                log.error("the guard (pid %s) stays frozen: it is ended", self._process.pid)
                self._process.kill()
                return
            if self._unanswered > BEATS_UNTIL_WOKEN:
                self._process.send_signal(signal.SIGCONT)
            await asyncio.sleep(BEAT_S)

    @staticmethod
    async def _first_of(
        *waited: asyncio.Event | asyncio.Future[Any], timeout: float | None = None
    ) -> None:
        futures: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(each.wait()) if isinstance(each, asyncio.Event) else each
            for each in waited
        ]
        await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for future in futures:
            future.cancel()

    def terminate(self) -> None:
        """Ask vLLM to end by itself (SIGTERM to its first process only, which ends the others)."""
        if self.engine:
            self.engine.signal(signal.SIGTERM)

    async def kill_tree(self, timeout: float = 6.0) -> int | None:
        """SIGKILL all of the tree through the guard; how many are left, None when the guard can't say."""
        if self.guard is None or self.guard_gone.is_set() or not self._heartbeat:
            return None
        self._killed = killed = asyncio.get_running_loop().create_future()
        self._process.send_signal(signal.SIGCONT)
        self._heartbeat.say(b"k")
        await self._first_of(killed, self.guard_gone, timeout=timeout)
        return None if killed.cancelled() else killed.result()

    async def close(self) -> None:
        """Let the guard go: closing its pipe makes it end whatever is left, then itself."""
        for task in self._tasks[1:]:
            task.cancel()
        if self._heartbeat:
            self._heartbeat.close()
        if self.guard is None:
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.guard_gone.wait(), 7)
        if not self.guard_gone.is_set():
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        for task in self._tasks:
            task.cancel()
