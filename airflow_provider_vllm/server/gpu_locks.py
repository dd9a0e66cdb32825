"""One lock per GPU of this host, so that two servers never load onto the same one.

What enters is the folder of the locks and GPU UUIDs; what leaves are open descriptors: each is a
lock.

- A lock is a `flock` on a file named after the GPU. It lives as long as any process holds a copy of
  its descriptor: handed on to the guard (`pass_fds`), it outlives a killed supervisor, and nothing
  has to be cleaned up after a power cut.
- The files are never removed: a lock on a removed file would lock nothing.
- All GPUs of a server are taken, or none. Nothing here waits for a GPU.
- The text in a file (who took it) is for messages; only the lock itself counts.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import quote, unquote

from airflow_provider_vllm.exceptions import NoFreeGpu
from airflow_provider_vllm.server import gpus as gpu_choice
from airflow_provider_vllm.server.gpus import Gpu, Shortage
from airflow_provider_vllm.server.private import check_private_dir, open_private, private_dir

_SUFFIX = ".lock"
# `locked()` looks by locking for some microseconds, and another start may give up what it took:
# a lock that is seen held is looked at again before it counts.
_LOOKS = 5
_BETWEEN_LOOKS_S = 0.01


@dataclass(frozen=True)
class Holder:
    """Who took a lock: the server's id, the pid that took it, and when (seconds since 1970)."""

    owner: str
    pid: int
    taken_at: float

    def __str__(self) -> str:
        taken = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(self.taken_at))
        return f"{self.owner or 'a server'} (pid {self.pid}, since {taken})"


@dataclass(frozen=True)
class Claim:
    """GPUs chosen and locked: `uuids` and `fds` belong together by position."""

    uuids: tuple[str, ...]
    fds: tuple[int, ...]


def take(lock_dir: Path, uuids: Iterable[str], *, owner: str = "") -> list[int]:
    """Locks every GPU of `uuids`; the descriptors, in their order. Does not wait.

    `owner` (a server id) is written into the lock for the messages of others. The descriptors are
    not inherited by children unless passed on. Raises NoFreeGpu, holding nothing, where one is
    taken; InsecurePath where the folder or a file could be another user's.
    """
    private_dir(lock_dir)
    order = list(dict.fromkeys(uuids))
    taken: dict[str, int] = {}
    try:
        for uuid in sorted(order):  # the same order everywhere, so that one of two starts wins
            taken[uuid] = _lock(lock_dir, uuid, owner)
    except BaseException:
        release(taken.values())
        raise
    return [taken[uuid] for uuid in order]


def release(fds: Iterable[int]) -> None:
    """Closes this process's copies; the locks end with the last copy."""
    for fd in fds:
        os.close(fd)


def locked(lock_dir: Path) -> frozenset[str]:
    """The UUIDs of the GPUs that are locked now."""
    return frozenset(holders(lock_dir))


def holders(lock_dir: Path) -> dict[str, Holder]:
    """UUID -> who holds it, for every GPU that is locked now."""
    if not os.path.lexists(lock_dir):
        return {}
    check_private_dir(lock_dir)
    held = {path: Holder("", 0, 0.0) for path in sorted(lock_dir.glob("*" + _SUFFIX))}
    for look in range(_LOOKS):
        if look and held:
            time.sleep(_BETWEEN_LOOKS_S)
        held = {path: holder for path in held if (holder := _holder_of(path))}
    return {unquote(path.name.removesuffix(_SUFFIX)): holder for path, holder in held.items()}


def claim(
    lock_dir: Path,
    gpus: Sequence[Gpu],
    count: int,
    *,
    owner: str,
    wanted: tuple[str, ...] = (),
    min_free_bytes: int = 0,
    min_free_fraction: float = 0.0,
) -> Claim | Shortage:
    """Chooses (see `gpus.choose`) and locks; chooses again where another start was faster."""
    for _ in range(len(gpus) + 1):
        held = holders(lock_dir)
        choice = gpu_choice.choose(
            gpus,
            count,
            locked=frozenset(held),
            wanted=wanted,
            min_free_bytes=min_free_bytes,
            min_free_fraction=min_free_fraction,
        )
        if isinstance(choice, Shortage):
            named = {uuid: f"locked by {holder}" for uuid, holder in held.items()}
            reasons = {uuid: named.get(uuid, reason) for uuid, reason in choice.held.items()}
            return replace(choice, held=reasons)
        try:
            return Claim(choice, tuple(take(lock_dir, choice, owner=owner)))
        except NoFreeGpu:
            continue
    return Shortage(count, (), {gpu.uuid: "another start was faster" for gpu in gpus})


def _lock(lock_dir: Path, uuid: str, owner: str) -> int:
    path = lock_dir / (quote(uuid, safe="") + _SUFFIX)
    fd = open_private(path, os.O_RDWR | os.O_CREAT)
    if not _try_lock_patiently(fd):
        holder = _read_holder(fd)
        os.close(fd)
        raise NoFreeGpu(
            f"GPU {uuid} is held by {holder}. The lock is {path}. Wait for that server to stop, or "
            "stop it with `airflow vllm stop`."
        )
    text = json.dumps(asdict(Holder(owner, os.getpid(), time.time()))).encode()
    os.ftruncate(fd, 0)
    os.pwrite(fd, text, 0)
    return fd


def _try_lock_patiently(fd: int) -> bool:
    for look in range(_LOOKS):
        if look:
            time.sleep(_BETWEEN_LOOKS_S)
        if _try_lock(fd, fcntl.LOCK_EX):
            return True
    return False


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _holder_of(path: Path) -> Holder | None:
    """Who holds this lock at this moment."""
    fd = open_private(path, os.O_RDWR)
    try:
        return None if _try_lock(fd, fcntl.LOCK_SH) else _read_holder(fd)
    finally:
        os.close(fd)


def _read_holder(fd: int) -> Holder:
    try:
        return Holder(**json.loads(os.pread(fd, 4096, 0)))
    except (ValueError, TypeError):
        return Holder("", 0, 0.0)  # being written just now, or not by this version
