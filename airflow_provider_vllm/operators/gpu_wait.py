"""Waiting for a GPU without holding the worker slot.

A task that finds no free GPU is rescheduled: else run B's start would hold the slot that run A's batch
needs to finish and to free the GPU. The same when a batch has to start its server again and another has
taken the GPU: its rows are kept, and it goes on when there is one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn

from airflow_provider_vllm.exceptions import NoFreeGpu

FIRST_WAIT_S, LONGEST_WAIT_S = 15.0, 120.0
KEY = "gpu_wait"


def next_look(waited: float, limit: float) -> float | None:
    """Seconds until the next look after `waited` seconds; None when `limit` seconds are over. Pure."""
    if waited >= limit:
        return None
    return min(max(FIRST_WAIT_S, waited / 4), LONGEST_WAIT_S, limit - waited + 1)


def reschedule(
    error: NoFreeGpu, limit: float, context: Mapping[str, Any], log: Any, *, anew: bool = False
) -> NoReturn:
    """Give the slot back and look again later, or raise `error` when `limit` seconds are over.

    `anew`: this run of the task had a GPU and lost it, so that its wait begins now.
    """
    from airflow.providers.common.compat.sdk import timezone
    from airflow.sdk.exceptions import AirflowRescheduleException

    waited = time.time() - _began(context, time.time(), anew)
    pause = next_look(waited, limit)
    if pause is None:
        raise NoFreeGpu(
            f"{error}\nNo GPU became free within gpu_wait_timeout = {limit:g} s. "
            "`airflow vllm servers` on the worker lists the servers that hold them."
        ) from error
    log.info(
        "no free GPU: %s\nThe worker slot is given back; next look in %.0f s, %.0f of %.0f s waited.",
        error,
        pause,
        waited,
        limit,
    )
    raise AirflowRescheduleException(timezone.utcnow() + timedelta(seconds=pause))


def _began(context: Mapping[str, Any], now: float, anew: bool) -> float:
    """When this wait began, in seconds since the epoch: kept with the task instance, for this try."""
    store, number = context["task_state_store"], context["ti"].try_number
    kept = store.get(KEY)
    if not anew and isinstance(kept, Mapping) and kept.get("try") == number:
        return float(kept["began"])
    store.set(KEY, {"try": number, "began": now})
    return now
