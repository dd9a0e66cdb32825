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

from airflow_provider_vllm.server.processes import ProcessId, identity_of

GUARD = Path(__file__).with_name("guard.py")
BEAT_S = 1.0
# Without a beat for this long the guard ends the tree; the whole has to fit into 10 s.
SILENCE_S = 8.0
# Without an echo for this long the guard is frozen: it is woken, and given up after the second time.
ECHO_S = 5.0
GUARD_FROZEN_S = 20.0

log = logging.getLogger(__name__)


class GuardedProcess:
    """One vLLM tree. `exited` and `guard_gone` are set when it is so."""

    def __init__(self) -> None:
        self.exited = asyncio.Event()
        self.guard_gone = asyncio.Event()
        self.exit_status: int | None = None
        self.engine: ProcessId | None = None
        self.guard: ProcessId | None = None
        self._killed: asyncio.Future[int] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._control = -1
        self._heard = 0.0

    async def start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        log_path: Path,
        lock_fds: Sequence[int],
    ) -> None:
        """Start the guard and wait until it has started the command. Raises OSError."""
        control_read, self._control = os.pipe()
        status_read, status_write = os.pipe()
        log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        words = [
            sys.executable,
            "-I",
            "-S",
            str(GUARD),
            str(control_read),
            str(status_write),
            str(log_fd),
        ]
        try:
            # A session of its own, so that no signal to the supervisor's group reaches it.
            self._process = subprocess.Popen(
                [*words, str(SILENCE_S), *command],
                env=dict(environ),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log_fd,
                pass_fds=(control_read, status_write, log_fd, *lock_fds),
                start_new_session=True,
            )
        finally:
            for fd in (control_read, status_write, log_fd):
                os.close(fd)
        self.guard = identity_of(self._process.pid)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(status_read, "rb", 0)
        )
        self._heard = loop.time()
        first = (await reader.readline()).decode().split()
        if not first or first[0] != "started":
            raise OSError(f"the guard ended before it started {command[0]}; see {log_path}")
        self.engine = identity_of(int(first[1]))
        self._tasks = [loop.create_task(self._listen(reader)), loop.create_task(self._beat())]

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        loop = asyncio.get_running_loop()
        while line := await reader.readline():
            self._heard = loop.time()
            word, _, value = line.decode().strip().partition(" ")
            if word == "exit":
                self.exit_status = int(value)
                self.exited.set()
            elif word == "killed" and self._killed and not self._killed.done():
                self._killed.set_result(int(value))
        await asyncio.to_thread(self._process.wait)
        self.guard_gone.set()

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.guard_gone.is_set():
            self._say(b"b")
            silent = loop.time() - self._heard
            if silent > GUARD_FROZEN_S:
                log.error(
                    "the guard (pid %s) has been silent for %.0f s: it is ended", self.guard, silent
                )
                self._process.kill()
                return
            if silent > ECHO_S:
                self._process.send_signal(signal.SIGCONT)
            await asyncio.sleep(BEAT_S)

    def _say(self, byte: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(self._control, byte)

    def terminate(self) -> None:
        """Ask vLLM to end by itself (SIGTERM to its first process only, which ends the others)."""
        if self.engine:
            self.engine.signal(signal.SIGTERM)

    async def kill_tree(self, timeout: float = 6.0) -> int | None:
        """SIGKILL all of the tree through the guard; how many are left, None when the guard can't say."""
        if self.guard_gone.is_set():
            return None
        self._killed = asyncio.get_running_loop().create_future()
        self._say(b"k")
        gone: asyncio.Future[bool] = asyncio.ensure_future(self.guard_gone.wait())
        waiting: list[asyncio.Future[Any]] = [self._killed, gone]
        await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        return self._killed.result() if self._killed.done() else None

    async def close(self) -> None:
        """Let the guard go: closing its pipe makes it end whatever is left, then itself."""
        for task in self._tasks[1:]:
            task.cancel()
        if self._control >= 0:
            os.close(self._control)
            self._control = -1
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.guard_gone.wait(), 7)
        if not self.guard_gone.is_set() and self._tasks:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        for task in self._tasks:
            task.cancel()
