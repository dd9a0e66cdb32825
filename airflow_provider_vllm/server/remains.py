"""What is left of one start of a server: its state goes in, no process, segment or temporary file of it is left after.

Used by the supervisor at the end of its server, and by whoever finds a server whose supervisor is dead.
"""

from __future__ import annotations

import logging

from airflow_provider_vllm.server import nvml, segments, temp
from airflow_provider_vllm.server.processes import ProcessId, Stat, descendants, kill, tree_of
from airflow_provider_vllm.server.state import GenerationDir, ServerState

# A process that is killed may have started another one just before.
ROUNDS = 3

log = logging.getLogger(__name__)


def find(directory: GenerationDir, current: ServerState, below: int | None = None) -> list[Stat]:
    """The live processes of this start, and those below the process `below` but for one that waits for the driver."""
    recorded = [process for process in (current.guard, current.engine, *current.tree) if process]
    session = current.engine.pid if current.engine else None
    # Named anew after each try on a port that was taken.
    logs = {directory.log_file, *directory.path.glob("vllm*.log")}
    found = tree_of(recorded, session, logs, current.nonce)
    more = descendants(below) if below is not None else []
    more = [stat for stat in more if stat.pid != nvml.asker()]
    return list({stat.identity: stat for stat in (*found, *more)}.values())


def end(
    directory: GenerationDir,
    current: ServerState,
    *,
    below: int | None = None,
    timeout: float = 5.0,
) -> list[ProcessId]:
    """Kill the processes, remove the segments that nobody maps any more and the temporary files; who is still alive."""
    held = set(current.segments)
    left: list[ProcessId] = []
    for _ in range(ROUNDS):
        found = find(directory, current, below)
        held |= segments.mapped(stat.pid for stat in found)
        left = kill([stat.identity for stat in found], timeout=timeout)
        if left or not found:
            break
    if removed := segments.remove(held):
        log.info("removed /dev/shm segments: %s", ", ".join(removed))
    if not left:
        temp.remove(current.nonce)
    return left
