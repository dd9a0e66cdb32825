"""After an unrequested end: the log and the host go in, diagnosis.json and evidence.json come out."""

from __future__ import annotations

from typing import Any

from airflow_provider_vllm.diagnosis.diagnose import diagnose
from airflow_provider_vllm.server.order import Order
from airflow_provider_vllm.server.state import GenerationDir, ServerState, write_json


def examine(directory: GenerationDir, order: Order, state: ServerState) -> dict[str, Any]:
    """Collect the evidence, diagnose, write both files; the diagnosis as JSON values."""
    found = diagnose(directory.log_file, exit_status=state.exit_status).to_json()
    write_json(directory.diagnosis_file, found)
    return found
