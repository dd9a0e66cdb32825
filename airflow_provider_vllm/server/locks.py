"""Locks between processes: a path goes in, an exclusive `flock` on a private file comes out.

The kernel frees a lock when its holder dies, however it dies, and every container on the same kernel sees
it. Invariant: whoever holds a lock holds it on the file that the path names now, also when somebody removed the
file while he waited.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from airflow_provider_vllm.exceptions import ServerError
from airflow_provider_vllm.server.private import open_private, private_dir

POLL_S = 0.05
SAY_AFTER_S = 10.0

log = logging.getLogger(__name__)


@contextmanager
def file_lock(path: Path, *, timeout: float | None = None) -> Iterator[None]:
    """Waits for the holder. Raises ServerError after `timeout` seconds, naming the holder."""
    fd = _wait(path, timeout)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(fd)


def try_lock(path: Path) -> int | None:
    """A descriptor that is the lock, or None where another process holds it. Not inherited by children."""
    fd = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_named(fd, path):
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def is_held(path: Path) -> bool:
    """Whether some process holds this lock now."""
    try:
        fd = open_private(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _wait(path: Path, timeout: float | None) -> int:
    began = time.monotonic()
    said = False
    while (fd := _try_with_folder(path)) is None:
        waited = time.monotonic() - began
        if timeout is not None and waited > timeout:
            raise ServerError(
                f"{path} has been held by {_holder(path)} for more than {timeout:g} s. See what that "
                "process does (it may be frozen), or end it, and try again."
            )
        if waited > SAY_AFTER_S and not said:
            said = True
            log.warning("waiting for %s, held by %s", path, _holder(path))
        time.sleep(POLL_S)
    return fd


def _try_with_folder(path: Path) -> int | None:
    try:
        return try_lock(path)
    except FileNotFoundError:
        private_dir(path.parent)  # a sweep has just removed the empty folder
        return None


def _holder(path: Path) -> str:
    with suppress(OSError):
        return f"pid {path.read_text()[:20] or 'unknown'}"
    return "another process"


def _is_named(fd: int, path: Path) -> bool:
    mine = os.fstat(fd)
    try:
        named = os.lstat(path)
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)
