"""Folders and files that only their owner can read: created so, or refused.

What enters is a path; what leaves is a folder of mode 0700 or an open descriptor of mode 0600, both
owned by the user that runs this.

- A symlink is never followed, neither for the folder itself nor for a file in it.
- Something that others could have prepared or could read is refused, not repaired.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from airflow_provider_vllm.exceptions import InsecurePath


def private_dir(path: Path) -> Path:
    """`path` as a folder of mode 0700, made with its parents where missing.

    Raises InsecurePath where it is a symlink, no folder, another user's, or open to others.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    except OSError as error:
        raise InsecurePath(
            f"{path} cannot be made: {error.strerror or error}. Nothing was written. Set "
            "`[vllm] state_root` to a folder that this worker's user can write."
        ) from error
    check_private_dir(path)
    return path


def check_private_dir(path: Path) -> None:
    """Raises InsecurePath as `private_dir` does; FileNotFoundError where there is nothing."""
    found = os.lstat(path)
    _refuse_unless_private(path, found, stat.S_ISDIR(found.st_mode), "a folder of mode 0700")


def open_private(path: Path, flags: int) -> int:
    """A descriptor of the file `path`, opened with `flags`; mode 0600 where O_CREAT makes it.

    Raises InsecurePath where it is a symlink, no plain file, another user's, or open to others;
    FileNotFoundError without O_CREAT. Children do not inherit the descriptor.
    """
    try:
        # O_NONBLOCK: a FIFO under this name must not make the open wait for ever.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InsecurePath(
            f"{path} cannot be opened as a file of our own: {error.strerror}. Nothing was written. "
            "Remove it, or set `[vllm] state_root` to another folder."
        ) from error
    try:
        found = os.fstat(fd)
        _refuse_unless_private(path, found, stat.S_ISREG(found.st_mode), "a file of mode 0600")
    except InsecurePath:
        os.close(fd)
        raise
    return fd


def _refuse_unless_private(path: Path, found: os.stat_result, right_kind: bool, kind: str) -> None:
    if not right_kind:
        fault = "is a symlink" if stat.S_ISLNK(found.st_mode) else "is something else"
    elif found.st_uid != os.geteuid():
        fault = f"belongs to user {found.st_uid}"
    elif found.st_mode & 0o077:
        fault = f"can be used by others (mode {stat.S_IMODE(found.st_mode):04o})"
    else:
        return
    raise InsecurePath(
        f"{path} {fault}; it has to be {kind} that belongs to user {os.geteuid()}, who runs this. "
        "Nothing was written. Put it right or remove it, or set `[vllm] state_root` to another "
        "folder."
    )
