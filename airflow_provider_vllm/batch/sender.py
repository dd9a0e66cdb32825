"""Rows in, journal records out: one thread that keeps the server busy.

The thread owns the client, the queue and the journal's writing end; the watch (in the task's main thread) owns time,
health and the server's life, and the two talk through `commands` and `events`. So an exception that a
signal handler raises lands in the watch, never between two steps of the sending. Invariants: a row is in exactly one
place (input, queue, in flight, doubtful, suspects, journal); at most `limit` rows are in flight.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from queue import SimpleQueue
from typing import Any

from airflow_provider_vllm.batch import packing
from airflow_provider_vllm.batch.answers import (
    TAIL,
    Check,
    InvalidOutput,
    Kind,
    NotAnAnswer,
    answer,
    bad_row_line,
    classify,
    error_line,
    server_message,
)
from airflow_provider_vllm.batch.client import Client, Reply
from airflow_provider_vllm.batch.compact import IntMap
from airflow_provider_vllm.batch.endpoint import Endpoint
from airflow_provider_vllm.batch.journal import Journal
from airflow_provider_vllm.batch.records import END, head
from airflow_provider_vllm.batch.rows import PACKABLE, BadRow, Row
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.batch.verdict import backoff, reason_to_fail
from airflow_provider_vllm.exceptions import BatchFailed

POLL = 0.05
SKIPS_PER_TURN = 5000
SUSPECT_DEATHS = 2


@dataclass
class Stats:
    """Numbers that the sender writes and the watch reads."""

    done: int = 0
    ok: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    reused: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    retries: int = 0
    in_flight: int = 0
    limit: int = 0
    pack: int = 1
    read: int = 0
    samples: list[str] = field(default_factory=list)

    @property
    def errors(self) -> int:
        return self.done - self.ok

    @property
    def outcomes(self) -> dict[str, int]:
        """Rows per outcome; adds up to `done`."""
        return {"ok": self.ok, **self.failed}


@dataclass(frozen=True)
class Trouble:
    """Rows failed in a way that a dead server explains: the watch looks at its health."""

    reason: str


@dataclass(frozen=True)
class NeedServer:
    """The server is given up and rows are left: the watch brings one back."""

    reason: str


@dataclass(frozen=True)
class Ended:
    """The thread is over; `failure` says why when rows are left."""

    failure: BaseException | None


@dataclass(frozen=True)
class Healthy:
    """Command: the server answered; doubtful rows failed on their own."""


@dataclass(frozen=True)
class Lost:
    """Command: the server is dead or frozen; give up what is in flight."""

    reason: str


@dataclass(frozen=True)
class Connect:
    """Command: send to this endpoint from now on."""

    endpoint: Endpoint


class Sender(threading.Thread):
    """Sends every row of `rows` and journals how each ended."""

    def __init__(
        self,
        spec: BatchSpec,
        rows: Iterator[Row | BadRow],
        journal: Journal,
        answered: IntMap | None,
        endpoint: Endpoint,
        *,
        total: int | None,
        limit: int,
        pack: int = 1,
        check: Check | None = None,
    ) -> None:
        super().__init__(name="vllm-batch-sender", daemon=True)
        self.stats = Stats(limit=limit, pack=pack)
        self.events: SimpleQueue[Any] = SimpleQueue()
        self.commands: deque[Any] = deque()
        self._stopped = False
        self._spec, self._input, self._journal = spec, rows, journal
        self._add = journal.add
        self._answered, self._total, self._check = answered, total, check
        self._client: Client | None = self._connect(endpoint)
        self._exhausted = False
        self._returned: deque[Row] = deque()
        self._parcels: deque[list[Row]] = deque()
        self._retries: list[tuple[float, int, Row]] = []
        self._ticket = 0
        self._doubtful: list[tuple[Row, Kind, str]] = []
        self._suspects: deque[Row] = deque()
        self._alone: Row | None = None
        self._asked = False
        self._paused = False
        self._failed_in_a_row = 0
        self._failure: BaseException | None = None

    # called by the watch

    def stop(self, timeout: float = 10.0) -> None:
        """Give up what is in flight, flush the journal, end the thread."""
        self._stopped = True
        if self.is_alive():
            self.join(timeout)

    # the thread

    def run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self._failure = error
        finally:
            try:
                self._journal.flush()
            except BatchFailed as error:
                self._failure = self._failure or error
            if self._client is not None:
                self._client.close()
            self.events.put(Ended(self._failure))

    def _loop(self) -> None:
        settle, flush = self._settle_all, self._journal.flush
        while not self._stopped and self._failure is None:
            if self.commands:
                self._obey(self.commands.popleft())
                continue
            if self._client is None:
                time.sleep(POLL)
                continue
            if not self._paused:
                self._fill()
            settle(*self._client.poll(POLL))
            flush()
            if self._finished():
                return

    def _finished(self) -> bool:
        waiting = (
            self._returned or self._parcels or self._retries or self._doubtful or self._suspects
        )
        return self._exhausted and not self.stats.in_flight and not waiting

    def _connect(self, endpoint: Endpoint) -> Client:
        return Client(endpoint, self._spec.request_timeout, min(self.stats.limit, 1024))

    # choosing what to send

    def _fill(self) -> None:
        stats = self.stats
        if self._plain and not (self._retries or self._returned or self._parcels):
            self._fill_fast(stats.limit - stats.in_flight)
        while stats.in_flight < stats.limit:
            if self._parcels:
                self._send(self._parcels.popleft())
                continue
            room = stats.limit - stats.in_flight
            if stats.pack > 1 and stats.in_flight and room < min(stats.pack, stats.limit):
                return
            row = self._next()
            if row is None:
                return
            if stats.pack > 1 and row.params is not None:
                self._send(self._gather(row))
            else:
                self._send_one(row)

    def _fill_fast(self, room: int) -> None:
        """The usual case, new rows one to a request, without a call for each step."""
        assert self._client is not None
        send, stats, sent, read = self._client.send, self.stats, 0, 0
        for row in islice(self._input, max(room, 0)):
            read += 1
            if type(row) is Row:
                send(row.url, row.body, row)
                sent += 1
            else:
                self._end_badly(row, "invalid_input", bad_row_line(row), row.message)
        stats.in_flight += sent
        stats.read += read

    @property
    def _plain(self) -> bool:
        return self._answered is None and self.stats.pack == 1 and not self._exhausted

    def _gather(self, first: Row) -> list[Row]:
        """More rows that fit into the pack of `first`."""
        rows, stats = [first], self.stats
        while len(rows) < min(stats.pack, stats.limit - stats.in_flight):
            row = self._next()
            if row is None:
                break
            if row.params != first.params or row.url != first.url or row is self._alone:
                self._returned.appendleft(row)
                break
            rows.append(row)
        return rows

    def _send(self, rows: list[Row]) -> None:
        if len(rows) == 1:
            self._send_one(rows[0])
            return
        url, body = packing.join(rows)
        self.stats.in_flight += len(rows)
        assert self._client is not None
        self._client.send(url, body, rows)

    def _send_one(self, row: Row) -> None:
        self.stats.in_flight += 1
        assert self._client is not None
        self._client.send(row.url, row.body, row)

    def _next(self) -> Row | None:
        """The next row to send, or None when there is none right now."""
        if self._retries and self._retries[0][0] <= time.monotonic():
            return heapq.heappop(self._retries)[2]
        if self._returned:
            return self._returned.popleft()
        if not self._exhausted:
            return self._pull()
        if self._suspects and not (self.stats.in_flight or self._retries or self._doubtful):
            self._alone = self._suspects.popleft()
            return self._alone
        return None

    def _pull(self) -> Row | None:
        """The next row of the input that has no answer yet."""
        stats = self.stats
        for _ in range(SKIPS_PER_TURN):
            row = next(self._input, None)
            if row is None:
                self._exhausted = True
                return self._next() if self._suspects else None
            stats.read += 1
            if isinstance(row, BadRow):
                self._end_badly(row, "invalid_input", bad_row_line(row), row.message)
                if self._failure is not None:
                    return None
            elif (
                self._answered is not None
                and (at := self._answered.get(int(row.key, 16))) is not None
            ):
                self._reuse(row, at)
            else:
                return row
        return None

    def _reuse(self, row: Row, position: int) -> None:
        self._journal.claim(row.number, position)
        self.stats.reused += 1
        self.stats.done += 1
        self.stats.ok += 1

    # what came back

    def _settle_all(self, good: list[tuple[Any, bytes]], others: list[Reply]) -> None:
        if good:
            self._failed_in_a_row = 0
        settle = self._settle_good
        for tag, body in good:
            if type(tag) is list:
                self.stats.in_flight -= len(tag)
                self._settle_good_pack(tag, body)
            else:
                self.stats.in_flight -= 1
                settle(tag, body)
        for reply in others:
            if type(reply.tag) is list:
                self.stats.in_flight -= len(reply.tag)
                self._settle_bad_pack(reply.tag, reply)
            else:
                self.stats.in_flight -= 1
                self._settle_bad(reply.tag, reply)

    def _settle_good(self, row: Row, raw: bytes, sums: tuple[int, int] | None = None) -> None:
        try:
            start, body, prompt_tokens, completion_tokens = answer(row, raw, self._check, sums)
        except NotAnAnswer as error:
            self._again(row, f"HTTP 200, but {error}")
            return
        except InvalidOutput as error:
            line = error_line(row, "invalid_output", str(error), status=200, body=raw)
            self._end_badly(row, "invalid_output", line, str(error))
            return
        self._add(row.number, True, start, body, TAIL)
        stats = self.stats
        stats.done += 1
        stats.ok += 1
        stats.prompt_tokens += prompt_tokens
        stats.completion_tokens += completion_tokens

    def _settle_bad(self, row: Row, reply: Reply) -> None:
        kind, message = classify(reply), server_message(reply)
        if kind is Kind.REJECTED:
            line = error_line(
                row, f"http_{reply.status}", message, status=reply.status, body=reply.body
            )
            self._failed_in_a_row = 0
            self._end_badly(row, "rejected", line, message)
        elif kind is Kind.FATAL:
            self._journal.flush()
            self._returned.append(row)
            self._failure = self._failure or _fatal(reply, message)
        elif kind is Kind.BUSY:
            self._wait(row, message, reply)
        elif kind is Kind.TIMEOUT:
            self._again(row, message, code="timeout")
        else:
            self._doubt(row, kind, message)

    def _settle_good_pack(self, rows: list[Row], raw: bytes) -> None:
        try:
            bodies, prompt_tokens, completion_tokens = packing.split(rows, raw)
        except NotAnAnswer:
            self._halve(rows)
            return
        sums = (prompt_tokens, completion_tokens)
        for row, body in zip(rows, bodies, strict=True):
            self._settle_good(row, body, sums)
            sums = (0, 0)

    def _settle_bad_pack(self, rows: list[Row], reply: Reply) -> None:
        kind, url = classify(reply), rows[0].url
        if kind is Kind.REJECTED:
            if reply.status in (404, 405, 501) and url != PACKABLE[url]:
                self.stats.pack = 1  # the server does not offer packs, or not for this model
            self._halve(rows)
            return
        for row in rows:
            if kind is not Kind.UNSENT:
                row.params = None  # alone from now on
            self._settle_bad(row, reply)

    def _halve(self, rows: list[Row]) -> None:
        """Send a failed pack again in two parts, down to single rows."""
        middle = len(rows) // 2 if self.stats.pack > 1 else 1
        parts = (rows[:middle], rows[middle:]) if self.stats.pack > 1 else [[row] for row in rows]
        self.stats.retries += 1
        self._parcels.extend(list(part) for part in parts)

    # failed rows

    def _again(
        self, row: Row, message: str, *, code: str = "failed", retry_after: float = 0.0
    ) -> None:
        """Send a row again after a pause, unless it has had its tries."""
        row.attempts += 1
        row.params = None
        if row.attempts > self._spec.max_retries:
            text = f"{message} (tried {row.attempts} times)"
            self._end_badly(row, "failed", error_line(row, code, text), text)
            return
        self._later(row, backoff(row.attempts, retry_after=retry_after, jitter=random.random()))

    def _wait(self, row: Row, message: str, reply: Reply) -> None:
        """The server asked for patience: not a failed try, until it has lasted `request_timeout`."""
        now = time.monotonic()
        row.busy_since = row.busy_since or now
        waited = now - row.busy_since
        if waited > self._spec.request_timeout:
            text = f"{message} (for {waited:.0f} s)"
            self._end_badly(
                row,
                "failed",
                error_line(row, "busy", text, status=reply.status, body=reply.body),
                text,
            )
            return
        self._later(
            row,
            max(
                min(15.0, 0.5 + waited / 2) * (0.5 + random.random()), min(reply.retry_after, 120.0)
            ),
        )

    def _later(self, row: Row, seconds: float) -> None:
        self.stats.retries += 1
        self._ticket += 1
        heapq.heappush(self._retries, (time.monotonic() + seconds, self._ticket, row))

    def _doubt(self, row: Row, kind: Kind, message: str) -> None:
        """Keep a row aside until the watch knows whether the server is dead."""
        self._doubtful.append((row, kind, message))
        self._failed_in_a_row += 1
        if kind is Kind.UNSENT or self._failed_in_a_row >= 2:
            self._paused = True
        if not self._asked:
            self._asked = True
            self.events.put(Trouble(message))

    def _end_badly(self, row: Row | BadRow, outcome: str, line: bytes, message: str) -> None:
        self._journal.add(row.number, False, head(row.key, row.number, outcome.encode()), line, END)
        stats = self.stats
        stats.done += 1
        stats.failed[outcome] += 1
        if len(stats.samples) < 5:
            stats.samples.append(f"{row.custom_id}: {message[:300]}")
        reason = reason_to_fail(
            done=stats.done,
            errors=stats.errors,
            total=self._total,
            max_error_rate=self._spec.max_error_rate,
            max_errors=self._spec.max_errors,
            finished=False,
        )
        if reason is not None and self._failure is None:
            self._failure = BatchFailed(reason)

    # commands

    def _obey(self, command: Any) -> None:
        if isinstance(command, Healthy):
            self._cleared()
        elif isinstance(command, Lost):
            self._give_up(command.reason)
        elif isinstance(command, Connect):
            self._client = self._connect(command.endpoint)
            self._asked = self._paused = False
            self._failed_in_a_row = 0

    def _cleared(self) -> None:
        """The server lives: what failed, failed on its own."""
        doubtful, self._doubtful = self._doubtful, []
        self._asked = self._paused = False
        self._failed_in_a_row = 0
        for row, kind, message in doubtful:
            self._again(row, message, code="unreachable" if kind is Kind.UNSENT else "failed")

    def _give_up(self, reason: str) -> None:
        """The server is lost: everything that it had goes back, and rows that saw two losses are suspect."""
        assert self._client is not None
        hit: list[Row] = []
        for tag in self._client.abort():
            hit.extend(tag if type(tag) is list else [tag])
        hit.extend(row for row, kind, _ in self._doubtful if kind is not Kind.UNSENT)
        unsent = [row for row, kind, _ in self._doubtful if kind is Kind.UNSENT]
        self._doubtful = []
        self._client.close()
        self._client = None
        self.stats.in_flight = 0
        for row in unsent:
            self._return(row, reason, hit=False)
        for row in hit:
            self._return(row, reason, hit=True)
        self._journal.flush()
        if self._failure is None and not self._finished():
            self.events.put(NeedServer(reason))
        elif self._failure is None:
            self._stopped = True

    def _return(self, row: Row, reason: str, *, hit: bool) -> None:
        row.deaths += hit
        if hit and row is self._alone:
            text = f"the server died {row.deaths} times with this row in flight, the last time with it alone: {reason}"
            self._end_badly(row, "suspect", error_line(row, "suspect", text), text)
        elif row.deaths >= SUSPECT_DEATHS:
            row.params = None
            self._suspects.append(row)
        else:
            self.stats.retries += hit
            self._returned.append(row)


def _fatal(reply: Reply, message: str) -> BatchFailed:
    if reply.error:
        return BatchFailed(
            f"the server cannot be spoken to: {message}; check the URL, certificate and proxy settings"
        )
    return BatchFailed(f"the server refuses this key: {message}; check the connection's password")
