"""One DAG run as a person at the UI and an administrator on the worker see it.

Enters: a running Airflow, a DAG id and a conf. Leaves: states, logs and XComs of the run; the servers
that its tasks started, and what is left of them.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from airflow_provider_vllm.server.processes import tree_of
from airflow_provider_vllm.server.state import READY, GenerationDir, ServerState, StateRoot
from scripts.airflow_client import ApiError
from scripts.airflow_stack import AirflowStack

T = TypeVar("T")
RUNNING = re.compile(r"^vllm:num_requests_running\S* ([0-9.]+)", re.MULTILINE)
# Airflow tells a task that it was marked or cleared with its next heartbeat (5 s), and gives it 5 s more.
KILL_S = 20.0
ONE_AT_A_TIME = threading.Lock()


class Observed:
    """A run that was just triggered."""

    def __init__(self, stack: AirflowStack, dag_id: str, conf: Mapping[str, Any]) -> None:
        self.stack, self.client, self.dag_id = stack, stack.client, dag_id
        self.root = stack.home / "vllm"
        self.run_id = written(lambda: self.client.run_dag(dag_id, conf))
        self.seen: dict[str, list[str | None]] = {}

    # what the user sees

    def states(self) -> dict[str, str | None]:
        """State by task; every state that was ever seen is kept in `seen`."""
        assert self.stack.dead_parts() == [], self.stack.logs
        states = self.client.states(self.dag_id, self.run_id)
        for name, state in states.items():
            past = self.seen.setdefault(name, [])
            if not past or past[-1] != state:
                past.append(state)
        return states

    def state(self, task_id: str) -> str | None:
        return self.client.task(self.dag_id, self.run_id, task_id).state

    def wait(
        self, until: Callable[[], Any], what: str, timeout: float = 120.0, every: float = 0.3
    ) -> Any:
        """Wait until `until()` is true; its value."""
        return self.client.wait_for(
            lambda: (until(), self.states()),
            lambda seen: bool(seen[0]),
            timeout=timeout,
            what=f"{self.dag_id} {self.run_id}: {what}",
            every=every,
        )[0]

    def wait_for_state(self, task_id: str, *states: str, timeout: float = 120.0) -> None:
        self.wait(lambda: self.state(task_id) in states, f"{task_id} is {states}", timeout)

    def finish(self, timeout: float = 180.0) -> str:
        """Wait until the run has ended; its state."""
        self.wait(
            lambda: self.client.run_state(self.dag_id, self.run_id) in ("success", "failed"),
            "end of the run",
            timeout,
        )
        return self.client.run_state(self.dag_id, self.run_id)

    def log(self, task_id: str, try_number: int = 1) -> str:
        return self.client.log(self.dag_id, self.run_id, task_id, try_number)

    def xcom(self, task_id: str, key: str = "return_value") -> Any:
        return self.client.xcom(self.dag_id, self.run_id, task_id, key)

    def tries(self, task_id: str) -> list[str | None]:
        """The state of each try."""
        return [each["state"] for each in self.client.tries(self.dag_id, self.run_id, task_id)]

    def mark(self, task_id: str, state: str) -> None:
        written(lambda: self.client.mark(self.dag_id, self.run_id, task_id, state))

    def mark_run(self, state: str) -> None:
        written(lambda: self.client.mark_run(self.dag_id, self.run_id, state))

    def clear(self, *task_ids: str, only_failed: bool = False) -> list[str]:
        clear = self.client.clear
        return written(lambda: clear(self.dag_id, self.run_id, task_ids, only_failed=only_failed))

    @staticmethod
    def seconds_between(epoch: float, shown: str) -> float:
        """From a time of the worker (seconds since the epoch) to one that the REST API shows."""
        return datetime.fromisoformat(shown.replace("Z", "+00:00")).timestamp() - epoch

    # what is on the worker

    def starts(self) -> list[GenerationDir]:
        """Every start of a server by a task of this run, oldest first."""
        found = []
        for directory in StateRoot(self.root).every_generation():
            state = directory.read()
            if state and f" {self.run_id} " in (state.task or ""):
                found.append((state.started_at, directory))
        return [directory for _, directory in sorted(found, key=lambda pair: pair[0])]

    def servers(self) -> list[ServerState]:
        return [state for state in (directory.read() for directory in self.starts()) if state]

    def requests_running(self) -> int:
        """How many requests the run's newest server works on; 0 while there is none."""
        servers = self.servers()
        if not servers or servers[-1].state != READY:
            return 0
        try:
            with urllib.request.urlopen(f"{servers[-1].base_url}/metrics", timeout=5) as answer:
                found = RUNNING.search(answer.read().decode())
        except OSError:
            return 0
        return int(float(found[1])) if found else 0

    def wait_for_requests(self, task_id: str = "work") -> None:
        """Until the batch has rows in flight."""
        self.wait(
            lambda: self.state(task_id) == "running" and self.requests_running() > 0,
            "rows are in flight",
        )

    def left(self) -> list[str]:
        """What is left of the run's servers: processes, shared memory, locks that are held."""
        found: list[str] = []
        for directory in self.starts():
            state = directory.read()
            if state is None or not state.settled:
                found.append(f"{directory.path.name} is not settled: {state and state.state}")
                continue
            recorded = [p for p in (state.guard, state.engine, *state.tree) if p]
            session = state.engine.pid if state.engine else None
            alive = [p.pid for p in (state.supervisor, *recorded) if p and p.alive]
            alive += [stat.pid for stat in tree_of(recorded, session, [directory.log_file])]
            found += [f"process {pid} of {directory.path.name}" for pid in sorted(set(alive))]
            found += [f"/dev/shm/{n}" for n in state.segments if Path("/dev/shm", n).exists()]
            found += held_locks(directory.server_dir)
        return found + held_locks(self.root / "locks")

    def nothing_left(self, within: float = 10.0) -> None:
        """Raises AssertionError unless everything is gone `within` seconds."""
        assert self.starts(), "the run has started no server, so this would prove nothing"
        deadline = time.monotonic() + within
        while left := self.left():
            assert time.monotonic() < deadline, f"left {within:g} s later: {left}"
            time.sleep(0.1)


def written(act: Callable[[], T]) -> T:
    """Do what a person does by a click, and again where Airflow answers that something went wrong.

    On SQLite Airflow's API server stops for some seconds, then refuses, when such a request meets
    one of a task: its audit log is written in the event loop that the other one needs (3.3.2).
    """
    with ONE_AT_A_TIME:
        for _ in range(3):
            try:
                return act()
            except ApiError as error:
                if "HTTP 500" not in str(error):
                    raise
                time.sleep(1)
        return act()


def no_strays(stack: AirflowStack, within: float = 10.0) -> None:
    """Raises AssertionError unless nothing lives beside Airflow's parts. These themselves start
    processes that are nobody's child for a moment."""
    deadline = time.monotonic() + within
    while left := stack.strays():
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def held_locks(folder: Path) -> list[str]:
    """Lock files in a folder that somebody holds."""
    held = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.is_file():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.append(f"lock {path}")
        finally:
            os.close(descriptor)
    return held
