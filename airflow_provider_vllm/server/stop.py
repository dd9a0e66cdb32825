"""Ending a server, or what is left of one. Idempotent, and safe before there is anything.

The order: the supervisor does it when it lives and answers; a supervisor that does not answer is
killed, and then its guard ends the tree; when both are gone, the tree is found from the state and killed
here. What stays alive after that is an error, by pid.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from airflow_provider_vllm.exceptions import InsecurePath, ServerUnreachable, StopFailed
from airflow_provider_vllm.server import remains, state
from airflow_provider_vllm.server.control import ControlClient, token_for
from airflow_provider_vllm.server.files import write_json
from airflow_provider_vllm.server.locks import is_held, try_lock
from airflow_provider_vllm.server.processes import ProcessId
from airflow_provider_vllm.server.state import (
    GenerationDir,
    ServerState,
    StateRoot,
    pid_namespace,
)

POLL_S = 0.1
# The supervisor needs at most its grace (5 s), the kill and the memory check.
ASKED_S = 20.0
# A directory without a state is a start that has just begun, or one that died before its first write.
NEW_START_S = 120.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stopped:
    """What a stop did: `how` is `already`, `asked`, `killed`, or `unknown` (it was on another host, which can't be
    asked); `seconds` how long it took."""

    how: str
    seconds: float
    state: ServerState | None = None


def stop_server(root: StateRoot, server_id: str, reason: str) -> list[Stopped]:
    """Stop every start of a server of this host, under its lock. Raises StopFailed."""
    with root.server_lock(server_id):
        return [stop_generation(generation, reason) for generation in root.generations(server_id)]


def stop_generation(directory: GenerationDir, reason: str) -> Stopped:
    """Stop one start of a server of this host and wait until nothing of it is left. Raises StopFailed."""
    began = time.monotonic()
    # A start that has not written anything yet never will after this.
    current = directory.read() or _call_off(directory, reason)
    supervised = current is not None and directory.supervised(current)
    if current is None or (current.settled and not supervised):
        return Stopped("already", time.monotonic() - began, current)
    if current.pid_namespace != pid_namespace():
        return _stop_elsewhere(directory, current, reason, supervised)
    how = "killed"
    if supervised and _ask(directory, current, reason):
        how = "asked"
    after = clean_up(directory, "stopped after its supervisor was gone")
    return Stopped(how, time.monotonic() - began, after)


def _call_off(directory: GenerationDir, reason: str) -> ServerState | None:
    """Make sure that a start which has not written its first state never runs; the state that stands."""
    number, _, nonce = directory.path.name.partition("-")
    now = time.time()
    called_off = ServerState(
        server_id=directory.server_dir.name,
        generation=int(number),
        nonce=nonce,
        host=socket.gethostname(),
        pid_namespace=pid_namespace(),
        state=state.STOPPED,
        reason="asked",
        message=f"called off before it began ({reason[:200]})",
        started_at=now,
        ended_at=now,
        updated_at=now,
        settled=True,
    )
    with suppress(FileNotFoundError):
        directory.write_first(called_off)
    return directory.read()


def _stop_elsewhere(
    directory: GenerationDir, current: ServerState, reason: str, supervised: bool
) -> Stopped:
    """A start in another container, on another host of a shared volume, or before a reboot.

    Its processes can't be seen from here, so it is asked, and never written off while it may live.
    """
    key = directory.key()
    try:
        return stop_remote(current.control_url or "", key or "", current.nonce, reason)
    except ServerUnreachable as exc:
        if supervised:
            raise StopFailed(
                f"The server {current.server_id} runs in another container, or on another host that shares "
                f"{directory.root}, of the name {current.host!r}, and can't be asked from here: {exc} Stop "
                "it there with `airflow vllm stop`, or stop that container."
            ) from None
    if not current.on_this_host:
        return Stopped("unknown", 0.0, current)
    return Stopped("already", 0.0, _settle(directory, current, "its host was started again"))


def stop_remote(control_url: str, key: str, nonce: str, reason: str) -> Stopped:
    """Stop a server of another host through its control endpoint. Raises ServerUnreachable, StopFailed."""
    began = time.monotonic()
    client = ControlClient(control_url, token_for(key, nonce))
    client.stop(reason)
    while time.monotonic() - began < ASKED_S:
        try:
            seen = ServerState.from_json(client.status())
        except ServerUnreachable:
            return Stopped("asked", time.monotonic() - began)
        if seen.settled:
            return Stopped("asked", time.monotonic() - began, seen)
        time.sleep(POLL_S)
    raise StopFailed(
        f"The server at {control_url} was asked to stop and still runs after {ASKED_S:g} s. Its worker's "
        "supervisor.log says why; `airflow vllm stop` on that worker ends it."
    )


def _ask(directory: GenerationDir, current: ServerState, reason: str) -> bool:
    """Ask the supervisor and wait; False when it did not do it and was killed instead."""
    supervisor = current.supervisor
    assert supervisor is not None
    key = directory.key()
    try:
        if key and current.control_url:
            ControlClient(current.control_url, token_for(key, current.nonce)).stop(reason)
        else:
            supervisor.signal(signal.SIGTERM)
    except ServerUnreachable as exc:
        log.warning("%s", exc)
        if supervisor.alive:
            supervisor.signal(signal.SIGTERM)
            if not _gone(supervisor, 1.0):
                _kill_supervisor(supervisor)
        return False
    if _gone(supervisor, ASKED_S):
        return True
    log.warning(
        "the supervisor (pid %s) did not end within %g s: it is killed", supervisor.pid, ASKED_S
    )
    _kill_supervisor(supervisor)
    return False


def _kill_supervisor(supervisor: ProcessId) -> None:
    """Its guard ends the tree then; what is left of it is `clean_up`'s."""
    supervisor.signal(signal.SIGKILL)
    _gone(supervisor, 5.0)


