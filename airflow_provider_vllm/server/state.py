"""A server's directory on the worker's disk.

    STATE_ROOT/                          0700, owned by the user
      locks/                             one file for each GPU
      servers/ID/
        lock                             taken for each start, restart and stop of this server
        GENERATION-NONCE/
          spec.json  key  state.json     0600
          alive                          locked by the supervisor for as long as it lives
          vllm.log  supervisor.log  diagnosis.json  evidence.json

Invariants: JSON is written to a temporary file and renamed, so a reader never sees half of it; a
directory that somebody else could write is refused; a server id is checked before it becomes a path.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from airflow_provider_vllm.exceptions import InvalidHandle
from airflow_provider_vllm.server.files import (
    create_private,
    json_text,
    read_json,
    write_json,
    write_private,
)
from airflow_provider_vllm.server.locks import file_lock, is_held
from airflow_provider_vllm.server.private import private_dir
from airflow_provider_vllm.server.processes import ProcessId

__all__ = [
    "GenerationDir",
    "ServerState",
    "StateRoot",
    "check_server_id",
    "file_lock",
    "pid_namespace",
    "read_json",
    "write_json",
    "write_private",
]

SERVER_ID = re.compile(r"\A[a-z0-9](?:[a-z0-9_.-]{0,118}[a-z0-9])?\Z")
NONCE = re.compile(r"\A[0-9a-f]{16}\Z")
# A start waits for what it supersedes, for its checks and for its supervisor.
LOCK_S = 900.0

# What a server is doing. The first three can still become ready.
WAITING, LAUNCHING, LOADING, READY = "waiting", "launching", "loading", "ready"
DRAINING, STOPPED, FAILED = "draining", "stopped", "failed"
STARTING_STATES = (WAITING, LAUNCHING, LOADING)
ENDED_STATES = (STOPPED, FAILED)

# Types of JSON values by the annotation of a field.
_PLAIN: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
}


@dataclass(frozen=True)
class ServerState:
    """What the supervisor says of its server. Times are seconds since the epoch.

    `settled` turns true when an ended server's tree is gone and its diagnosis is written.
    `diagnosis` is its JSON form, `report` the full text of it.
    `reason` is a short code for why it ended (`exit`, `timeout`, `no_gpu`, `preflight`, `port_taken`, `idle`,
    `max_lifetime`, `owner_gone`, `asked`, `guard_gone`, `engine_dead`, `api_frozen`,
    `directory_gone`, `supervisor_gone`, `crash`); `message` says it in a sentence.
    """

    server_id: str
    generation: int
    nonce: str
    host: str
    pid_namespace: str
    state: str = LAUNCHING
    stage: str | None = None
    stage_since: float = 0.0
    progress: str | None = None
    started_at: float = 0.0
    ready_at: float | None = None
    ended_at: float | None = None
    updated_at: float = 0.0
    settled: bool = False
    supervisor: ProcessId | None = None
    guard: ProcessId | None = None
    engine: ProcessId | None = None
    tree: tuple[ProcessId, ...] = ()
    segments: tuple[str, ...] = ()
    base_url: str | None = None
    control_url: str | None = None
    model: str = ""
    gpus: tuple[str, ...] = ()
    task: str | None = None
    lease_until: float | None = None
    exit_status: int | None = None
    reason: str | None = None
    message: str | None = None
    diagnosis: Mapping[str, Any] | None = None
    report: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        out = dict(self.__dict__)
        for name in ("supervisor", "guard", "engine"):
            out[name] = out[name].to_json() if out[name] else None
        out["tree"] = [process.to_json() for process in self.tree]
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ServerState:
        """Raises TypeError for what is no state: a file that another version wrote, or a disk lost."""
        known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
        for each in fields(cls):
            kind, _, maybe = str(each.type).partition(" | ")
            value = known.get(each.name, each.default)
            if kind in _PLAIN and not (
                isinstance(value, _PLAIN[kind]) or (maybe and value is None)
            ):
                raise TypeError(f"{each.name} is a {type(value).__name__}")
        for name in ("supervisor", "guard", "engine"):
            known[name] = ProcessId.from_json(known.get(name))
        tree = (ProcessId.from_json(item) for item in known.get("tree") or ())
        known["tree"] = tuple(item for item in tree if item)
        for name in ("segments", "gpus"):
            known[name] = tuple(known.get(name) or ())
            if not all(isinstance(item, str) for item in known[name]):
                raise TypeError(f"{name} holds something else than text")
        return cls(**known)

    def but(self, **changes: Any) -> ServerState:
        return replace(self, **changes)

    @property
    def on_this_host(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def supervisor_alive(self) -> bool:
        """Whether the supervisor lives; only meaningful on its own host."""
        return (
            self.pid_namespace == pid_namespace()
            and self.supervisor is not None
            and self.supervisor.alive
        )


@dataclass(frozen=True)
class GenerationDir:
    """The directory of one start of a server."""

    path: Path

    @property
    def spec_file(self) -> Path:
        return self.path / "spec.json"

    @property
    def key_file(self) -> Path:
        return self.path / "key"

    @property
    def state_file(self) -> Path:
        return self.path / "state.json"

    @property
    def log_file(self) -> Path:
        return self.path / "vllm.log"

    @property
    def supervisor_log(self) -> Path:
        return self.path / "supervisor.log"

    @property
    def diagnosis_file(self) -> Path:
        return self.path / "diagnosis.json"

    @property
    def server_dir(self) -> Path:
        return self.path.parent

    @property
    def root(self) -> Path:
        return self.path.parent.parent.parent

    def read(self) -> ServerState | None:
        """The state, or None when nothing (readable) was written yet."""
        data = read_json(self.state_file)
        try:
            return ServerState.from_json(data) if data else None
        except TypeError:
            return None  # of another version

    def write_first(self, state: ServerState) -> bool:
        """Write the first state of this start; False where somebody else wrote one before."""
        return create_private(self.state_file, json_text(state.to_json()))

    @property
    def alive_file(self) -> Path:
        return self.path / "alive"

    def supervised(self, current: ServerState) -> bool:
        """Whether the supervisor lives, by its process, in another container by its lock."""
        if current.pid_namespace == pid_namespace():
            return current.supervisor_alive
        return is_held(self.alive_file)

    def key(self) -> str | None:
        try:
            return self.key_file.read_text()
        except FileNotFoundError:
            return None


def check_server_id(server_id: object) -> str:
    """The id itself when it is safe as a path. Raises InvalidHandle."""
    if not isinstance(server_id, str) or not SERVER_ID.match(server_id) or ".." in server_id:
        raise InvalidHandle(
            f"{server_id!r} is no server id: take the handle that the start task returned."
        )
    return server_id


class StateRoot:
    """The directory `[vllm] state_root` of this worker."""

    def __init__(self, path: str | Path) -> None:
        self.path = private_dir(Path(path).expanduser().absolute())
        self.servers = private_dir(self.path / "servers")
        self.locks = private_dir(self.path / "locks")

    def server_dir(self, server_id: str) -> Path:
        return self.servers / check_server_id(server_id)

    def generations(self, server_id: str) -> list[GenerationDir]:
        """The starts of one server, oldest first."""
        folder = self.server_dir(server_id)
        found = []
        try:
            entries = [] if folder.is_symlink() else list(folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        for entry in entries:
            number, _, nonce = entry.name.partition("-")
            if (
                number.isdigit()
                and NONCE.match(nonce)
                and entry.is_dir()
                and not entry.is_symlink()
            ):
                found.append((int(number), entry))
        return [GenerationDir(path) for _, path in sorted(found)]

    def newest(self, server_id: str) -> GenerationDir | None:
        found = self.generations(server_id)
        return found[-1] if found else None

    def every_generation(self) -> list[GenerationDir]:
        ids = sorted(entry.name for entry in self.servers.iterdir() if SERVER_ID.match(entry.name))
        return [generation for server_id in ids for generation in self.generations(server_id)]

    def new_generation(self, server_id: str) -> GenerationDir:
        """Make the directory of the next start. To be called with the server's lock held."""
        private_dir(self.server_dir(server_id))
        newest = self.newest(server_id)
        number = int(newest.path.name.partition("-")[0]) + 1 if newest else 1
        return GenerationDir(
            private_dir(self.server_dir(server_id) / f"{number:04d}-{secrets.token_hex(8)}")
        )

    @contextmanager
    def server_lock(self, server_id: str) -> Iterator[None]:
        """Held while a server is started, restarted or stopped; waits for its holder.

        Raises ServerError after LOCK_S seconds: a frozen holder must not hold up others for ever.
        """
        private_dir(self.server_dir(server_id))
        with file_lock(self.server_dir(server_id) / "lock", timeout=LOCK_S):
            yield


def pid_namespace() -> str:
    """Which set of pids this process sees, and since which boot: a container has its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "unknown"
