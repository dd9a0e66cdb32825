"""The sender alone: a step at a time, without a server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_vllm.batch import waiting
from airflow_provider_vllm.batch.ahead import Direct
from airflow_provider_vllm.batch.endpoint import Endpoint
from airflow_provider_vllm.batch.journal import Journal
from airflow_provider_vllm.batch.replies import GAP
from airflow_provider_vllm.batch.reply import Kind, Reply
from airflow_provider_vllm.batch.row import Row
from airflow_provider_vllm.batch.rows import RowMaker
from airflow_provider_vllm.batch.sender import REFILL_S, Sender
from airflow_provider_vllm.batch.signals import Connect, Ended, Healthy, NeedServer, Trouble
from airflow_provider_vllm.batch.sources import Record
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import BatchFailed, TooManyErrors

ANSWER = b'{"id":"a","choices":[{"message":{"content":"b"}}]}'


def a_sender(folder: Path, spec: BatchSpec, records: Iterable[Record]) -> Sender:
    """Not started, with an open journal in the folder."""
    journal = Journal(folder / "journal")
    journal.open()
    endpoint = Endpoint("http://127.0.0.1:1", "tiny")
    maker = RowMaker(spec, "tiny")
    return Sender(spec, Direct(iter(records)), maker, journal, None, endpoint, total=100)


class Sent:
    """A client that keeps what it is given."""

    def __init__(self) -> None:
        self.tags: list[Any] = []

    def send(self, url: str, body: bytes, tag: Any) -> None:
        self.tags.append(tag)


@pytest.mark.parametrize(("limit", "group"), [(256, 16), (64, 8), (8, 1), (1, 1)])
def test_new_rows_go_out_in_groups_but_none_waits_for_long(
    tmp_path: Path, limit: int, group: int
) -> None:
    spec = BatchSpec(prompts=["a"], concurrency=limit, pack=1)
    sender = a_sender(tmp_path, spec, itertools.repeat(("prompts", 1, "a")))
    client = Sent()

    def fill(now: float, ended: int) -> int:
        """How many go out at `now`, when so many have ended."""
        client.tags.clear()
        sender.stats.in_flight -= ended
        sender._fill(client, now)  # type: ignore[arg-type]
        return len(client.tags)

    assert fill(100.0, 0) == limit
    moment = 100.0 + REFILL_S / 2
    if group > 1:
        assert fill(moment, group - 1) == 0
        assert sender._wait == pytest.approx(REFILL_S / 2), "answers are waited for no longer"
        assert fill(moment, 1) == group
    else:
        assert fill(moment, 1) == 1
    later = moment + REFILL_S
    assert fill(later, 1) == 1, "a row that is alone waits no longer than that"


@pytest.mark.parametrize(("pause", "kept"), [(GAP / 2, True), (GAP * 2, False)])
def test_only_a_long_pause_makes_the_tuner_forget(tmp_path: Path, pause: float, kept: bool) -> None:
    """Stray failures pause the sending often and for moments; the climb would never get on."""
    sender = a_sender(tmp_path, BatchSpec(prompts=["a"]), [])
    sender._tuning = replace(sender._tuning, before=500.0)
    replies = sender._replies
    replies.paused, replies._paused_at = True, time.monotonic() - pause
    sender._obey(Healthy(time.monotonic()))
    assert (sender._tuning.before == 500.0) is kept
    assert not replies.paused


class Losing:
    """A client of a lost server: one failure was not told yet."""

    def __init__(self, failed: Reply) -> None:
        self.failed = failed

    def rest(self) -> tuple[list[Any], list[Reply]]:
        return [], [self.failed]

    def abort(self) -> list[Any]:
        return []

    def close(self) -> None:
        pass


def test_a_loss_is_told_once_whatever_else_had_failed(tmp_path: Path) -> None:
    """A second word of it would have the watch give up the server again, when there is none."""
    sender = a_sender(tmp_path, BatchSpec(prompts=["a"]), [("prompts", 1, "a")])
    (row,) = sender._waiting.take_new(1, True)
    assert isinstance(row, Row)
    sender.stats.in_flight = 1
    sender._client = Losing(Reply(row, 500))  # type: ignore[assignment]
    sender._give_up("it died")
    assert isinstance(sender.events.get_nowait(), NeedServer)
    assert sender.events.empty()
    assert row.deaths == 1
    assert sender._waiting.take(False) is row


def test_rows_that_wait_for_another_try_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a server refuses everything, the whole input would come to wait in memory."""
    monkeypatch.setattr(waiting, "PAUSING_BYTES", 20_000)
    rows = [("prompts", number, "x" * 1000) for number in range(1, 101)]
    sender = a_sender(tmp_path, BatchSpec(prompts=["a"]), rows)
    sender.stats.limit = 4

    def taken(now: float, until: float) -> list[int]:
        found = []
        sender._waiting.pauses.wake(now)
        while (row := sender._waiting.take(True)) is not None:
            sender._waiting.pauses.put(row, until)
            found.append(row.number)
        return found

    first = taken(0.0, 10.0)
    assert 4 < len(first) < 20
    assert first == list(range(len(first)))
    assert taken(5.0, 10.0) == [], "their pause is not over"
    assert taken(11.0, 20.0) == first, "those that wait come first, and no other joins them"
    sender.stats.limit = 30
    assert len(taken(12.0, 20.0)) == 30 - len(first), "as many as may be in flight always may"


