"""The tuner against model servers in simulated time: no clock, no sleeping."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from airflow_provider_vllm.batch import tuning
from airflow_provider_vllm.batch.tuning import Sample, Setting, Tuning, advance, begin

Speed = Callable[[Setting], float]


@dataclass
class World:
    """A server whose rows/s depend on the setting."""

    speed: Speed
    tuning: Tuning
    now: float = 0.0
    rows: float = 0.0
    preemptions: int = 0
    waiting: int | None = None

    def run(self, seconds: float) -> World:
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.rows += self.speed(self.tuning.now_used) * 0.1
            sample = Sample(self.now, int(self.rows), self.waiting, self.preemptions)
            self.tuning = advance(self.tuning, sample)
        return self


def world(speed: Speed, *, pack: bool = False, limit: int = tuning.START) -> World:
    start = begin(Setting(limit, 1), Sample(0, 0), may_pack=pack, may_grow=True)
    return World(speed, start)


def peak(best: int, most: float, packed: float = 1.0) -> Speed:
    """Grows up to `best` in flight, falls slowly beyond; `packed` times faster with packs."""

    def speed(setting: Setting) -> float:
        distance = setting.limit / best
        shape = distance if distance < 1 else 1 / (1 + 0.15 * (distance - 1))
        return most * shape * (packed if setting.pack > 1 else 1)

    return speed


@pytest.mark.parametrize("best", [16, 32, 64, 128, 200, 256, 400, 512, 1000])
def test_it_comes_within_a_tenth_of_the_best(best: int) -> None:
    speed = peak(best, 700.0)
    ended = world(speed).run(60)
    top = max(speed(Setting(limit, 1)) for limit in range(8, 1025))
    assert speed(ended.tuning.setting) >= 0.9 * top
    # Averaged over the minute after it, trials included.
    before = ended.rows
    assert (ended.run(60).rows - before) / 60 >= 0.9 * top


def test_packs_are_kept_where_they_are_faster() -> None:
    assert world(peak(128, 500, packed=1.8), pack=True).run(30).tuning.setting.pack == 16
    assert world(peak(128, 500, packed=0.9), pack=True).run(30).tuning.setting.pack == 1


def test_packs_are_not_tried_where_the_http_server_is_no_bottleneck() -> None:
    slow = world(peak(128, 100, packed=9), pack=True).run(120)
    assert slow.tuning.now_used.pack == 1


def test_packs_from_the_start_are_given_up_where_they_are_slower() -> None:
    start = begin(Setting(128, 16), Sample(0, 0), may_pack=True, may_grow=True)
    assert World(peak(128, 500, packed=0.8), start).run(30).tuning.setting.pack == 1
    assert World(peak(128, 500, packed=1.5), start).run(30).tuning.setting.pack == 16


def test_a_queue_on_the_server_stops_growth_and_is_shortened() -> None:
    """64 places: what is beyond only waits, and is as fast as without it."""
    queued = world(lambda setting: min(setting.limit, 64) * 10.0)
    for _ in range(60):
        queued.waiting = max(0, queued.tuning.now_used.limit - 64)
        assert queued.tuning.now_used.limit <= tuning.START
        queued.run(1)
    assert 64 <= queued.tuning.setting.limit <= 128, "as many may wait as run"


def test_a_queue_that_feeds_the_engine_stays() -> None:
    """Fewer in flight would be slower: the queue is what keeps the batch full."""
    fed = world(peak(tuning.START, 700))
    for _ in range(30):
        fed.waiting = fed.tuning.now_used.limit * 2 // 3
        fed.run(1)
    assert fed.tuning.setting.limit == tuning.START


class InStep:
    """An engine that runs up to 128 rows of 8 tokens, in steps of uneven length: rows end in bursts."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now, self.done, self.queue = 0.0, 0, 0
        self.running: list[int] = []

    def step(self, limit: int) -> None:
        self.queue += max(0, limit - len(self.running) - self.queue)
        admitted = min(self.queue, 128 - len(self.running))
        self.queue -= admitted
        self.running += [8] * admitted
        spent = 8 + 0.06 * len(self.running) + 1.2 * admitted
        self.now += spent * self.random.lognormvariate(0, 0.15) / 1000
        left = [tokens - 1 for tokens in self.running if tokens > 1]
        self.done += len(self.running) - len(left)
        self.running = left

    def run(self, seconds: float, limit: int) -> int:
        """Rows that end within the time at a fixed limit."""
        until, before = self.now + seconds, self.done
        while self.now < until:
            self.step(limit)
        return self.done - before


