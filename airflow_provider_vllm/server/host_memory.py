"""The memory of this worker: the machine's, or a tighter limit of a cgroup around us.

Linux, cgroups of both versions. `root` stands for `/` and is another folder in tests only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def available_and_total(root: Path = Path("/")) -> tuple[int, int]:
    """(available, total) bytes."""
    meminfo = (root / "proc/meminfo").read_text(encoding="ascii")
    fields = dict(line.split(":", 1) for line in meminfo.splitlines())
    total, available = (int(fields[n].split()[0]) * 1024 for n in ("MemTotal", "MemAvailable"))
    for limit, used in _cgroup_limits(root):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return available, total


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) bytes of our cgroup and of those above it. Page cache that can be dropped is
    not counted as used."""
    base, names, cache_name = _memory_cgroup(root)
    for folder in (base, *base.parents):
        try:
            limit = (folder / names[0]).read_text(encoding="ascii").strip()
            used = int((folder / names[1]).read_text(encoding="ascii"))
            stat = (folder / "memory.stat").read_text(encoding="ascii")
        except (OSError, ValueError):
            if folder == root / "sys/fs/cgroup":
                return
            continue
        fields = dict(line.split(" ", 1) for line in stat.splitlines())
        if limit != "max":
            yield int(limit), max(0, used - int(fields.get(cache_name, 0)))


def _memory_cgroup(root: Path) -> tuple[Path, tuple[str, str], str]:
    mount = root / "sys/fs/cgroup"
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            # Inside a container the path is the host's, and its own cgroup is the mount itself.
            return _existing(mount / "memory", path), names, "total_inactive_file"
    path = line.split(":", 2)[2]
    return _existing(mount, path), ("memory.max", "memory.current"), "inactive_file"


def _existing(mount: Path, path: str) -> Path:
    folder = mount / path.lstrip("/")
    return folder if folder.is_dir() else mount
