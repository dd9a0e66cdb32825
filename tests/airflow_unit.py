"""What an operator needs of Airflow when no scheduler runs it.

Enters: nothing. Leaves: a context as `execute()` gets it, with a task instance that keeps XComs, and DAGs
in the form that Airflow stores and shows. Importing this module first gives Airflow a home of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from typing import Any

# Before the first import of Airflow, which would make ~/airflow otherwise.
if "AIRFLOW_HOME" not in os.environ:
    os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="airflow-unit-")
    atexit.register(shutil.rmtree, os.environ["AIRFLOW_HOME"], True)


class FakeStore(dict[str, Any]):
    """The `task_state_store` of a context: it stays with a task instance over its tries."""

    def set(self, key: str, value: Any) -> None:
        self[key] = json.loads(json.dumps(value))


@dataclass
class FakeTaskInstance:
    """The parts of a RuntimeTaskInstance that the operators use."""

    dag_id: str = "some_dag"
    run_id: str = "some_run"
    task_id: str = "some_task"
    map_index: int = -1
    try_number: int = 1
    xcoms: dict[str, Any] = field(default_factory=dict)
    store: FakeStore = field(default_factory=FakeStore)

    def xcom_push(self, key: str, value: Any) -> None:
        self.xcoms[key] = json.loads(json.dumps(value))


def context_of(ti: FakeTaskInstance | None = None, **more: Any) -> Any:
    """A context with what the operators read of it."""
    from airflow.sdk.execution_time.context import OutletEventAccessors

    ti = ti or FakeTaskInstance()
    accessors = {"outlet_events": OutletEventAccessors(), "task_state_store": ti.store}
    return {"ti": ti, **accessors, **more}


def stored(dag: Any) -> str:
    """A DAG as Airflow stores it for scheduler and UI: JSON text."""
    from airflow.serialization.serialized_objects import DagSerialization

    return json.dumps(DagSerialization.to_dict(dag))


def shown(task: Any) -> dict[str, Any]:
    """The rendered templates of a task as the UI shows them."""
    from airflow.sdk.execution_time.task_runner import _serialize_rendered_fields

    return _serialize_rendered_fields(task)
