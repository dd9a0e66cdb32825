"""Shows a run of a DAG as it goes: states of its tasks, and what this provider writes to their logs.

Enters: a client and a run. Leaves: lines, through `say`, as things happen; the run's end state.
"""

from __future__ import annotations

from collections.abc import Callable

from scripts.airflow_client import ENDED, AirflowClient, TaskInstance

# Loggers of the operators, sensors and the package behind them all have its name in theirs.
OUR_LOGGERS = "airflow_provider_vllm"


class Follower:
    """Remembers what of one run has been shown."""

    def __init__(
        self, client: AirflowClient, dag_id: str, run_id: str, say: Callable[[str], object]
    ) -> None:
        self._client = client
        self._run = (dag_id, run_id)
        self._say = say
        self._states: dict[str, str | None] = {}
        self._lines: dict[tuple[str, int], int] = {}

    def finish(self, timeout: float) -> str:
        """Show all until the run has ended; `success` or `failed`. Raises WaitTimedOut."""
        self._client.wait_for(
            self._look,
            lambda state: state in ENDED,
            timeout=timeout,
            what=" ".join(self._run),
            every=1.0,
            say=lambda _: None,
        )
        return self._client.run_state(*self._run)

    def _look(self) -> str:
        state = self._client.run_state(*self._run)
        for task in self._client.tasks(*self._run):
            if task.start_date is not None:
                self._show_log(task)
            if task.state != self._states.get(task.name):
                self._states[task.name] = task.state
                self._say(f"  {task.name}: {task.state} (try {max(task.try_number, 1)})")
        return state

    def _show_log(self, task: TaskInstance) -> None:
        shown = (task.name, task.try_number)
        events = self._client.log_events(
            *self._run, task.task_id, max(task.try_number, 1), task.map_index
        )
        for event in events[self._lines.get(shown, 0) :]:
            if OUR_LOGGERS in str(event.get("logger")):
                self._say(f"  {task.name} | {event['event']}")
        self._lines[shown] = len(events)