@pytest.mark.parametrize("restarted", [False, True])
def test_patience_with_refusals_is_with_one_server(tmp_path: Path, restarted: bool) -> None:
    sender = a_sender(tmp_path, BatchSpec(prompts=["a"]), [("prompts", 1, "a")])
    (row,) = sender._waiting.take_new(1, True)
    assert isinstance(row, Row)
    refusal = Reply(row, 503)
    sender._replies._settle_bad(row, refusal, Kind.BUSY)
    assert row.refusals == 1 and not sender.stats.failed
    row.paused = 601
    if restarted:
        sender._obey(Connect(Endpoint("http://127.0.0.1:1", "tiny")))
    sender._replies._settle_bad(row, refusal, Kind.BUSY)
    assert sender.stats.failed == ({} if restarted else {"failed": 1})
    expected = "" if restarted else "row-1: prompts, row 1: HTTP 503:  (for 601 s)"
    assert str(sender.stats.reasons) == expected


@pytest.mark.parametrize("answered", [False, True])
def test_where_every_row_is_refused_patience_is_with_the_server(
    tmp_path: Path, answered: bool
) -> None:
    """Else each new row would be waited for anew, and a batch of many would never end."""
    rows = [("prompts", number, "a") for number in (1, 2, 3)]
    sender = a_sender(tmp_path, BatchSpec(prompts=["a"]), rows)
    first, second, other = sender._waiting.take_new(3, True)
    assert isinstance(first, Row) and isinstance(second, Row)
    sender._replies.settle([], [Reply(first, 429)])
    sender._replies.refusals._since = time.monotonic() - 601
    if answered:
        sender.stats.in_flight = 1
        sender._replies.settle([(other, ANSWER)], [])
    sender._replies.settle([], [Reply(second, 429)])
    assert sender.stats.failed == ({} if answered else {"failed": 1})


def ended(sender: Sender) -> BaseException | None:
    """What the watch is told at the end of a sender that runs by itself."""
    sender.start()
    event = sender.events.get(timeout=10)
    sender.join()
    assert isinstance(event, Ended)
    return event.failure


