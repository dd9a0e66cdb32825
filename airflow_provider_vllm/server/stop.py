"""Ending a server, or what is left of one. Idempotent, and safe before there is anything.

The order: the supervisor does it when it lives and answers; a supervisor that does not answer is
killed, and then its guard ends the tree; when both are gone, the tree is found from the state and killed
here. What stays alive after that is an error, by pid.
"""

from __future__ import annotations

import logging
import shutil
import signal
import time
from dataclasses import dataclass

from airflow_provider_vllm.exceptions import ServerUnreachable, StopFailed
from airflow_provider_vllm.server import segments, state
from airflow_provider_vllm.server.control import ControlClient, token_for
from airflow_provider_vllm.server.processes import ProcessId, kill, tree_of
from airflow_provider_vllm.server.state import (
    GenerationDir,
    ServerState,
    StateRoot,
    pid_namespace,
    write_json,
)

POLL_S = 0.1
# The supervisor needs at most its grace (5 s), the kill and the memory check.
ASKED_S = 20.0
# A directory without a state is a start that has just begun, or one that died before its first write.
NEW_START_S = 120.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stopped:
    """What a stop did: `how` is `already`, `asked`, `killed` or `unknown`; `seconds` how long it took."""

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
    current = directory.read()
    if current is None or (current.settled and not current.supervisor_alive):
        return Stopped("already", time.monotonic() - began, current)
    how = "killed"
    if current.supervisor_alive and _ask(directory, current, reason):
        how = "asked"
    after = clean_up(directory, "stopped after its supervisor was gone")
    return Stopped(how, time.monotonic() - began, after)


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
    if current is None or current.supervisor_alive:
        return current
    if current.pid_namespace == pid_namespace():
        recorded = [p for p in (current.guard, current.engine, *current.tree) if p]
        session = current.engine.pid if current.engine else None
        tree = tree_of(recorded, session, [directory.log_file])
        mapped = segments.mapped(stat.pid for stat in tree)
        left = kill([stat.identity for stat in tree], timeout=5)
        # A killed process may have started another one in the meantime.
        left += kill(
            [stat.identity for stat in tree_of(recorded, session, [directory.log_file])], timeout=5
        )
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            raise StopFailed(
                f"Processes {pids} of the server {current.server_id} are still alive after SIGKILL. "
                f"{directory.log_file} is their log. They are probably stuck in the driver: look at "
                "`ps -o pid,stat,wchan -p PID` and at dmesg."
            )
        segments.remove(mapped | set(current.segments))
    if not current.settled:
        now = time.time()
        current = current.but(
            state=state.FAILED if current.state not in state.ENDED_STATES else current.state,
            reason=current.reason or "supervisor_gone",
            message=current.message or message,
            ended_at=current.ended_at or now,
            updated_at=now,
            settled=True,
        )
        write_json(directory.state_file, current.to_json())
    return current


def sweep(root: StateRoot, *, keep_failed_days: float) -> list[ServerState]:
    """Remove what dead supervisors of this host left, and directories older than `keep_failed_days`.

    Returns the servers whose processes were looked after. Never raises for one that can't be removed.
    """
    swept: list[ServerState] = []
    for directory in root.every_generation():
        try:
            found = directory.read()
            age = time.time() - directory.path.stat().st_mtime
            if found is None:
                if age > NEW_START_S:
                    shutil.rmtree(directory.path, ignore_errors=True)
                continue
            if not found.on_this_host or found.supervisor_alive:
                continue
            if not found.settled:
                log.warning(
                    "removing what is left of server %s (start %d)",
                    found.server_id,
                    found.generation,
                )
                swept.append(
                    clean_up(directory, "its supervisor was killed; found by a later start")
                    or found
                )
            elif time.time() - (found.ended_at or found.updated_at) > keep_failed_days * 86400:
                shutil.rmtree(directory.path, ignore_errors=True)
        except (StopFailed, OSError) as exc:
            log.error("%s", exc)
    _remove_empty(root)
    return swept


def _remove_empty(root: StateRoot) -> None:
    """Remove servers' directories that hold nothing but their lock, when nobody uses them."""
    for folder in root.servers.iterdir():
        if not state.SERVER_ID.match(folder.name) or root.generations(folder.name):
            continue
        if time.time() - folder.stat().st_mtime > NEW_START_S:
            shutil.rmtree(folder, ignore_errors=True)