def test_bursts_do_not_lead_it_astray() -> None:
    """A window that holds one burst more or less is no news."""
    best = max(InStep(99).run(60, limit) for limit in (64, 128, 256, 512))
    parts = []
    for seed in range(12):
        server = InStep(seed)
        climb = begin(Setting(tuning.START, 1), Sample(0, 0), may_pack=False, may_grow=True)
        looked = 0.0
        while server.now < 60:
            server.step(climb.now_used.limit)
            if server.now > looked + 0.1:
                looked = server.now
                climb = advance(climb, Sample(looked, server.done, waiting=server.queue))
        parts.append(server.done / best)
    assert statistics.mean(parts) >= 0.95
    assert min(parts) >= 0.9


def test_a_smaller_limit_has_to_beat_both_measurements_of_the_present_one() -> None:
    """One of which fell into a slow moment; a larger one is compared with their mean."""
    first = begin(Setting(200, 1), Sample(0, 0), may_pack=False, may_grow=True, most=200)
    slow = advance(advance(first, Sample(1, 200)), Sample(11, 5_200))
    assert slow.trial == Setting(100, 1), "500 rows/s, and nothing larger may be tried"
    slow = advance(advance(slow, Sample(12, 5_400)), Sample(22, 11_000))
    assert slow.now_used == Setting(200, 1) and slow.tried == 560
    slow = advance(slow, Sample(23, 11_200))
    worse, better = Sample(33, 16_700), Sample(33, 16_100)
    assert advance(slow, worse).setting == Setting(200, 1), "550 now: 560 was no gain"
    assert advance(slow, better).setting == Setting(100, 1), "500 and 490: 560 is one"


def test_preemptions_shrink() -> None:
    preempted = world(peak(128, 700)).run(20)
    before = preempted.tuning.setting.limit
    preempted.preemptions += 1
    assert preempted.run(0.1).tuning.setting.limit < before


def trying(setting: Setting) -> Tuning:
    """In the middle of a trial of twice as many rows."""
    start = begin(setting, Sample(0, 0), may_pack=False, may_grow=True)
    climb = advance(advance(start, Sample(1, setting.limit)), Sample(11, 10_000))
    assert climb.now_used == Setting(setting.limit * 2, setting.pack)
    return climb


def test_a_preemption_takes_a_trial_back_at_once() -> None:
    """Not below the setting that gave no trouble, also when the server's counters show it late."""
    climb = trying(Setting(200, 16))
    assert advance(climb, Sample(11.1, 10_010, preemptions=5)).now_used == Setting(200, 16)
    judged = advance(advance(climb, Sample(12, 10_200)), Sample(22, 20_200))
    assert judged.tried is not None, "back at 200 for the second measurement"
    after = advance(judged, Sample(22.1, 20_210, preemptions=5))
    assert after.setting == Setting(200, 16) and after.trial is None
    late = advance(after, Sample(22.2, 20_220, preemptions=9))
    assert late.setting == Setting(200, 16), "rows of the trial are still coming back"
    assert advance(after, Sample(23, 20_700, preemptions=5)).skip == 0
    again = advance(after, Sample(23, 20_700, preemptions=5))
    assert advance(again, Sample(24, 21_000, preemptions=9)).setting.limit < 200