def test_the_end_is_told_whatever_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch waits for it."""

    def no_memory() -> None:
        raise MemoryError

    sender = a_sender(tmp_path, BatchSpec(prompts=["a"]), [])
    monkeypatch.setattr(sender._ledger, "flush", no_memory)
    monkeypatch.setattr(sender._waiting, "close", no_memory)
    failure = ended(sender)
    assert isinstance(failure, BatchFailed)
    assert "the sending broke down: MemoryError" in str(failure)
    assert isinstance(failure.__cause__, MemoryError)


@pytest.mark.parametrize("error", [OSError(5, "I/O error"), RuntimeError("SlowDown: try later")])
def test_an_input_that_cannot_be_read_on(tmp_path: Path, error: Exception) -> None:
    """Object stores have errors of their own."""

    def records() -> Iterator[Record]:
        yield "in.jsonl", 1, "a"
        raise error

    failure = ended(a_sender(tmp_path, BatchSpec(prompts=["a"]), records()))
    assert isinstance(failure, BatchFailed)
    assert "the input cannot be read on: " in str(failure) and str(error) in str(failure)


def test_a_batch_that_has_failed_needs_no_server(tmp_path: Path) -> None:
    """It would load a model for minutes, and its own failure would hide why."""
    rows = [("prompts", 1, "a"), ("prompts", 2, "b")]
    sender = a_sender(tmp_path, BatchSpec(prompts=["a", "b"], max_errors=0), rows)
    (row, other) = sender._waiting.take_new(2, True)
    assert isinstance(row, Row) and isinstance(other, Row)
    sender._waiting.alone, sender.stats.in_flight = row, 1
    sender._waiting.put_back(other)
    sender._client = Losing(Reply(row, 0, fault=Kind.DOUBTFUL, message="reset"))  # type: ignore[assignment]
    sender._give_up("it died")
    assert isinstance(sender._ledger.verdict, TooManyErrors)
    assert sender.events.empty()
    assert sender._stopped


@pytest.mark.parametrize(("replies", "paused"), [(1, False), (2, True)])
def test_a_pack_that_fails_is_one_failure(tmp_path: Path, replies: int, paused: bool) -> None:
    """Two of them, one after the other, may be the end of the server."""
    rows = [("prompts", number, "a") for number in range(1, 9)]
    sender = a_sender(tmp_path, BatchSpec(prompts=["a"]), rows)
    made = [row for row in sender._waiting.take_new(8, True) if isinstance(row, Row)]
    sender.stats.in_flight = 8
    packs = [made[:4], made[4:]][:replies]
    sender._replies.settle([], [Reply(pack, 500) for pack in packs])
    assert sender._replies.paused is paused
    assert isinstance(sender.events.get_nowait(), Trouble)


def doubtful(sender: Sender, count: int) -> list[Row]:
    """So many rows that a server which may be dead had."""
    rows = [row for row in sender._waiting.take_new(count, True) if isinstance(row, Row)]
    sender.stats.in_flight = len(rows)
    for row in rows:
        sender._replies.settle([], [Reply(row, 500)])
    return rows


def test_a_look_at_the_health_says_nothing_of_what_failed_after_it(tmp_path: Path) -> None:
    """Else the rows of a server that dies at that moment would have failed on their own, and lost a try each."""
    rows = [("prompts", number, "a") for number in (1, 2, 3)]
    sender = a_sender(tmp_path, BatchSpec(prompts=["a"]), rows)
    (first,) = doubtful(sender, 1)
    looked_at = time.monotonic()
    later = doubtful(sender, 2)
    assert isinstance(sender.events.get_nowait(), Trouble)
    sender._obey(Healthy(looked_at))
    assert [row.attempts for row in (first, *later)] == [1, 0, 0]
    assert isinstance(sender.events.get_nowait(), Trouble), "the others are asked about"
    assert sender._replies.paused, "two in a row"
    sender._obey(Healthy(time.monotonic()))
    assert [row.attempts for row in later] == [1, 1]
    assert sender.events.empty() and not sender._replies.paused


@pytest.mark.parametrize(("answers", "paused"), [(30, False), (1, True)])
def test_two_failures_among_many_answers_are_not_in_a_row(
    tmp_path: Path, answers: int, paused: bool
) -> None:
    rows = [("prompts", number, "a") for number in range(1, 100)]
    sender = a_sender(tmp_path, BatchSpec(prompts=["a"], pack=1), rows)
    made = sender._waiting.take_new(answers + 2, True)
    sender.stats.in_flight = len(made)
    good = [(row, ANSWER) for row in made[2:]]
    sender._replies.settle(good, [Reply(row, 500) for row in made[:2]])
    assert sender._replies.paused is paused


def test_the_last_of_many_that_are_refused_at_once_is_not_alone(tmp_path: Path) -> None:
    """It would pay for the crowd, with the patience that is for a row which the server never takes."""
    rows = [("prompts", number, "a") for number in (1, 2, 3)]
    sender = a_sender(tmp_path, BatchSpec(prompts=["a"]), rows)
    made = [row for row in sender._waiting.take_new(3, True) if isinstance(row, Row)]
    sender.stats.in_flight = 3
    sender._replies.settle([], [Reply(row, 429) for row in made[:2]])
    sender._replies.settle([], [Reply(made[2], 429)])
    assert [row.paused for row in made] == [0.0, 0.0, 0.0]
    sender._replies.refusals.settle(3, 0, time.monotonic() + 1)
    sender.stats.in_flight = 1
    sender._replies.settle([], [Reply(made[2], 429)])
    assert made[2].paused > 0


@pytest.mark.parametrize(("in_flight", "sent"), [(0, [2, 2, 2, 2]), (1, [])])
def test_a_part_of_a_failed_pack_waits_for_its_place(
    tmp_path: Path, in_flight: int, sent: list[int]
) -> None:
    """No more rows are in flight than may be: what does not fit at all goes in smaller parts."""
    rows = [("prompts", number, "a") for number in range(1, 9)]
    sender = a_sender(tmp_path, BatchSpec(prompts=["a"], concurrency=2), rows)
    made = [row for row in sender._waiting.take_new(8, True) if isinstance(row, Row)]
    for row in made:
        row.prompt, row.params = [{"role": "user", "content": "a"}], b'{"model":"tiny"}'
    sender._waiting.parcels.append(made)
    sender.stats.in_flight = in_flight
    parts = []
    for _ in range(4):
        client = Sent()
        sender._fill(client, time.monotonic())  # type: ignore[arg-type]
        parts += [len(tag) for tag in client.tags]
        sender.stats.in_flight = in_flight
    assert parts == sent


class Answered(Losing):
    """A client that has an answer which was not told yet."""

    def __init__(self, row: Row) -> None:
        self.row = row

    def rest(self) -> tuple[list[Any], list[Reply]]:
        return [(self.row, ANSWER)], []


def test_what_has_come_is_kept_where_the_sending_breaks(tmp_path: Path) -> None:
    sender = a_sender(tmp_path, BatchSpec(prompts=["a"]), [("prompts", 1, "a")])
    (row,) = sender._waiting.take_new(1, True)
    assert isinstance(row, Row)
    client = Answered(row)

    def breaks() -> None:
        sender._client, sender.stats.in_flight = client, 1  # type: ignore[assignment]
        raise RuntimeError("at this moment")

    sender._loop = breaks  # type: ignore[method-assign]
    assert "at this moment" in str(ended(sender))
    assert sender.stats.outcomes == {"ok": 1}


@pytest.mark.parametrize("status", [302, 403, 404, 501])
def test_a_gateway_that_knows_no_packs_ends_them_and_not_the_batch(
    tmp_path: Path, status: int
) -> None:
    """The rows go alone, to the path that it knows; a wrong key shows there."""
    rows = [("prompts", number, "a") for number in range(1, 5)]
    sender = a_sender(tmp_path, BatchSpec(prompts=["a"], pack=4), rows)
    made = [row for row in sender._waiting.take_new(4, True) if isinstance(row, Row)]
    sender.stats.in_flight = 4
    replies = sender._replies
    replies.settle([], [Reply(made, status)])
    assert replies.failure is None and replies.no_packs
    assert [len(part) for part in sender._waiting.parcels] == [1, 1, 1, 1]
    sender.stats.in_flight = 1
    replies.settle([], [Reply(made[0], status)])
    assert (replies.failure is not None) is (status < 404)
