"""/dev/shm: which segments a server's own processes have mapped, and their removal after a kill.

The names alone (`psm_…`, `sem.mp-…`, `vllm_dist_…`) belong to other programs too, so only what was
seen in the maps of the tree is ever removed, and only when no living process maps it any more.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from airflow_provider_vllm.server.processes import ask_each, read_memory_file

SHM = Path("/dev/shm")


def mapped(pids: Iterable[int]) -> set[str]:
    """Names of the files in /dev/shm that these processes have mapped (those still linked). A process that is
    stuck in the kernel, and so gives no maps, is left out."""
    return set().union(*ask_each(pids, _mapped_by).values())


def _mapped_by(pid: int) -> set[str]:
    found: set[str] = set()
    for line in read_memory_file(pid, "maps").decode(errors="replace").split("\n"):
        # Address, rights, offset, device, inode, and the path from here on (proc(5)).
        path = line.split(maxsplit=5)[5:]
        name = path[0].removeprefix("/dev/shm/") if path else ""
        if path and name != path[0] and not name.endswith(" (deleted)"):
            found.add(name)
    return found


def remove(names: Iterable[str]) -> list[str]:
    """Remove the segments of these names that nobody maps; returns what was removed."""
    names = {name for name in names if _is_segment(name)}
    if not names:
        return []
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    maps = ask_each(pids, _mapped_by)
    if len(maps) < len(pids):
        return []  # one that gives no maps may use any of them: rather left than taken away
    in_use = set().union(*maps.values())
    removed = []
    for name in sorted(names - in_use):
        try:
            (SHM / name).unlink()
        except OSError:
            continue
        removed.append(name)
    return removed


def _is_segment(name: str) -> bool:
    path = SHM / name
    if "/" in name or name in ("", ".", ".."):
        return False
    try:
        return not path.is_symlink() and path.is_file() and path.stat().st_uid == os.geteuid()
    except OSError:
        return False
