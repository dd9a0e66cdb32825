"""How many rows a server that refuses some is asked at once, and how long a row waits."""

from __future__ import annotations

import heapq
import math
import random

import pytest

from airflow_provider_vllm.batch.refusals import (
    LONGEST,
    LONGEST_ASKED,
    PROBE_S,
    SETTLED_S,
    Refusals,
    pause,
)
from airflow_provider_vllm.batch.row import Row


def a_row(number: int = 0) -> Row:
    return Row(number, "a", "/v1/chat/completions", b"{}", b"0" * 16)


def test_without_a_refusal_nothing_is_bounded() -> None:
    refusals = Refusals(0.0)
    refusals.answered(1000, 1000)
    assert refusals.size == math.inf
    assert refusals.most(256, 0, 0, 1.0) == (256, False)


class World:
    """A server that takes rows of `seconds` up to its `capacity`, and refuses what `is_refused` says."""

    def __init__(self, limit: int, seconds: float = 1.0, capacity: float = math.inf) -> None:
        self.limit, self.seconds, self.capacity = limit, seconds, capacity
        self.step, self.chunk = 0.1, limit  # refusals that come back in a step
        self.refusals, self.chance = Refusals(1.0), random.Random(1)
        self.now = 1000.0
        self.new, self.held = 0, 0
        self.answers: list[tuple[float, Row]] = []
        self.pausing: list[tuple[float, int, Row]] = []
        self.refused: list[Row] = []
        self.answered = self.refused_in_all = 0

    def is_refused(self, number: int) -> bool:
        return False

    def run(self, seconds: float) -> World:
        until = self.now + seconds
        while self.now < until:
            self.now += self.step
            self._settle()
            self._fill()
        return self

    def _settle(self) -> None:
        done = [row for at, row in self.answers if at <= self.now]
        self.answers = [each for each in self.answers if each[0] > self.now]
        held = self.held
        self.held -= len(done)
        if done:
            self.answered += len(done)
            self.refusals.answered(len(done), held, sum(row.refusals for row in done))
        come, self.refused = self.refused[: self.chunk], self.refused[self.chunk :]
        for row in come:
            self.held -= 1
            self.refusals.refused(row, self.now)
            seconds = pause(row, 0.0, alone=not self.held, jitter=self.chance.random())
            heapq.heappush(self.pausing, (self.now + seconds, row.number, row))
        self.refused_in_all += len(come)
        self.refusals.settle(self.limit, self.held, self.now)

    def _fill(self) -> None:
        due = [row for at, _, row in self.pausing if at <= self.now]
        self.pausing = [each for each in self.pausing if each[0] > self.now]
        heapq.heapify(self.pausing)
        most, is_probe = self.refusals.most(self.limit, self.held, len(self.pausing), self.now)
        while self.held < most:
            self.held += 1
            if due and not is_probe:
                self._send(due.pop(0))
            else:
                row, self.new = a_row(self.new), self.new + 1
                self._send(row)
        for row in due:  # no room
            heapq.heappush(self.pausing, (self.now, row.number, row))

    def _send(self, row: Row) -> None:
        if len(self.answers) >= self.capacity or self.is_refused(row.number):
            self.refused.append(row)
        else:
            self.answers.append((self.now + self.seconds, row))


@pytest.mark.parametrize("capacity", [4, 24, 200])
@pytest.mark.parametrize("limit", [64, 256, 1024])
def test_a_server_of_fixed_capacity_is_kept_full_and_not_stormed(capacity: int, limit: int) -> None:
    world = World(limit, capacity=capacity).run(20)
    answered, refused = world.answered, world.refused_in_all
    world.run(100)
    places = min(limit, capacity)
    assert world.answered - answered > 80 * places  # a row takes 1.1 s in steps of 0.1 s
    assert world.refused_in_all - refused <= (world.answered - answered) * 0.7
    assert (world.refused_in_all > 0) is (limit > capacity)


@pytest.mark.parametrize(("part", "kept"), [(0.05, 0.9), (0.3, 0.5)])
@pytest.mark.parametrize("seconds", [0.2, 1.0])
def test_refusals_whatever_the_load_do_not_slow_it_down(
    part: float, kept: float, seconds: float
) -> None:
    """One busy replica of three, for one."""
    world = World(64, seconds)
    world.step = 0.02
    world.is_refused = lambda number: world.chance.random() < part  # type: ignore[method-assign]
    whole = World(64, seconds)
    whole.step = 0.02
    assert world.run(60).answered > kept * whole.run(60).answered


@pytest.mark.parametrize("seconds", [1.0, 30.0])
def test_rows_that_are_always_refused_slow_nothing_down(seconds: float) -> None:
    """Though each is tried again and again, for ever."""
    world = World(64, seconds)
    world.is_refused = lambda number: number % 100 == 7  # type: ignore[method-assign]
    half = world.run(20 * seconds).answered
    assert world.run(20 * seconds).answered - half > 0.8 * half > 0
    assert world.refusals.size > 48


