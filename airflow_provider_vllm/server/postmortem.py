"""After an unrequested end: the log and the host go in, evidence.json and diagnosis.json come out.

The log has the first word. Where it names no failure, and the supervisor itself saw what happened (a stranger on
the port, a frozen API server, a killed guard), the supervisor's own word stands.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from airflow_provider_vllm.diagnosis import evidence
from airflow_provider_vllm.diagnosis.diagnose import diagnose
from airflow_provider_vllm.diagnosis.rule import Diagnosis
from airflow_provider_vllm.server import nvml
from airflow_provider_vllm.server.checks.options import Options
from airflow_provider_vllm.server.order import Order
from airflow_provider_vllm.server.state import (
    GenerationDir,
    ServerState,
    write_json,
    write_private,
)

# A part of the time that the supervisor gives a post-mortem: a driver that hangs must not cost the diagnosis.
DRIVER_S = 5.0

# What the supervisor saw itself: group, cause, first action.
_SEEN = {
    "port_taken": (
        "environment",
        "port_in_use",
        "Use port=0 in the ServerSpec for a free port, or end what listens on this one.",
    ),
    "api_frozen": (
        "dead_process",
        "api_server_frozen",
        "Look at the host's load and memory at that time; the next start brings a new server.",
    ),
    "guard_gone": (
        "dead_process",
        "guard_killed",
        "See what kills processes on this worker (kernel log, administrators, clean-up jobs).",
    ),
    "timeout": (
        "other",
        "startup_timeout",
        "Raise startup_timeout if the log still moved at the end; else see its last line.",
    ),
}


def examine(directory: GenerationDir, order: Order, state: ServerState) -> tuple[Diagnosis, str]:
    """Collect the evidence, diagnose, and write both files; the diagnosis and its full text."""
    spec = order.spec
    port = int((state.base_url or ":0").rpartition(":")[2])
    facts = evidence.collect(
        command=order.command(port),
        environ={**os.environ, **spec.env},
        log_path=directory.log_file,
        python=None if spec.command else order.python,
        model=spec.model,
        exit_status=state.exit_status,
        uses_ray=Options.of(spec.engine_args).get("distributed_executor_backend") == "ray",
        gpus=lambda: dataclasses.asdict(nvml.read(DRIVER_S)),
    )
    evidence.write(directory.path, facts)
    found = judge(
        diagnose(directory.log_file, exit_status=state.exit_status, evidence=facts), state
    )
    text = "\n".join([found.text(), *_traceback(facts, found.process)])
    write_json(directory.diagnosis_file, found.to_json())
    write_private(directory.path / "diagnosis.txt", text + "\n")
    return found, text


def _traceback(facts: Mapping[str, Any], process: str | None) -> list[str]:
    """The first traceback of the process to blame, or of the first that has one, as lines."""
    tracebacks = facts.get("first_tracebacks")
    if not isinstance(tracebacks, list) or not tracebacks:
        return []
    chosen = next((each for each in tracebacks if each["process"] == process), tracebacks[0])
    head = f"First traceback of {chosen['process'] or 'a process without a name'}:"
    return [head, *(f"  {frame}" for frame in chosen["frames"]), f"  {chosen['exception']}"]


def judge(found: Diagnosis, state: ServerState) -> Diagnosis:
    """The log's diagnosis, or the supervisor's own word where the log names no failure. Pure."""
    if found.verdict in ("failed", "interrupted"):
        return found
    known = _SEEN.get(state.reason or "")
    explanation = f"{(state.message or 'The server ended').rstrip('.')}."
    if known is None:
        return dataclasses.replace(
            found, verdict="failed", explanation=f"{explanation} {found.explanation}"
        )
    group, cause, first_action = known
    return dataclasses.replace(
        found,
        verdict="failed",
        group=group,
        cause=cause,
        explanation=explanation[0].upper() + explanation[1:],
        first_action=first_action,
        retry_launch=True,
        confidence=0.9,
    )
