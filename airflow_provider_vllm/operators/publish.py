"""Where a diagnosis goes when a task fails: the task's log in full, XCom key `diagnosis` as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_provider_vllm.exceptions import VllmError, server_failure


def publish(error: VllmError, context: Mapping[str, Any], log: Any) -> None:
    """To be called before the error is raised on: its message ends the log, in short form."""
    failure = server_failure(error)
    if failure is None:
        return
    if failure.report:
        log.error("Diagnosis of the server's failure:\n%s", failure.report)
    if failure.diagnosis:
        context["ti"].xcom_push(key="diagnosis", value=failure.diagnosis)
