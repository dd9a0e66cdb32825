"""The cells of the chaos test: which fault hits which process at which moment of which DAG."""

from __future__ import annotations

import signal
from dataclasses import dataclass

KILL, TERM, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP
ONE, SHARED = "chaos_one_task", "chaos_shared"

TARGETS = (
    "task",
    "airflow supervisor",
    "supervisor",
    "guard",
    "api server",
    "engine core",
    "worker",
    "scheduler",
)
MOMENTS = ("launch", "load", "ready", "mid-batch", "stopping")


@dataclass(frozen=True)
class Cell:
    """One disturbance. `short` cells run in `make test`."""

    fault: signal.Signals
    target: str
    moment: str
    dag: str
    short: bool = False

    @property
    def name(self) -> str:
        kind = "one task" if self.dag == ONE else "shared"
        return f"{self.fault.name} {self.target}, {self.moment} ({kind})"


CELLS = (
    Cell(KILL, "task", "mid-batch", ONE, short=True),
    Cell(KILL, "airflow supervisor", "mid-batch", ONE),
    Cell(KILL, "supervisor", "mid-batch", SHARED, short=True),
    Cell(KILL, "guard", "mid-batch", SHARED),
    Cell(KILL, "api server", "mid-batch", ONE, short=True),
    Cell(KILL, "engine core", "mid-batch", SHARED),
    Cell(KILL, "worker", "mid-batch", ONE),
    Cell(KILL, "scheduler", "mid-batch", SHARED),
    Cell(TERM, "task", "mid-batch", ONE),
    Cell(TERM, "airflow supervisor", "mid-batch", ONE),
    Cell(TERM, "supervisor", "mid-batch", ONE),
    Cell(TERM, "guard", "mid-batch", ONE),
    Cell(TERM, "api server", "mid-batch", SHARED),
    Cell(TERM, "engine core", "mid-batch", ONE),
    Cell(TERM, "worker", "mid-batch", ONE),
    Cell(TERM, "scheduler", "mid-batch", ONE),
    Cell(STOP, "task", "mid-batch", ONE),
    Cell(STOP, "airflow supervisor", "mid-batch", ONE),
    Cell(STOP, "supervisor", "mid-batch", ONE),
    Cell(STOP, "guard", "mid-batch", SHARED),
    Cell(STOP, "api server", "mid-batch", ONE),
    Cell(STOP, "engine core", "mid-batch", ONE, short=True),
    Cell(STOP, "worker", "mid-batch", SHARED),
    Cell(STOP, "scheduler", "mid-batch", SHARED),
    Cell(KILL, "supervisor", "launch", ONE),
    Cell(KILL, "guard", "launch", SHARED),
    Cell(TERM, "task", "launch", ONE),
    Cell(KILL, "api server", "load", ONE, short=True),
    Cell(KILL, "engine core", "load", SHARED),
    Cell(KILL, "task", "load", ONE),
    Cell(TERM, "api server", "load", ONE),
    Cell(STOP, "worker", "load", ONE),
    Cell(KILL, "scheduler", "load", SHARED),
    Cell(KILL, "worker", "ready", SHARED),
    Cell(TERM, "supervisor", "ready", SHARED),
    Cell(KILL, "task", "stopping", SHARED),
    Cell(KILL, "supervisor", "stopping", SHARED),
    Cell(STOP, "api server", "stopping", SHARED),
)
