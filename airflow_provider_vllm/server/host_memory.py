"""The memory of this worker: the machine's, or a tighter limit of a cgroup around us.

Linux, cgroups of both versions. `root` stands for `/` and is another folder in tests only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from airflow_provider_vllm.server import cgroups

# By version of cgroups: the files of the limit and of what is used, and the field of memory.stat.
_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


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
    version, folders = cgroups.folders("memory", root)
    limit_name, used_name, cache_name = _NAMES[version]
    for folder in folders:
        limit = cgroups.read_number(folder / limit_name)
        used = cgroups.read_number(folder / used_name)
        if limit is None or used is None:
            continue
        try:
            stat = (folder / "memory.stat").read_text(encoding="ascii")
            fields = dict(line.split(" ", 1) for line in stat.splitlines())
            yield limit, max(0, used - int(fields.get(cache_name, 0)))
        except (OSError, ValueError):
            continue
