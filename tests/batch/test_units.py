"""The small parts: compact tables, reading ahead, the verdict, progress, vital signs, templates."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from airflow_provider_vllm.batch import health
from airflow_provider_vllm.batch.ahead import CHUNK, CHUNK_BYTES, DEPTH, Ahead, Direct
from airflow_provider_vllm.batch.compact import IntMap, IntSet
from airflow_provider_vllm.batch.health import Movement, Vitals, is_stalled, observe
from airflow_provider_vllm.batch.places import spans
from airflow_provider_vllm.batch.progress import Progress, clock
from airflow_provider_vllm.batch.reasons import KINDS, Reasons
from airflow_provider_vllm.batch.row import BadRow
from airflow_provider_vllm.batch.signals import Stats
from airflow_provider_vllm.batch.template import RowError, Template
from airflow_provider_vllm.batch.verdict import backoff, reason_to_fail
from airflow_provider_vllm.exceptions import InvalidInput


def test_a_set_of_integers_is_a_set() -> None:
    chance = random.Random(1)
    keys = [chance.getrandbits(64) for _ in range(20_000)] + [0, -1, 1 << 63]
    mine, theirs = IntSet(), set[int]()
    for key in keys + keys[:5000]:
        known = (key & (1 << 64) - 1) in theirs
        theirs.add(key & (1 << 64) - 1)
        assert mine.add(key) is not known


def test_a_map_of_integers_is_a_map() -> None:
    chance = random.Random(2)
    mine, theirs = IntMap(), dict[int, int]()
    for _ in range(20_000):
        key, value = (
            chance.randrange(1, 15_000) * 0x9E3779B97F4A7C15 & (1 << 64) - 1,
            chance.getrandbits(63),
        )
        mine.put(key, value)
        theirs[key] = value
    assert len(mine) == len(theirs)
    assert all(mine.get(key) == value for key, value in theirs.items())
    assert mine.get(5) is None


def test_reading_ahead_is_bounded_and_ordered() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(10_000):
            made.append(number)
            yield number

    ahead = Ahead(items())
    taken = ahead.take(5)
    time.sleep(0.1)  # give the thread every chance to run too far
    assert len(made) <= (DEPTH + 3) * CHUNK
    while some := ahead.take(77):
        taken += some
    assert taken == list(range(10_000))
    assert ahead.take(1) == []


def test_large_items_are_read_ahead_by_their_bytes() -> None:
    """Rows with a picture of a megabyte each would hold half a gigabyte else."""
    made: list[int] = []

    def items() -> Iterator[bytes]:
        for number in range(200):
            made.append(number)
            yield b"%d" % number

    ahead = Ahead(items(), lambda item: CHUNK_BYTES)
    taken = ahead.take(1)
    time.sleep(0.1)  # give the thread every chance to run too far
    assert len(made) <= DEPTH + 3
    while some := ahead.take(77):
        taken += some
    assert taken == [b"%d" % number for number in range(200)]


@pytest.mark.parametrize("kind", [Ahead, Direct])
def test_what_was_read_before_an_error_is_not_lost(
    kind: type[Ahead[int]] | type[Direct[int]],
) -> None:
    def items() -> Iterator[int]:
        yield from range(CHUNK + 5)
        raise OSError("the file system is gone")

    source = kind(items())
    taken: list[int] = []
    with pytest.raises(OSError, match="gone"):
        taken.extend(item for some in iter(lambda: source.take(50), []) for item in some)
    assert taken == list(range(CHUNK + 5))
    assert source.ended


def test_what_is_not_there_yet_holds_up_only_who_waits() -> None:
    come, asked = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        asked.set()
        come.wait(10)
        yield 1

    ahead = Ahead(items())
    assert asked.wait(10)
    assert ahead.take(5, wait=False) == []
    assert not ahead.ended
    come.set()
    assert ahead.take(5) == [1]
    assert ahead.take(5) == []
    assert ahead.ended


def test_reading_ahead_ends_when_closed() -> None:
    before = threading.active_count()
    ahead = Ahead(iter(range(1_000_000)))
    ahead.take(1)
    ahead.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("done", "errors", "total", "finished", "fails"),
    [
        (10, 1, 10, True, False),
        (10, 2, 10, True, True),
        (49, 49, 100, False, False),  # fewer than 50 rows are in
        (50, 11, 100, False, True),  # the other 50 could not mend it
        (50, 10, 100, False, False),
        (3, 0, 3, True, False),
    ],
)
def test_the_verdict(done: int, errors: int, total: int, finished: bool, fails: bool) -> None:
    reason = reason_to_fail(
        done=done,
        errors=errors,
        total=total,
        max_error_rate=0.1,
        max_errors=None,
        finished=finished,
    )
    assert (reason is not None) is fails


def test_max_errors_is_judged_at_once() -> None:
    reason = reason_to_fail(
        done=2, errors=2, total=100, max_error_rate=1, max_errors=1, finished=False
    )
    assert reason == "2 rows failed, more than max_errors=1"


def test_the_pause_doubles_up_to_half_a_minute() -> None:
    pauses = [backoff(attempt, jitter=0.5) for attempt in range(1, 10)]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert backoff(1, jitter=0) < backoff(1, jitter=0.99)


def test_movement() -> None:
    state = Movement(0.0, 5, 100.0)
    assert observe(state, done=5, in_flight=3, moved=100.0, now=9.0) is state
    assert observe(state, done=6, in_flight=3, moved=100.0, now=9.0).at == 9.0
    assert observe(state, done=5, in_flight=3, moved=101.0, now=9.0).at == 9.0
    assert observe(state, done=5, in_flight=0, moved=100.0, now=9.0).at == 9.0
    assert is_stalled(state, now=60.0, patience=60)
    assert not is_stalled(state, now=59.0, patience=60)


METRICS = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_preemptions_total{engine="0",model_name="m"} 1.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+03
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:prompt_tokens_total{engine="0",model_name="m"} 10.0
"""


