"""How many rows a server that refuses some is asked at once, and how long a row waits."""

from __future__ import annotations

import math
import random

import pytest

from airflow_provider_vllm.batch.refusals import LONGEST, LONGEST_ASKED, PROBE_S, Refusals, pause
from airflow_provider_vllm.batch.row import Row


def a_row() -> Row:
    return Row(0, "a", "/v1/chat/completions", b"{}", b"0" * 16)


def test_without_a_refusal_nothing_is_bounded() -> None:
    refusals = Refusals(0.0)
    refusals.answered(1000)
    assert refusals.size == math.inf
    assert refusals.most(256, 0, 1.0) == 256


@pytest.mark.parametrize("capacity", [16, 24, 100, 200])
def test_a_server_of_fixed_capacity_is_kept_full_and_refuses_a_third_at_most(capacity: int) -> None:
    """In rounds: all that may go are sent, those above its capacity are refused, the others answered."""
    refusals = Refusals(0.0)
    answered = refused = 0
    for _ in range(200):
        asked = refusals.most(256, 0, 1.0)
        good = min(asked, capacity)
        refusals.answered(good)
        if asked > good:
            refusals.refused(asked - good, 256)
        answered, refused = answered + good, refused + asked - good
    assert answered > 199 * capacity
    assert refused <= answered / 2 + 256
    assert (refusals.pressed > 0) is (capacity < 192)


@pytest.mark.parametrize(("part", "kept"), [(0.05, 0.9), (0.3, 0.7)])
def test_refusals_whatever_the_load_do_not_slow_it_down(part: float, kept: float) -> None:
    """One busy replica of three, for one."""
    refusals, chance = Refusals(0.0), random.Random(1)
    asked = 0
    for _ in range(200):
        now = refusals.most(64, 0, 1.0)
        refused = sum(chance.random() < part for _ in range(now))
        refusals.answered(now - refused)
        if refused:
            refusals.refused(refused, 64)
        asked += now
    assert asked > kept * 200 * 64


def test_one_row_that_is_always_refused_presses_nobody() -> None:
    refusals = Refusals(0.0)
    for _ in range(100):
        refusals.refused(1, 256)
        refusals.answered(20)
    assert refusals.most(256, 0, 1.0) >= 255
    assert refusals.pressed == 0


def test_after_a_storm_it_grows_back_in_a_few_rounds() -> None:
    refusals = Refusals(0.0)
    refusals.refused(1000, 256)
    rounds = 0
    while (asked := refusals.most(256, 0, 1.0)) < 256:
        refusals.answered(asked)
        rounds += 1
    assert rounds < 10


def test_where_nothing_is_answered_pausing_rows_keep_their_places() -> None:
    refusals, row = Refusals(5.0), a_row()
    assert refusals.waited(row, 10.0) == 0.0
    assert refusals.most(8, 3, 10.1) == 5
    assert refusals.most(8, 8, 10.1) == 0
    assert refusals.most(8, 8, 10.0 + PROBE_S) == 1, "they may be wrong, and the next one not"
    assert refusals.most(8, 8, 10.1 + PROBE_S) == 0, "but not all the time"
    refusals.works()
    assert refusals.most(8, 8, 10.2 + PROBE_S) == 8


def test_patience_is_with_the_row_or_with_a_server_that_refuses_all() -> None:
    refusals, first, second = Refusals(5.0), a_row(), a_row()
    refusals.waited(first, 10.0)
    assert refusals.waited(second, 700.0) == 690.0, "every row was refused all the time"
    refusals.works()
    assert refusals.waited(second, 800.0) == 0.0, "it has not paused yet"
    pause(second, 100.0, alone=True, jitter=0.5)
    pause(second, 100.0, alone=False, jitter=0.5)
    assert refusals.waited(second, 801.0) == 100.0, "of the other, others may have taken the place"
    assert Refusals(900.0).waited(second, 901.0) == 0.0, "of another server"


@pytest.mark.parametrize(
    ("tries", "asked"), [(1, 0.0), (50, 0.0), (2, 30.0), (2, 1e9), (2, math.nan)]
)
def test_a_pause_grows_and_is_at_least_what_the_server_asks_for(tries: int, asked: float) -> None:
    row = a_row()
    row.refusals = tries
    shortest, longest = (pause(row, asked, alone=True, jitter=jitter) for jitter in (0.0, 0.999))
    assert 0.2 < shortest <= longest <= LONGEST_ASKED
    assert longest >= min(LONGEST, 0.4 * tries)
    if not math.isnan(asked):
        assert shortest >= min(asked, LONGEST_ASKED)
