"""Running one cell: a DAG run is started, one of its processes is hit, and what came of it is measured.

Enters: a running Airflow and a Cell. Leaves: an Outcome. Nothing here judges; the test does.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_provider_vllm.server import temp
from airflow_provider_vllm.server.locks import is_held
from airflow_provider_vllm.server.processes import (
    ProcessId,
    every_process,
    identity_of,
    read_stat,
    tree_of,
)
from airflow_provider_vllm.server.state import GenerationDir, ServerState, StateRoot
from scripts.airflow_stack import AirflowStack
from tests.chaos.cells import ONE, Cell
from tests.leftovers import in_use, segments

ROWS = 300
LEASE_S = 25.0
STARTUP_S = 150.0
# A frozen process of Airflow's is woken again after this; it may never be, which no batch survives.
WAKE_S = 20.0
MOMENT_S = 240.0
RUN_S = 420.0
# The names that vLLM gives its processes, cut at 15 characters by the kernel.
ENGINE_CORE, WORKER = "VLLM::EngineCor", "VLLM::Worker"


@dataclass(frozen=True)
class Outcome:
    """What one cell came to. `gone` is seconds from the fault until no process of the server that was hit was
    left, `all_gone` from the end of the run until none of any server was."""

    cell: str
    state: str
    tries: int
    gone: float
    all_gone: float
    lost: int
    doubled: int
    locks: int
    segments: int
    temporary: int
    seconds: float
    in_order: bool
    counted: dict[str, int]


class Run:
    """One disturbed DAG run."""

    def __init__(self, stack: AirflowStack, root: StateRoot, folder: Path, cell: Cell) -> None:
        self.stack, self.root, self.cell = stack, root, cell
        self.input, self.output = folder / "rows.jsonl", folder / "answers.jsonl"
        folder.mkdir(parents=True)
        self.input.write_text("".join(_row(number) for number in range(ROWS)))
        self.earlier = {directory.path for directory in root.every_generation()}
        self.segments = segments()
        self.run_id = ""

    def disturb(self) -> Outcome:
        client, cell = self.stack.client, self.cell
        began = time.monotonic()
        conf = {"input": str(self.input), "output": str(self.output)}
        self.run_id = client.run_dag(cell.dag, conf)
        _until(self._moment, MOMENT_S, f"the moment {cell.moment!r}")
        target = _until(self._target, 30, f"the process {cell.target!r}")
        hit = self._newest()
        target.signal(cell.fault)
        faulted = time.monotonic()
        gone = self._follow(target, hit, faulted)
        state = client.run_state(cell.dag, self.run_id)
        ended = time.monotonic()
        _until(lambda: not self._left(), LEASE_S + 60, "the end of every server")
        answered = self._answered()
        counts = Counter(answered)
        return Outcome(
            cell=cell.name,
            state=state,
            tries=client.task(cell.dag, self.run_id, "work").try_number,
            gone=gone,
            all_gone=time.monotonic() - ended,
            lost=ROWS - len(counts),
            doubled=sum(count - 1 for count in counts.values()),
            locks=self._locks_held(),
            segments=len(self._segments_left()),
            temporary=sum(temp.folder_of(_nonce(each)).exists() for each in self._directories()),
            seconds=time.monotonic() - began,
            in_order=answered == sorted(answered, key=_number),
            counted=self._manifest().get("outcomes", {}),
        )

    # -- moments and targets -----------------------------------------------------------------

    def _directories(self) -> list[GenerationDir]:
        return [each for each in self.root.every_generation() if each.path not in self.earlier]

    def _newest(self) -> GenerationDir | None:
        found = self._directories()
        return max(found, key=lambda each: each.path.stat().st_ctime) if found else None

    def _state(self) -> ServerState | None:
        newest = self._newest()
        return newest.read() if newest else None

    def _moment(self) -> bool:
        moment, state = self.cell.moment, self._state()
        if state is None:
            return False
        if moment == "launch":
            return state.guard is not None
        if moment == "load":
            return state.state == "loading" and any(self._named(state, WORKER))
        if moment == "ready":
            return state.state == "ready"
        if moment == "mid-batch":
            return state.state == "ready" and self._journal_size() > 20_000
        states = self.stack.client.states(self.cell.dag, self.run_id)
        return states.get("stop_server") == "running" or state.state == "draining"

    def _journal_size(self) -> int:
        folder = Path(f"{self.output}.journal")
        with contextlib.suppress(FileNotFoundError):
            return sum(path.stat().st_size for path in folder.iterdir())
        return 0

    def _target(self) -> ProcessId | None:
        state = self._state()
        name = self.cell.target
        if name == "scheduler":
            return identity_of(self.stack.pids["scheduler"])
        if name in ("task", "airflow supervisor"):
            return self._task_process(parent=name != "task")
        if state is None:
            return None
        if name in ("engine core", "worker"):
            return next(
                iter(self._named(state, ENGINE_CORE if name == "engine core" else WORKER)), None
            )
        return {"supervisor": state.supervisor, "guard": state.guard, "api server": state.engine}[
            name
        ]

    def _named(self, state: ServerState, name: str) -> list[ProcessId]:
        session = state.engine.pid if state.engine else -1
        return [
            each.identity
            for each in every_process()
            if each.session == session and each.name == name
        ]

    def _task_process(self, parent: bool) -> ProcessId | None:
        tasks = self.stack.client.tasks(self.cell.dag, self.run_id)
        running = next((each for each in tasks if each.state == "running" and each.pid), None)
        stat = read_stat(running.pid) if running and running.pid else None
        if stat is None:
            return None
        return identity_of(stat.parent) if parent else stat.identity

    # -- afterwards --------------------------------------------------------------------------

    def _follow(self, target: ProcessId, hit: GenerationDir | None, faulted: float) -> float:
        """Wait for the end of the run, waking and restarting what a person would; seconds until the server that
        was hit was gone."""
        client, cell = self.stack.client, self.cell
        gone: float | None = None
        woken = cell.fault != signal.SIGSTOP or not _belongs_to_airflow(cell.target)
        restarted = cell.target != "scheduler" or cell.fault == signal.SIGSTOP
        while True:
            now = time.monotonic() - faulted
            if gone is None and hit is not None and not _alive(hit):
                gone = now
            if not woken and now > WAKE_S:
                target.signal(signal.SIGCONT)
                woken = True
            if not restarted and not target.alive:
                self.stack.start_part("scheduler")
                restarted = True
            if woken and client.run_state(cell.dag, self.run_id) in ("success", "failed"):
                break
            if now > RUN_S:
                raise AssertionError(
                    f"{cell.name}: not ended after {RUN_S:g} s: {client.states(cell.dag, self.run_id)}"
                )
            time.sleep(0.3)
        while gone is None and hit is not None:
            if not _alive(hit):
                gone = time.monotonic() - faulted
            if time.monotonic() - faulted > RUN_S + LEASE_S + 60:
                raise AssertionError(f"{cell.name}: the server that was hit still lives")
            time.sleep(0.1)
        return gone or 0.0

    def _left(self) -> list[GenerationDir]:
        return [each for each in self._directories() if _alive(each)]

    def _answered(self) -> list[str]:
        if not self.output.exists():
            return []
        return [json.loads(line)["custom_id"] for line in self.output.read_text().splitlines()]

    def _manifest(self) -> dict[str, Any]:
        path = Path(f"{self.output}.manifest.json")
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def _segments_left(self) -> set[str]:
        """New segments that nobody uses: those of other programs on this machine are in use."""
        new = segments() - self.segments
        return new - in_use(new)

    def _locks_held(self) -> int:
        files = [*self.root.locks.iterdir(), *self.root.servers.glob("*/lock")]
        return sum(is_held(path) for path in files)


def _nonce(directory: GenerationDir) -> str:
    return directory.path.name.partition("-")[2]


def _number(custom_id: str) -> int:
    return int(custom_id.removeprefix("r"))


def _row(number: int) -> str:
    body = {"prompt": f"row {number}: once upon a time"}
    row = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(row) + "\n"


def _belongs_to_airflow(target: str) -> bool:
    return target in ("task", "airflow supervisor", "scheduler")


def _alive(directory: GenerationDir) -> bool:
    """Whether any process of this start lives: recorded, in its session, or writing to its log."""
    state = directory.read()
    if state is None:
        return False
    recorded = [each for each in (state.supervisor, state.guard, state.engine, *state.tree) if each]
    session = state.engine.pid if state.engine else None
    return bool(tree_of(recorded, session, [directory.log_file]))


def _until(look: Callable[[], object], timeout: float, what: str):  # type: ignore[no-untyped-def]
    """The first true value of `look`, asked every 50 ms."""
    deadline = time.monotonic() + timeout
    while not (found := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout:g} s")
        time.sleep(0.05)
    return found


__all__ = ["LEASE_S", "ONE", "STARTUP_S", "Outcome", "Run"]
