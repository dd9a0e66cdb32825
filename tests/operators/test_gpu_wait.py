"""Waiting for a GPU gives the worker slot back, and ends with gpu_wait_timeout."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import timezone
from airflow.sdk.exceptions import AirflowRescheduleException

from airflow_provider_vllm.exceptions import NoFreeGpu
from airflow_provider_vllm.operators.gpu_wait import (
    FIRST_WAIT_S,
    KEY,
    LONGEST_WAIT_S,
    next_look,
    reschedule,
)
from tests.airflow_unit import FakeTaskInstance, context_of


def test_looks_grow_apart_and_never_pass_the_limit() -> None:
    assert next_look(0, 3600) == FIRST_WAIT_S
    assert next_look(200, 3600) == 50
    assert next_look(3000, 3600) == LONGEST_WAIT_S
    assert next_look(3590, 3600) == 11
    assert next_look(3600, 3600) is None
    assert next_look(0, 0) is None


def pause(context: Any, limit: float = 3600, *, anew: bool = False) -> float:
    """Seconds until the next look; raises NoFreeGpu when the wait is over."""
    with pytest.raises(AirflowRescheduleException) as caught:
        reschedule(NoFreeGpu("all taken"), limit, context, logging.getLogger(), anew=anew)
    return (caught.value.reschedule_date - timezone.utcnow()).total_seconds()


def waited(ti: FakeTaskInstance, seconds: float) -> None:
    """As if the wait that is going on had begun so much earlier."""
    ti.store[KEY]["began"] -= seconds


def test_the_slot_is_given_back_and_the_looks_grow_apart() -> None:
    ti = FakeTaskInstance()
    assert pause(context_of(ti)) == pytest.approx(FIRST_WAIT_S, abs=1)
    waited(ti, 200)
    assert pause(context_of(ti)) == pytest.approx(50, abs=1)


def test_after_gpu_wait_timeout_it_is_an_error_that_says_where_to_look() -> None:
    ti = FakeTaskInstance()
    pause(context_of(ti))
    waited(ti, 61)
    with pytest.raises(NoFreeGpu, match=r"(?s)all taken.*gpu_wait_timeout = 60 s.*vllm servers"):
        reschedule(NoFreeGpu("all taken"), 60, context_of(ti), logging.getLogger())


def test_each_wait_is_counted_from_its_own_beginning() -> None:
    ti = FakeTaskInstance()
    pause(context_of(ti), 60)
    waited(ti, 7200)  # it got one, and worked for two hours
    assert pause(context_of(ti), 60, anew=True) == pytest.approx(FIRST_WAIT_S, abs=1)
    waited(ti, 40)
    assert pause(context_of(ti), 60) == pytest.approx(FIRST_WAIT_S, abs=1)  # the same wait
    waited(ti, 7200)
    ti.try_number = 2
    assert pause(context_of(ti), 60) == pytest.approx(FIRST_WAIT_S, abs=1)
