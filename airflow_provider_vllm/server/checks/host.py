"""What this worker itself offers: shared memory, disk, port, limits."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

from airflow_provider_vllm.server import cgroups
from airflow_provider_vllm.server.checks.finding import Finding, error, warning
from airflow_provider_vllm.server.sizes import gib

_NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "9p", "lustre", "gpfs", "ceph", "glusterfs", "beegfs")
_NETWORK_FUSE = ("fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs")
_CONTAINER_DEFAULT_SHM = 64 * 1024**2
# One segment of NCCL is about 10 MB, and vLLM and its workers have more.
_LEAST_SHM = 16 * 1024**2
_MORE_SHM = (
    "Give the container more: `--shm-size=2g` or `ipc: host`, in Kubernetes an emptyDir of medium "
    "Memory at /dev/shm."
)
_LEAST_FILES = 4096
# Pools have a thread for each core, NumPy's no more than this many; vLLM 0.32 on 2 cores has 80 in all.
_MOST_POOL_THREADS, _OWN_THREADS = 64, 20


def shm_findings(workers: int, folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Whether several worker processes have room to talk to each other through /dev/shm."""
    if workers < 2:
        return
    try:
        stat = os.statvfs(folder)
    except OSError as exc:
        yield error("shm", f"{folder} cannot be used: {exc.strerror}.", _MORE_SHM)
    else:
        yield from shm_room(workers, stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail)


def shm_room(workers: int, size: int, free: int) -> Iterator[Finding]:
    """The same by size and free bytes of /dev/shm."""
    message = (
        f"{workers} worker processes share /dev/shm; {gib(free)} of {gib(size)} are free there"
    )
    if free < _LEAST_SHM:
        yield error("shm", f"{message}.", _MORE_SHM, passes=size >= _LEAST_SHM)
    elif size <= _CONTAINER_DEFAULT_SHM:
        yield warning("shm", f"{message}, a container's default.", _MORE_SHM)


def free_disk(path: Path) -> int:
    """Bytes that this user can still write at `path`, or where it would be made."""
    stat = os.statvfs(_nearest(path))
    return stat.f_frsize * stat.f_bavail


def writable_findings(check: str, path: Path, fix: str) -> Iterator[Finding]:
    """Whether this user can write in `path`, or make it."""
    nearest = _nearest(path)
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        user = os.geteuid()
        yield error(check, f"{path} cannot be written by user {user}, who runs this.", fix)


def _nearest(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def filesystem(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The type of the filesystem that `path` is on (or would be made on)."""
    real, best, kind = os.path.realpath(path), "", ""
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        point, fstype = (part.replace("\\040", " ") for part in line.split(" ")[1:3])
        inside = point == "/" or real == point or real.startswith(point + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fstype
    return kind


def state_root_findings(
    state_root: Path, mounts: Path = Path("/proc/self/mounts")
) -> Iterator[Finding]:
    fix = "Set `[vllm] state_root` to a folder on this worker's own disk."
    yield from writable_findings("state-root", state_root, fix)
    kind = filesystem(state_root, mounts)
    if kind.startswith(_NETWORK_FILESYSTEMS) or kind in _NETWORK_FUSE:
        message = f"{state_root} is on a network filesystem ({kind}): GPU locks may not hold there."
        yield warning("state-root", message, fix)


def port_findings(host: str, port: int) -> Iterator[Finding]:
    """Whether `port` can be listened on now; 0 (any free one) always can.

    A host given by name is left to vLLM: to ask for its address can take long.
    """
    if not port:
        return
    numeric = "127.0.0.1" if host == "localhost" else host
    fix = "Set `port=0` for a free one, or another port."
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            numeric, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror:
        return
    except OSError as exc:
        if exc.errno == errno.EADDRNOTAVAIL:
            message = f"{host} is not an address of this worker."
            yield error("host", message, "Set `host` to one of its own, or to 127.0.0.1.")
        else:
            taken = exc.errno == errno.EADDRINUSE
            reason = "is taken" if taken else os.strerror(exc.errno or 0)
            yield error("port", f"Port {port} on {host}: {reason}.", fix, passes=taken)


def limit_findings(workers: int) -> Iterator[Finding]:
    """Open files: vLLM raises the soft limit itself, so that only the hard one counts. Address
    space: CUDA maps far more than it uses. Threads: see `task_findings`."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        message = (
            f"At most {files} files can be open (hard limit), and each request in flight is one."
        )
        fix = "Raise it for the worker: `ulimit -Hn 65535`, LimitNOFILE= in systemd."
        yield warning("ulimit-files", message, fix)
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY:
        message = f"The address space of a process is limited to {gib(space)}; vLLM maps far more."
        yield warning("ulimit-memory", message, "Lift it for the worker: `ulimit -v unlimited`.")
    yield from task_findings(workers, len(os.sched_getaffinity(0)), tasks_left())


def task_findings(workers: int, cores: int, left: int | None) -> Iterator[Finding]:
    """Processes and threads that can still be started (`left`, None without a limit) against what vLLM has at
    least: in the API server, the engine and each worker, a thread for each core and some of their own."""
    needed = (2 + workers) * (min(cores, _MOST_POOL_THREADS) + _OWN_THREADS)
    if left is not None and left < needed:
        yield warning(
            "tasks",
            f"{left} more processes and threads can be started here, and vLLM with {workers} worker process(es) "
            f"on {cores} cores needs about {needed}: without them it ends with `can't start new thread`.",
            "Raise the container's limit (`--pids-limit`, in Kubernetes podPidsLimit, in systemd TasksMax=).",
        )


def tasks_left(root: Path = Path("/")) -> int | None:
    """How many processes and threads the cgroups around us still allow; None without a limit."""
    left = []
    for folder in cgroups.folders("pids", root)[1]:
        limit = cgroups.read_number(folder / "pids.max")
        current = cgroups.read_number(folder / "pids.current")
        if limit is not None and current is not None:
            left.append(max(0, limit - current))
    return min(left, default=None)
