"""The supervisor's heartbeat: a pipe goes in, one byte a second comes out for as long as the event loop runs.

It beats from a thread: a disk that holds a write up for some seconds is not a frozen supervisor. An event
loop that has not run for STUCK_S is.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

BEAT_S = 1.0
STUCK_S = 60.0


class Heartbeat:
    """Beats on `fd`, which it owns from now on, until `close()`. `tick()` says that the loop runs."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._ticked = time.monotonic()
        self._lock = threading.Lock()  # or a beat could go to a descriptor that has its number anew
        self._closed = threading.Event()
        os.set_blocking(fd, False)
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def tick(self) -> None:
        self._ticked = time.monotonic()

    def say(self, byte: bytes) -> None:
        """Write to the pipe; a pipe that is full, closed or broken is no error here."""
        with self._lock, suppress(OSError):
            if not self._closed.is_set():
                os.write(self._fd, byte)

    def close(self) -> None:
        with self._lock:
            if not self._closed.is_set():
                self._closed.set()
                os.close(self._fd)

    def _run(self) -> None:
        while not self._closed.is_set():
            if time.monotonic() - self._ticked < STUCK_S:
                self.say(b"b")
            self._closed.wait(BEAT_S)
