"""What a person does in the Airflow UI, done through Airflow's REST API.

Enters: the API server's address and a user's name and password. Leaves: runs, task instances,
logs and XCom values as plain Python. Every wait has a deadline and says what it last saw.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import httpx

T = TypeVar("T")
ENDED = ("success", "failed")
# An API server that is busy on a small machine answers late; that is no failure of what is tested.
REQUEST_TIMEOUT_S = 30.0
# Fields that Airflow repeats on every event of a task's log.
_SOURCE = frozenset({"timestamp", "event", "level", "logger", "filename", "lineno"})
_TASK = frozenset({"dag_id", "run_id", "task_id", "map_index", "try_number", "ti_id"})
LOG_CONTEXT = _SOURCE | _TASK


class ApiError(Exception):
    """Airflow's REST API refused a request; the message has its answer, `status` its HTTP status
    where there is one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class WaitTimedOut(AssertionError):
    """What was waited for did not happen in time; the message has what was seen last."""


@dataclass(frozen=True)
class TaskInstance:
    """One task instance as the REST API shows it; times are ISO 8601 strings, `duration` seconds,
    `rendered_fields` the templated arguments as text or JSON."""

    task_id: str
    map_index: int
    state: str | None
    try_number: int
    max_tries: int
    start_date: str | None
    end_date: str | None
    hostname: str | None
    pid: int | None
    duration: float | None
    rendered_fields: dict[str, Any]

    @property
    def name(self) -> str:
        """The task id, with the map index in brackets where the task is mapped."""
        return self.task_id if self.map_index < 0 else f"{self.task_id}[{self.map_index}]"