@pytest.mark.parametrize(("limit", "bad"), [(8, 16), (8, 24), (16, 40), (1, 3)])
def test_more_rows_that_are_always_refused_than_may_be_in_flight(limit: int, bad: int) -> None:
    """The first rows of the input, for one: those after them must come to be asked."""
    world = World(limit)
    world.is_refused = lambda number: number < bad  # type: ignore[method-assign]
    assert world.run(200).answered > 40 * limit


def test_a_row_that_takes_long_holds_up_no_other() -> None:
    world = World(4, seconds=1000.0)
    world.is_refused = lambda number: number == 0  # type: ignore[method-assign]
    assert len(world.run(10).answers) == 4


def test_a_storm_is_soon_forgotten() -> None:
    """One that refuses everything for a while says nothing of how many it takes."""
    world = World(256, seconds=5.0)
    world.step, world.chunk = (
        0.02,
        40,
    )  # its words come one after the other, and some rows seem to be held
    began = world.now
    world.is_refused = lambda number: world.now < began + 30  # type: ignore[method-assign]
    assert world.run(29).answered == 0
    assert len(world.run(17).answers) > 250
    assert world.refused_in_all < 256 * 12


def test_what_is_not_used_does_not_grow() -> None:
    """At the end of the input few rows are in flight, and none is refused."""
    refusals = Refusals(1.0)
    refusals.refused(a_row(), 1000.0)
    refusals.settle(64, 20, 1000.0)
    assert refusals.size == math.inf, "more may come"
    assert refusals.most(64, 20, 0, 1000.1) == (63, False)
    refusals.settle(64, 20, 1000.0 + SETTLED_S)
    assert refusals.size == 63
    for _ in range(100):
        refusals.answered(1, 20)
    assert refusals.size == 63
    refusals.answered(4, 63)
    assert refusals.size == 65


@pytest.mark.parametrize("limit", [2, 4, 64])
def test_from_one_on_it_grows_again(limit: int) -> None:
    refusals = Refusals(1.0)
    for number in range(limit):
        refusals.refused(a_row(number), 1000.0)
    refusals.settle(limit, 1, 1000.0)
    refusals.settle(limit, 1, 1000.0 + SETTLED_S)
    assert refusals.size == 1
    for _ in range(4 * limit):
        held, _ = refusals.most(limit, 0, 0, 1001.0)
        refusals.answered(held, held)
    assert refusals.most(limit, 0, 0, 1001.0) == (limit, False)


def test_what_a_server_holds_it_may_hold() -> None:
    """However many it refused beside."""
    refusals = Refusals(1.0)
    for number in range(1000):
        refusals.refused(a_row(number), 1000.0)
    for in_flight, later in ((500, 0.1), (200, SETTLED_S), (210, SETTLED_S)):
        refusals.settle(1024, in_flight, 1000.0 + later)
    assert refusals.size == 200


def test_where_nothing_is_answered_pausing_rows_keep_their_places() -> None:
    refusals, row = Refusals(5.0), a_row()
    assert refusals.refused(row, 10.0) == 0.0
    refusals.settle(8, 0, 10.0)
    refusals.settle(8, 0, 10.0 + SETTLED_S)
    assert refusals.most(8, 0, 3, 10.1) == (5, False)
    assert refusals.most(8, 0, 8, 10.1) == (0, False)
    assert refusals.most(8, 0, 8, 10.0 + PROBE_S) == (1, True), "the next one may be taken"
    assert refusals.most(8, 0, 8, 10.1 + PROBE_S) == (0, False), "but not all the time"
    refusals.works()
    assert refusals.most(8, 0, 8, 10.2 + PROBE_S) == (8, False)


def test_patience_is_with_the_row_or_with_a_server_that_refuses_all() -> None:
    refusals, first, second = Refusals(5.0), a_row(), a_row()
    refusals.refused(first, 10.0)
    assert refusals.refused(second, 700.0) == 690.0, "every row was refused all the time"
    refusals.works()
    assert refusals.refused(second, 800.0) == 0.0, "it has not paused yet"
    pause(second, 100.0, alone=True, jitter=0.5)
    pause(second, 100.0, alone=False, jitter=0.5)
    assert refusals.refused(second, 801.0) == 100.0, "of the other, others may have taken the place"
    assert Refusals(900.0).refused(second, 901.0) == 0.0, "of another server"


@pytest.mark.parametrize(
    ("tries", "asked"), [(1, 0.0), (50, 0.0), (2, 30.0), (2, 1e9), (2, math.nan)]
)
def test_a_pause_grows_and_is_at_least_what_the_server_asks_for(tries: int, asked: float) -> None:
    row = a_row()
    row.refusals = tries
    shortest, longest = (pause(row, asked, alone=False, jitter=jitter) for jitter in (0.0, 0.999))
    assert 0.2 < shortest <= longest <= LONGEST_ASKED
    assert longest >= min(LONGEST, 0.4 * tries)
    if not math.isnan(asked):
        assert shortest >= min(asked, LONGEST_ASKED)


def test_a_row_that_is_left_alone_does_not_pay_for_the_crowd() -> None:
    row = a_row()
    row.refusals = 20
    seconds = [pause(row, 0.0, alone=True, jitter=0.5) for _ in range(12)]
    assert seconds[0] == 0.5
    assert seconds == sorted(seconds)
    assert seconds[-1] == LONGEST
