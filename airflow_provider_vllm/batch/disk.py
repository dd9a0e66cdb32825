"""A failed write in, what it means and what to do out."""

from __future__ import annotations

import errno
import os
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
IN_THE_WAY = frozenset({errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})
FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def what(error: OSError, folder: Path, need: int | None = None) -> str:
    """Why a write below `folder` failed; on a full disk with what is free and `need`, the bytes still to come."""
    text = error.strerror or str(error)
    if error.errno not in FULL:
        return text
    if (free := _free(folder)) is not None:
        text += f" ({size(free)} free in {folder})"
    return text if need is None else f"{text}, about {size(need)} more are needed"


def remedy(error: OSError, what_is_there: str) -> str:
    """What to do before a retry."""
    if error.errno in FULL:
        return "make room there, and retry"
    if error.errno in IN_THE_WAY:
        return f"move {what_is_there} away, and retry"
    if error.errno in FORBIDDEN:
        return "give the user write permission there, and retry"
    if error.errno == errno.ENOENT:
        return "make the folder again, and retry"
    return "look after that file system, and retry"


def size(count: float) -> str:
    """`512 B`, `1.2 kB`, `3.4 MB`, ..."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _free(folder: Path) -> int | None:
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize
