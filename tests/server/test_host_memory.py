"""Memory of the machine and of the cgroups around us, from copies of /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_provider_vllm.server import host_memory

GIB = 1024**3


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(
        tmp_path,
        "proc/meminfo",
        f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {48 * GIB // 1024} kB\n",
    )
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def cgroup2(root: Path, path: str, limit: str, used: int, cache: int = 0) -> None:
    write(root, f"sys/fs/cgroup{path}/memory.max", f"{limit}\n")
    write(root, f"sys/fs/cgroup{path}/memory.current", f"{used}\n")
    write(root, f"sys/fs/cgroup{path}/memory.stat", f"anon 1\ninactive_file {cache}\n")


def in_gib(root: Path) -> tuple[float, float]:
    available, total = host_memory.available_and_total(root)
    return available / GIB, total / GIB


def test_without_a_limit_the_machine_counts(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/\n")
    assert in_gib(root) == (48, 64)
    write(root, "proc/self/cgroup", "0::/user.slice/a\n")
    cgroup2(root, "/user.slice/a", "max", 5 * GIB)
    assert in_gib(root) == (48, 64)


def test_a_containers_limit_with_cache_that_can_be_dropped(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/\n")
    cgroup2(root, "", str(16 * GIB), used=10 * GIB, cache=4 * GIB)
    assert in_gib(root) == (10, 16)


def test_the_tightest_of_nested_limits_counts(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/pod/container\n")
    cgroup2(root, "/pod/container", str(32 * GIB), used=1 * GIB)
    cgroup2(root, "/pod", str(20 * GIB), used=15 * GIB)
    assert in_gib(root) == (5, 20)


def test_more_used_than_allowed_is_nothing_available(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/\n")
    cgroup2(root, "", str(16 * GIB), used=17 * GIB)
    assert in_gib(root) == (0, 16)


@pytest.mark.parametrize("folder", ["/docker/abc", ""])
def test_version_1_also_inside_a_container(root: Path, folder: str) -> None:
    write(root, "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n")
    base = f"sys/fs/cgroup/memory{folder}"
    write(root, f"{base}/memory.limit_in_bytes", str(16 * GIB))
    write(root, f"{base}/memory.usage_in_bytes", str(6 * GIB))
    write(root, f"{base}/memory.stat", f"cache 1\ntotal_inactive_file {GIB}\n")
    assert in_gib(root) == (11, 16)


def test_this_machine_can_be_read() -> None:
    available, total = host_memory.available_and_total()
    assert 0 < available <= total
