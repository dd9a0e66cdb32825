"""Waiting for a GPU without holding the worker slot.

A start that finds no free GPU is rescheduled: else run B's start would hold the slot that run A's batch
needs to finish and to free the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow_provider_vllm.exceptions import NoFreeGpu

if TYPE_CHECKING:
    from airflow_provider_vllm.spec import ServerSpec

FIRST_WAIT_S, LONGEST_WAIT_S = 15.0, 120.0


def next_look(waited: float, limit: float) -> float | None:
    """Seconds until the next look after `waited` seconds; None when `limit` seconds are over. Pure."""
    if waited >= limit:
        return None
    return min(max(FIRST_WAIT_S, waited / 4), LONGEST_WAIT_S, limit - waited + 1)


def reschedule(
    error: NoFreeGpu, spec: ServerSpec, context: Mapping[str, Any], log: Any
) -> NoReturn:
    """Give the slot back and look again later, or raise `error` when gpu_wait_timeout is over."""
    from airflow.providers.common.compat.sdk import timezone
    from airflow.sdk.exceptions import AirflowRescheduleException

    now = timezone.utcnow()
    first = context["ti"].get_first_reschedule_date(context)
    waited = (now - first).total_seconds() if first else 0.0
    pause = next_look(waited, spec.gpu_wait_timeout)
    if pause is None:
        raise NoFreeGpu(
            f"{error}\nNo GPU became free within gpu_wait_timeout = {spec.gpu_wait_timeout:g} s. "
            "`airflow vllm servers` on the worker lists the servers that hold them."
        ) from error
    log.info(
        "no free GPU: %s\nThe worker slot is given back; next look in %.0f s, %.0f of %.0f s waited.",
        error,
        pause,
        waited,
        spec.gpu_wait_timeout,
    )
    raise AirflowRescheduleException(now + timedelta(seconds=pause))
