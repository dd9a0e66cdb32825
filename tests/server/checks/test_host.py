"""This worker: shared memory, filesystems, ports and limits."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_provider_vllm.server.checks import host


def test_shm_is_looked_at_only_for_several_processes(tmp_path: Path) -> None:
    assert list(host.shm_findings(1, tmp_path / "none")) == []
    (finding,) = host.shm_findings(2, tmp_path / "none")
    assert finding.level == "error"
    assert "cannot be used" in finding.message


@pytest.mark.parametrize(
    ("size", "free", "level"),
    [(64, 63, "warning"), (64, 10, "error"), (8192, 8000, None), (8192, 10, "error")],
)
def test_shm_by_size(size: int, free: int, level: str | None) -> None:
    found = list(host.shm_room(4, size * 2**20, free * 2**20))
    assert [finding.level for finding in found] == ([level] if level else [])
    for finding in found:
        assert "4 worker processes" in finding.message
        assert f"{size}.0 MiB" in finding.message or f"{size / 1024:.2f} GiB" in finding.message
        assert "--shm-size" in finding.fix


def test_this_machines_shm_can_be_read() -> None:
    assert {finding.check for finding in host.shm_findings(2)} <= {"shm"}


def test_the_filesystem_of_a_path(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "overlay / overlay rw 0 0\n"
        "server:/x /data nfs4 rw 0 0\n"
        "tmpfs /data/fast tmpfs rw 0 0\n"
        "s3 /my\\040bucket fuse.s3fs rw 0 0\n"
    )
    for path, kind in {
        "/etc": "overlay",
        "/data": "nfs4",
        "/data/a/b": "nfs4",
        "/data/fast/a": "tmpfs",
        "/database": "overlay",
        "/my bucket/a": "fuse.s3fs",
    }.items():
        assert host.filesystem(Path(path), mounts) == kind
    found = list(host.state_root_findings(tmp_path, mounts))
    assert found == []
    mounts.write_text(f"server:/x {tmp_path.resolve()} nfs4 rw 0 0\n")
    (finding,) = host.state_root_findings(tmp_path, mounts)
    assert finding.level == "warning"
    assert "network filesystem (nfs4)" in finding.message


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "hub"
    (finding,) = host.writable_findings("hub-cache", path, "Move it.")
    assert finding.message.startswith(f"{path} cannot be written by user {os.geteuid()}")
    assert finding.fix == "Move it."


def test_a_folder_that_can_be_made(tmp_path: Path) -> None:
    assert list(host.writable_findings("hub-cache", tmp_path / "a/b", "")) == []
    assert not (tmp_path / "a").exists()
    assert host.free_disk(tmp_path / "a/b") > 0


def test_a_port_that_is_taken() -> None:
    assert list(host.port_findings("127.0.0.1", 0)) == []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        (finding,) = host.port_findings("127.0.0.1", port)
        assert finding.check == "port"
        assert finding.message == f"Port {port} on 127.0.0.1: is taken."
    assert list(host.port_findings("127.0.0.1", port)) == []
    assert list(host.port_findings("localhost", port)) == []


def test_a_host_that_is_not_ours() -> None:
    (finding,) = host.port_findings("192.0.2.1", 8000)  # TEST-NET-1, nobody's
    assert finding.message == "192.0.2.1 is not an address of this worker."
    # A name would have to be asked for, which can take longer than all checks may.
    assert list(host.port_findings("no.such.host.invalid", 8000)) == []


def test_a_port_only_for_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    (finding,) = host.port_findings("127.0.0.1", 80)
    assert finding.message == "Port 80 on 127.0.0.1: Permission denied."


def test_limits_of_a_process_that_has_them() -> None:
    code = (
        "import resource\n"
        "from airflow_provider_vllm.server.checks import host\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))\n"
        "for finding in host.limit_findings(1): print(finding)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    files, space = out.stdout.splitlines()
    assert files.startswith("[ulimit-files] At most 1024 files can be open")
    assert space.startswith("[ulimit-memory] The address space of a process is limited to 8.00 GiB")


def test_limits_that_vllm_raises_itself_are_no_finding() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard >= 4096 or hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        try:
            assert [f for f in host.limit_findings(1) if f.check == "ulimit-files"] == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def pids(folder: Path, limit: object, current: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pids.max").write_text(f"{limit}\n")
    (folder / "pids.current").write_text(f"{current}\n")


@pytest.mark.parametrize(
    ("line", "mount"),
    [("0::/pod/container", "sys/fs/cgroup"), ("4:cpu,pids:/pod/container", "sys/fs/cgroup/pids")],
    ids=["cgroups 2", "cgroups 1"],
)
def test_the_tightest_limit_of_processes_around_us_counts(
    tmp_path: Path, line: str, mount: str
) -> None:
    assert host.tasks_left(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"7:memory:/x\n{line}\n")
    assert host.tasks_left(tmp_path) is None
    pids(tmp_path / mount / "pod/container", "max", 40)
    assert host.tasks_left(tmp_path) is None
    pids(tmp_path / mount / "pod", 100, 70)
    assert host.tasks_left(tmp_path) == 30
    pids(tmp_path / mount / "pod/container", 60, 70)
    assert host.tasks_left(tmp_path) == 0


def test_too_few_processes_and_threads_for_vllm() -> None:
    (finding,) = host.task_findings(1, 8, 40)
    assert (finding.check, finding.level) == ("tasks", "warning")
    assert "40 more processes and threads" in finding.message
    assert "needs about 84" in finding.message
    assert list(host.task_findings(1, 8, 84)) == []
    assert list(host.task_findings(1, 8, None)) == []
    assert len(list(host.task_findings(8, 8, 84))) == 1
    # The pools grow no further on a larger machine.
    assert list(host.task_findings(1, 256, 252)) == []