def _gone(process: ProcessId, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while process.alive:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def clean_up(directory: GenerationDir, message: str) -> ServerState | None:
    """End what is left of a start whose supervisor is gone, and write that down. Raises StopFailed."""
    current = directory.read()
    if current is None:
        return None
    if directory.supervised(current):
        raise StopFailed(
            f"The supervisor of {current.server_id} (pid {current.supervisor and current.supervisor.pid} on "
            f"{current.host}) is still alive. {directory.supervisor_log} is its log."
        )
    if current.pid_namespace == pid_namespace() and (left := remains.end(directory, current)):
        pids = ", ".join(str(process.pid) for process in left)
        raise StopFailed(
            f"Processes {pids} of the server {current.server_id} are still alive after SIGKILL. "
            f"{directory.log_file} is their log. They are probably stuck in the driver: look at "
            "`ps -o pid,stat,wchan -p PID` and at dmesg."
        )
    return current if current.settled else _settle(directory, current, message)


def _settle(directory: GenerationDir, current: ServerState, message: str) -> ServerState:
    """Write down that nothing is left of a start; a disk that is full does not undo that."""
    now = time.time()
    settled = current.but(
        state=current.state if current.state in state.ENDED_STATES else state.FAILED,
        reason=current.reason or "supervisor_gone",
        message=current.message or message,
        ended_at=current.ended_at or now,
        updated_at=now,
        settled=True,
    )
    try:
        write_json(directory.state_file, settled.to_json())
    except OSError as exc:
        log.warning("%s could not be written: %s", directory.state_file, exc)
    return settled


def sweep(root: StateRoot, *, keep_failed_days: float) -> list[ServerState]:
    """Remove what dead supervisors of this host left, and directories older than `keep_failed_days`.

    Returns the servers whose processes were looked after. Never raises for one that can't be removed.
    """
    swept: list[ServerState] = []
    for directory in root.every_generation():
        try:
            found = directory.read()
            age = time.time() - _last_change(directory)
            if found is None:
                # Whoever launches holds the lock until the supervisor has written its first state.
                if age > NEW_START_S and not is_held(directory.server_dir / "lock"):
                    shutil.rmtree(directory.path, ignore_errors=True)
                continue
            if directory.supervised(found):
                continue
            if found.settled:
                old = time.time() - (found.ended_at or found.updated_at) > keep_failed_days * 86400
            elif found.on_this_host:
                log.warning(
                    "removing what is left of server %s (start %d)",
                    found.server_id,
                    found.generation,
                )
                swept.append(
                    clean_up(directory, "its supervisor was killed; found by a later start")
                    or found
                )
                old = False
            else:
                # Of a container that is gone, or of a host whose locks can't be seen from here.
                old = age > max(keep_failed_days * 86400, NEW_START_S)
            if old:
                shutil.rmtree(directory.path, ignore_errors=True)
        except (StopFailed, OSError) as exc:
            log.error("%s", exc)
    _remove_empty(root)
    return swept


def _last_change(directory: GenerationDir) -> float:
    """When anything in this directory was last written, its log above all."""
    paths = (directory.path, directory.state_file, directory.log_file)
    return max(path.stat().st_mtime for path in paths if path.exists())


def _remove_empty(root: StateRoot) -> None:
    """Remove servers' directories that hold nothing but locks, when nobody uses them."""
    for folder in root.servers.iterdir():
        if not state.SERVER_ID.match(folder.name) or root.generations(folder.name):
            continue
        locks: list[int | None] = []
        try:
            if time.time() - folder.stat().st_mtime > NEW_START_S:
                # Whoever waits for one of these locks sees that its file is gone, and makes it anew.
                locks = [try_lock(path) for path in folder.iterdir()]
                if None not in locks and not root.generations(folder.name):
                    shutil.rmtree(folder, ignore_errors=True)
        except (OSError, InsecurePath) as exc:
            log.error("%s", exc)
        finally:
            for fd in locks:
                if fd is not None:
                    os.close(fd)
