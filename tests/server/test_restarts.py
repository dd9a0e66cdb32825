"""How often a lost server is started again."""

from __future__ import annotations

from airflow_provider_vllm.server.restarts import SERVED_S, Restarts


def test_deaths_in_a_row_are_counted() -> None:
    restarts = Restarts(2)
    for now in (10.0, 20.0):
        restarts.serves(now)
        assert restarts.take(now + 5)
    restarts.serves(30.0)
    assert not restarts.take(35.0)
    assert not Restarts(0).take(1.0)


def test_a_server_that_has_served_long_enough_counts_as_a_new_one() -> None:
    restarts, now = Restarts(1), 0.0
    for _ in range(10):
        restarts.serves(now)
        now += SERVED_S
        assert restarts.take(now)
    restarts.serves(now)
    assert not restarts.take(now + SERVED_S - 1)


def test_a_death_that_a_row_is_to_blame_for_is_not_counted() -> None:
    restarts = Restarts(1)
    assert all(restarts.take(float(now), by_row=True) for now in range(5))
    assert restarts.take(6.0)
    assert not restarts.take(7.0)
    assert not Restarts(0).take(1.0, by_row=True), "never started again means never"


def test_a_start_that_never_served_is_no_new_one() -> None:
    restarts = Restarts(1)
    assert restarts.take(0.0)
    assert not restarts.take(10 * SERVED_S)