def test_vital_signs_are_summed_over_engines() -> None:
    assert health.read_metrics(METRICS) == Vitals(running=7, waiting=2, preemptions=1, moved=1510.0)
    assert health.read_metrics(b"process_cpu_seconds_total 5\n") == Vitals()


def test_progress_lines() -> None:
    progress = Progress(1000, now=0.0)
    stats = Stats(done=100, ok=98, prompt_tokens=900, completion_tokens=100, in_flight=64)
    line, numbers = progress.report(stats, Vitals(60, 4, 0, 1.0), now=10.0)
    assert line == (
        "100/1000 rows, 10.0 rows/s, 100 tokens/s, 64 in flight, server running 60 waiting 4, "
        "2 errors, about 1 min 30 s left"
    )
    assert numbers["seconds_left"] == 90
    assert clock(59) == "59 s"
    assert clock(7500) == "2 h 5 min"
    line, _ = Progress(7, 0.0).report(Stats(), Vitals(), 1.0)
    assert line == "0/7 rows, 0.0 rows/s, 0 tokens/s, 0 in flight, 0 errors"


def test_progress_before_a_row_is_done_shows_what_the_server_generates() -> None:
    progress, stats = Progress(300, now=0.0), Stats(in_flight=128)

    def shown(tokens: int, now: float) -> str:
        progress.see(Vitals(128, 0, samples={'vllm:generation_tokens_total{e="0"}': tokens}), now)
        line, numbers = progress.report(stats, Vitals(128, 0), now + 0.5)
        assert bool(numbers["server_tokens_per_second"]) == ("generating" in line)
        return line

    assert "server running 128 waiting 0, 0 errors" in shown(500, 1.0)
    assert "server running 128 waiting 0 generating 250 tokens/s, 0 errors" in shown(1500, 5.0)
    assert "generating" not in shown(1500, 9.0)
    assert "generating" not in shown(40, 12.0), "a new server counts from 0"
    assert "generating 20 tokens/s" in shown(80, 14.0)


def test_braces_in_a_template_name_jinja_too() -> None:
    for text in ("{a", '{"name": 1} {text}', "{\n 'a': {'b': 1}} {text}", "{a.b}"):
        with pytest.raises(InvalidInput, match=r"write {{ and }} .*{% raw %}"):
            Template(text)


def test_a_template_whose_columns_are_all_empty_asks_nothing() -> None:
    template = Template("{title}: {text}")
    assert template.fill({"title": "", "text": "a"}) == ": a"
    with pytest.raises(RowError, match="title, text of prompt_template is empty"):
        template.fill({"title": "", "text": ""})


def test_templates() -> None:
    assert (
        Template("{a!r} {{}} {b} {c}").fill({"a": "x", "b": {"k": 1}, "c": 5})
        == "'x' {} {\"k\":1} 5"
    )
    assert Template("{a!s:>3}|{a!a}|{b!s}").fill({"a": "ü", "b": [1]}) == "  ü|'\\xfc'|[1]"
    with pytest.raises(InvalidInput, match="!x is unknown"):
        Template("{a!x}")
    with pytest.raises(RowError, match="cannot be formatted"):
        Template("{a:d}").fill({"a": "text"})
    with pytest.raises(RowError, match=r"column a cannot be formatted: .*range"):
        Template("{a:c}").fill({"a": 1 << 40})
    with pytest.raises(RowError, match="column a cannot be formatted: MemoryError"):
        Template("{a:9999999999999999}").fill({"a": "text"})


def test_places_are_spans_of_lines() -> None:
    numbers = [("a.jsonl", line) for line in (1, 2, 3, 10)] + [("b.csv", line) for line in (11, 13)]
    assert spans(numbers) == "a.jsonl:1-3, a.jsonl:10, b.csv:11, b.csv:13"
    assert spans(("a", line) for line in range(10, 50, 2)).endswith("a:24 and 12 more")
    assert spans([]) == ""


def failed_row(number: int) -> BadRow:
    return BadRow(number, f"row-{number + 1}", "http_400", "", "in.csv", number + 2, None)


def test_reasons_are_counted_by_what_went_wrong_and_not_by_its_values() -> None:
    reasons = Reasons()
    for number in range(20):
        reasons.add(failed_row(number), "http_400", f"HTTP 400: temperature {9 + number}.5 is high")
    for number in (25, 24, 23):
        reasons.add(failed_row(number), "http_400", "HTTP 400: temperature is negative")
    reasons.add(failed_row(30), "timeout", "no answer in time")
    text = str(reasons)
    assert text.startswith("20 x http_400, as row-1: in.csv, line 2: ")
    assert "| 3 x http_400, as row-24: in.csv" in text, "the first of the input"
    assert text.endswith("| row-31: in.csv, line 32: no answer in time")
    assert text.count("line") == 5
    assert reasons.are_one is False


def test_reasons_of_any_number_are_bounded() -> None:
    reasons = Reasons()
    for number in range(3 * KINDS):
        words = "".join(chr(97 + int(digit)) for digit in str(number))
        reasons.add(failed_row(number), "http_400", f"HTTP 400: {words}")
    assert f"{2 * KINDS} x http_400" in str(reasons)
    assert str(reasons).endswith("others")
    assert reasons.are_one
