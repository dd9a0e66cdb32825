"""How many rows a server that refuses some is asked."""

from __future__ import annotations

import math

import pytest

from airflow_provider_vllm.batch.refusals import Refusals, pause


def test_without_a_refusal_it_bounds_nothing() -> None:
    refusals = Refusals(0.0)
    refusals.answered(1000)
    assert refusals.size == math.inf
    assert refusals.most(256, 0) == 256
    assert refusals.most(256, 256) == 0, "every place is kept by a row that pauses"


@pytest.mark.parametrize("capacity", [1, 3, 24, 200])
def test_a_server_of_fixed_capacity_is_kept_full_and_refuses_few(capacity: int) -> None:
    """In rounds: all that may go are sent, those above its capacity are refused, the others answered."""
    refusals = Refusals(0.0)
    answered = refused = 0
    for _ in range(200):
        asked = refusals.most(256, 0)
        good = min(asked, capacity)
        refusals.answered(good)
        if asked > capacity:
            refusals.refused(capacity)
        answered, refused = answered + good, refused + asked - good
    refused -= 256 - capacity  # of the first round
    assert answered == 200 * capacity
    assert refused <= 0.1 * answered + 50


def test_after_a_storm_it_grows_back() -> None:
    refusals = Refusals(0.0)
    refusals.refused(0)
    rounds = 0
    while (asked := refusals.most(256, 0)) < 256:
        refusals.answered(asked)
        rounds += 1
    assert 40 < rounds < 120


@pytest.mark.parametrize(("waited", "asked"), [(0.0, 0.0), (600.0, 0.0), (1.0, 30.0), (1.0, 1e9)])
def test_a_pause_grows_and_is_at_least_what_the_server_asks_for(
    waited: float, asked: float
) -> None:
    shortest, longest = (pause(waited, asked, jitter=jitter) for jitter in (0.0, 0.999))
    assert 0.2 < shortest <= longest <= 120.0
    assert shortest >= min(asked, 120.0)
    assert shortest > pause(0.0, 0.0, jitter=0.999) or not (waited or asked)