def test_few_slow_rows_are_enough_for_a_small_limit() -> None:
    slow = begin(Setting(1, 1), Sample(0, 0), may_pack=False, may_grow=True)
    for second in range(200):
        slow = advance(slow, Sample(float(second), second // 20))
    assert slow.now_used.limit >= 2


def test_a_trial_of_packs_that_is_broken_off_comes_again() -> None:
    start = begin(Setting(200, 1), Sample(0, 0), may_pack=True, may_grow=True)
    packed = advance(advance(start, Sample(1, 200)), Sample(11, 10_000))
    assert packed.now_used == Setting(200, 16)
    gone = tuning.after_a_gap(packed, Sample(20, 10_000))
    preempted = advance(packed, Sample(12, 10_100, preemptions=1))
    for broken in (gone, preempted):
        assert broken.now_used == Setting(200, 1) and broken.moves[0] == "pack"


def test_a_climb_that_is_broken_off_goes_on() -> None:
    climb = trying(Setting(200, 1))
    assert climb.now_used == Setting(400, 1)
    gone = tuning.after_a_gap(climb, Sample(300, 10_000))
    assert gone.moves[0] == "double"


def test_what_came_before_a_gap_is_forgotten() -> None:
    """A restart of the server lasts minutes, in which nothing is slow."""
    climb = trying(Setting(200, 1))
    gone = tuning.after_a_gap(climb, Sample(300, 10_000))
    assert gone.now_used == Setting(200, 1) and gone.before is None
    first = advance(gone, Sample(301, 10_200))
    assert advance(first, Sample(311, 20_200)).before == 1000.0


def test_the_start_of_the_sending_is_not_measured() -> None:
    """Connecting and the first tokens take time in which no row can come back."""
    start = begin(Setting(100, 1), Sample(0, 0), may_pack=False, may_grow=True)
    assert advance(start, Sample(29, 99)).skip == 100
    first = advance(start, Sample(30, 100))
    assert advance(first, Sample(31, 600)).before == 500.0


def test_a_queue_is_never_shortened_to_more_than_there_is() -> None:
    few = begin(Setting(2, 1), Sample(0, 0), may_pack=False, may_grow=True, most=2)
    first = advance(few, Sample(1, 2, waiting=2))
    assert advance(first, Sample(61, 200, waiting=2)).now_used == Setting(2, 1)


def test_rows_that_take_minutes_are_measured_in_whole_bursts() -> None:
    """All start together and end together, a minute and a half later; twice as many take as long."""
    climb = begin(Setting(256, 1), Sample(0, 0), may_pack=False, may_grow=True)
    rows, flying = 0, [(90.0, 256)]
    for second in range(1, 3600):
        done = sum(count for end, count in flying if end <= second)
        flying = [(end, count) for end, count in flying if end > second]
        rows += done
        climb = advance(climb, Sample(float(second), rows))
        free = climb.now_used.limit - sum(count for _, count in flying)
        if free > 0:
            flying.append((second + 90.0, free))
    assert climb.setting.limit == tuning.MOST


def test_a_fixed_limit_stays() -> None:
    start = begin(Setting(64, 1), Sample(0, 0), may_pack=True, may_grow=False)
    fixed = World(peak(64, 700, packed=2), start)
    fixed.preemptions = 10
    assert fixed.run(30).tuning.setting == Setting(64, 16)


def test_slow_rows_are_measured_over_longer_windows() -> None:
    """Twenty seconds a row: nothing is concluded from a window with no end of a row in it."""
    slow = world(lambda setting: setting.limit / 20)
    assert slow.run(10).tuning.now_used.limit == tuning.START
    assert slow.run(600).tuning.setting.limit == tuning.MOST


def test_packs_that_are_not_offered_are_not_tried_again() -> None:
    trying = world(peak(128, 700, packed=2), pack=True).run(2)
    assert trying.tuning.now_used.pack == 16
    trying.tuning = tuning.without_packs(trying.tuning, Sample(trying.now, int(trying.rows)))
    for _ in range(60):
        assert trying.run(1).tuning.now_used.pack == 1