class AirflowClient:
    """A logged-in user of one Airflow; `say` gets a line whenever a wait sees something new."""

    def __init__(
        self, base_url: str, user: str, password: str, *, say: Callable[[str], object] = print
    ) -> None:
        self.base_url = base_url
        self._say = say
        self._http = httpx.Client(base_url=base_url, timeout=REQUEST_TIMEOUT_S, trust_env=False)
        self._login = {"username": user, "password": password}

    def close(self) -> None:
        self._http.close()

    def request(self, method: str, path: str, **kwargs: Any) -> Any:
        """Send to /api/v2 + `path`; the parsed answer (None where it is empty). Raises ApiError."""
        if "Authorization" not in self._http.headers:
            self._authenticate()
        answer = self._http.request(method, f"/api/v2{path}", **kwargs)
        if answer.is_error:
            said = f"HTTP {answer.status_code}: {answer.text[:2000]}"
            raise ApiError(f"{method} {path}: {said}", answer.status_code)
        return answer.json() if answer.content else None

    def healthy(self) -> dict[str, str | None]:
        """Status by part (`metadatabase`, `scheduler`, ...), empty while nobody answers."""
        try:
            parts = self._http.get("/api/v2/monitor/health").json()
        except (httpx.HTTPError, ValueError):
            return {}
        return {name: part.get("status") for name, part in parts.items()}

    def add_connection(self, connection_id: str, **fields: Any) -> None:
        """Make a connection; one of this name that is there already is kept."""
        body = {"connection_id": connection_id, **fields}
        try:
            self.request("POST", "/connections", json=body)
        except ApiError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise

    # DAGs and runs

    def wait_for_dag(self, dag_id: str, timeout: float = 60.0) -> None:
        """Until the DAG has been parsed; a DAG file that does not import ends the wait at once."""
        self.wait_for(lambda: self._parsed(dag_id), bool, timeout=timeout, what=f"DAG {dag_id}")

    def unpause(self, dag_id: str) -> None:
        self.request("PATCH", f"/dags/{dag_id}", json={"is_paused": False})

    def trigger(
        self,
        dag_id: str,
        conf: Mapping[str, Any] | None = None,
        *,
        run_id: str | None = None,
        logical_date: str | None = None,
    ) -> str:
        """Start a run; its run id."""
        body = {"conf": conf or {}, "logical_date": logical_date}
        if run_id is not None:
            body["dag_run_id"] = run_id
        return self.request("POST", f"/dags/{dag_id}/dagRuns", json=body)["dag_run_id"]

    def run_dag(self, dag_id: str, conf: Mapping[str, Any] | None = None, **kwargs: Any) -> str:
        """Wait for the DAG to be parsed, unpause it and start a run; its run id."""
        self.wait_for_dag(dag_id)
        self.unpause(dag_id)
        return self.trigger(dag_id, conf, **kwargs)

    def runs(self, dag_id: str) -> dict[str, str]:
        """State by run id."""
        runs = self.request("GET", f"/dags/{dag_id}/dagRuns", params={"limit": 100})["dag_runs"]
        return {run["dag_run_id"]: run["state"] for run in runs}

    def run_state(self, dag_id: str, run_id: str) -> str:
        return self.request("GET", _run(dag_id, run_id))["state"]

    def mark_run(self, dag_id: str, run_id: str, state: str) -> None:
        """Mark the whole run `success`, `failed` or `queued`."""
        self.request("PATCH", _run(dag_id, run_id), json={"state": state})

    def finish(self, dag_id: str, run_id: str, timeout: float) -> str:
        """Wait until the run has ended; `success` or `failed`."""
        self.wait_for(
            lambda: {"run": self.run_state(dag_id, run_id), **self.states(dag_id, run_id)},
            lambda states: states["run"] in ENDED,
            timeout=timeout,
            what=f"end of {dag_id} {run_id}",
        )
        return self.run_state(dag_id, run_id)

    # Task instances

    def tasks(self, dag_id: str, run_id: str) -> list[TaskInstance]:
        path = f"{_run(dag_id, run_id)}/taskInstances"
        found = self.request("GET", path, params={"limit": 1000})["task_instances"]
        fields = TaskInstance.__dataclass_fields__
        return [TaskInstance(**{name: each[name] for name in fields}) for each in found]

    def task(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> TaskInstance:
        for each in self.tasks(dag_id, run_id):
            if (each.task_id, each.map_index) == (task_id, map_index):
                return each
        raise KeyError(f"no task instance {task_id} [{map_index}] in {dag_id} {run_id}")

    def states(self, dag_id: str, run_id: str) -> dict[str, str | None]:
        """State by task name, as in `TaskInstance.name`."""
        return {each.name: each.state for each in self.tasks(dag_id, run_id)}

    def tries(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> list[dict]:
        """Every try so far, in order, as the REST API shows them (earlier tries too)."""
        index = f"/{map_index}" if map_index >= 0 else ""
        path = f"{_run(dag_id, run_id)}/taskInstances/{task_id}{index}/tries"
        return sorted(
            self.request("GET", path)["task_instances"], key=lambda each: each["try_number"]
        )

    def log(
        self, dag_id: str, run_id: str, task_id: str, try_number: int = 1, map_index: int = -1
    ) -> str:
        """The log of one try as text: a line for each event, then its exceptions, one a line."""
        events = self.log_events(dag_id, run_id, task_id, try_number, map_index)
        return "\n".join(_line(event) for event in events)

    def log_events(
        self, dag_id: str, run_id: str, task_id: str, try_number: int = 1, map_index: int = -1
    ) -> list[dict[str, Any]]:
        """The events of one try so far, each with `event` (its text) and often `level`, `logger`."""
        path = f"{_run(dag_id, run_id)}/taskInstances/{task_id}/logs/{try_number}"
        params: dict[str, Any] = {"map_index": map_index, "full_content": True}
        accept = {"Accept": "application/json"}  # a stream of lines without it
        content = self.request("GET", path, params=params, headers=accept)["content"]
        return [{"event": each} if isinstance(each, str) else each for each in content]

    def clear(
        self,
        dag_id: str,
        run_id: str,
        task_ids: Sequence[str | tuple[str, int]],
        *,
        only_failed: bool = False,
        upstream: bool = False,
        downstream: bool = False,
    ) -> list[str]:
        """Clear tasks so that they run again; the names of all that were cleared."""
        body = {
            "dry_run": False,
            "dag_run_id": run_id,
            "task_ids": list(task_ids),
            "only_failed": only_failed,
            "include_upstream": upstream,
            "include_downstream": downstream,
            "reset_dag_runs": True,
        }
        cleared = self.request("POST", f"/dags/{dag_id}/clearTaskInstances", json=body)
        return [each["task_id"] for each in cleared["task_instances"]]

    def mark(self, dag_id: str, run_id: str, task_id: str, state: str, map_index: int = -1) -> None:
        """Mark a task instance `success`, `failed` or `skipped`."""
        index = f"/{map_index}" if map_index >= 0 else ""
        path = f"{_run(dag_id, run_id)}/taskInstances/{task_id}{index}"
        self.request("PATCH", path, json={"new_state": state})

    def xcom(
        self,
        dag_id: str,
        run_id: str,
        task_id: str,
        key: str = "return_value",
        map_index: int = -1,
    ) -> Any:
        """An XCom value as Python. Raises ApiError where there is none."""
        path = f"{_run(dag_id, run_id)}/taskInstances/{task_id}/xcomEntries/{key}"
        params: dict[str, Any] = {"map_index": map_index, "stringify": False}
        return self.request("GET", path, params=params)["value"]

    # Waiting

    def wait_for(
        self,
        look: Callable[[], T],
        until: Callable[[T], bool],
        *,
        timeout: float,
        what: str,
        every: float = 0.5,
        say: Callable[[str], object] | None = None,
    ) -> T:
        """Look every `every` seconds until `until` holds; the value that did. Raises WaitTimedOut.

        `say` gets a line whenever what is seen changes; this client's own where it is None. A
        request that fails on the way (the API server may be restarting) is looked at as "not yet";
        the last failure is in the message when time runs out.
        """
        began = time.monotonic()
        seen: object = None
        while True:
            try:
                value = look()
            except httpx.HTTPError as error:
                now: object = f"no answer: {error!r}"
            else:
                if until(value):
                    return value
                now = value
            elapsed = time.monotonic() - began
            if now != seen:
                (say or self._say)(f"{what}, {elapsed:.1f} s: {now}")
                seen = now
            if elapsed > timeout:
                raise WaitTimedOut(f"{what}: not within {timeout:.0f} s; last seen: {seen}")
            time.sleep(every)

    def _authenticate(self) -> None:
        answer = self._http.post("/auth/token", json=self._login)
        if answer.is_error:
            raise ApiError(f"login: HTTP {answer.status_code}: {answer.text[:500]}")
        self._http.headers["Authorization"] = f"Bearer {answer.json()['access_token']}"

    def _parsed(self, dag_id: str) -> bool:
        errors = self.request("GET", "/importErrors")["import_errors"]
        for error in errors:
            if dag_id in str(error["filename"]):
                raise ApiError(f"{error['filename']} does not import:\n{error['stack_trace']}")
        answer = self.request("GET", "/dags", params={"dag_id_pattern": dag_id, "limit": 100})
        return dag_id in [dag["dag_id"] for dag in answer["dags"]]


def _run(dag_id: str, run_id: str) -> str:
    return f"/dags/{dag_id}/dagRuns/{run_id}"


def _line(event: dict[str, Any]) -> str:
    head = f"{event.get('timestamp') or ''} {event.get('level') or ''} {event['event']}".strip()
    rest = {name: value for name, value in event.items() if value and name not in LOG_CONTEXT}
    causes = rest.pop("error_detail", [])
    lines = [f"{head} {json.dumps(rest)}" if rest else head]
    lines += [f"{cause['exc_type']}: {cause['exc_value']}" for cause in causes]
    return "\n".join(lines)
