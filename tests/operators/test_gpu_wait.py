"""Waiting for a GPU gives the worker slot back, and ends with gpu_wait_timeout."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
from airflow.providers.common.compat.sdk import timezone
from airflow.sdk.exceptions import AirflowRescheduleException

from airflow_provider_vllm.exceptions import NoFreeGpu
from airflow_provider_vllm.operators.gpu_wait import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    next_look,
    reschedule,
)
from tests.airflow_unit import FakeTaskInstance, context_of
from tests.server.conftest import fake_spec


def test_looks_grow_apart_and_never_pass_the_limit() -> None:
    assert next_look(0, 3600) == FIRST_WAIT_S
    assert next_look(200, 3600) == 50
    assert next_look(3000, 3600) == LONGEST_WAIT_S
    assert next_look(3590, 3600) == 11
    assert next_look(3600, 3600) is None
    assert next_look(0, 0) is None


def test_the_slot_is_given_back() -> None:
    before = timezone.utcnow()
    with pytest.raises(AirflowRescheduleException) as caught:
        reschedule(NoFreeGpu("all taken"), fake_spec(), context_of(), logging.getLogger())
    wait = caught.value.reschedule_date - before
    assert timedelta(seconds=FIRST_WAIT_S) <= wait < timedelta(seconds=FIRST_WAIT_S + 5)


def test_after_gpu_wait_timeout_it_is_an_error_that_says_where_to_look() -> None:
    first = timezone.utcnow() - timedelta(seconds=61)
    context = context_of(FakeTaskInstance(first_reschedule=first))
    with pytest.raises(NoFreeGpu, match=r"(?s)all taken.*gpu_wait_timeout = 60 s.*vllm servers"):
        reschedule(
            NoFreeGpu("all taken"), fake_spec(gpu_wait_timeout=60), context, logging.getLogger()
        )
