"""Rows in, journal records out: one thread that keeps the server busy.

The thread owns the client, the waiting rows and the journal's writing end; the watch, in the task's
main thread, owns time, health and the server's life. The two talk by `commands` and `events`. So what
a signal handler raises lands in the watch, never between two steps of the sending. Invariants: a row
is waiting, in flight, doubtful or ended; at most `stats.limit` rows are in flight.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import Any

from airflow_provider_vllm.batch import packing, tuning
from airflow_provider_vllm.batch.ahead import Ahead, Direct
from airflow_provider_vllm.batch.answers import (
    Check,
    InvalidOutput,
    Kind,
    NotAnAnswer,
    classify,
    fatal,
    server_message,
)
from airflow_provider_vllm.batch.client import Client, Reply, most_connections
from airflow_provider_vllm.batch.endpoint import Endpoint
from airflow_provider_vllm.batch.health import Vitals
from airflow_provider_vllm.batch.journal import Earlier, Journal
from airflow_provider_vllm.batch.ledger import Ledger
from airflow_provider_vllm.batch.losses import Losses
from airflow_provider_vllm.batch.refusals import Refusals, pause
from airflow_provider_vllm.batch.row import BadRow, Row
from airflow_provider_vllm.batch.rows import RowMaker
from airflow_provider_vllm.batch.signals import (
    Connect,
    Ended,
    Healthy,
    Lost,
    NeedServer,
    Stats,
    Trouble,
)
from airflow_provider_vllm.batch.sources import Record
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.batch.verdict import backoff
from airflow_provider_vllm.batch.waiting import SKIPS_PER_TURN, Waiting
from airflow_provider_vllm.exceptions import BatchFailed, VllmError

POLL = 0.05
TUNE_EVERY = 0.1
# New rows go out several at a time: each request by itself wakes the server, which on few cores, beside an engine that
# spins, takes the core from us until the next tick of the kernel (10 ms), for seconds on end.
REFILL = 16
REFILL_S = 0.03
HEALTHY_FOR = (
    5.0  # seconds that a look at the server's health is believed, where it says 503 to rows
)
GAP = 1.0  # seconds without sending that would spoil a measurement of the speed


class Sender(threading.Thread):
    """Sends every row of `records` that has no answer in `earlier`, and journals how each ended."""

    def __init__(
        self,
        spec: BatchSpec,
        records: Ahead[Record] | Direct[Record],
        maker: RowMaker,
        journal: Journal,
        earlier: Earlier | None,
        endpoint: Endpoint,
        *,
        total: int,
        may_pack: bool = False,
        short: bool = False,
        check: Check | None = None,
    ) -> None:
        super().__init__(name="vllm-batch-sender", daemon=True)
        self.events: SimpleQueue[Any] = SimpleQueue()
        self.commands: deque[Any] = deque()
        self.vitals = Vitals()
        most = most_connections()
        limit = min(tuning.START if spec.concurrency == "auto" else spec.concurrency, most)
        pack = (tuning.PACK if short else 1) if spec.pack == "auto" else spec.pack
        self.stats = Stats(limit=limit, pack=pack if may_pack else 1)
        self._may_pack = may_pack
        self._tuning = tuning.begin(
            tuning.Setting(limit, self.stats.pack),
            tuning.Sample(time.monotonic(), 0),
            may_pack=may_pack and spec.pack == "auto",
            may_grow=spec.concurrency == "auto",
            most=most,
        )
        self._tune_at = 0.0
        self._spec, self._endpoint = spec, endpoint
        self._ledger = Ledger(spec, journal, self.stats, total, check)
        self._maker = maker
        self._waiting = Waiting(records, maker, self._ledger, self.stats, earlier)
        self._losses = Losses(self._waiting, self._ledger, self.stats)
        self._refusals = Refusals(0.0)
        self._client: Client | None = None
        self._doubtful: list[tuple[Row, Reply]] = []
        self._asked = self._paused = self._stopped = False
        self._failed_in_a_row = 0
        self._paused_at = 0.0
        self._filled = 0.0
        self._healthy_until = 0.0
        self._freed = 0  # places by the answers that came last
        self._wait = POLL  # for answers, before there is something else to do
        self._failure: BaseException | None = None

    @property
    def url(self) -> str:
        """Where the row that was made last goes: a probe there asks the same engine in the same way."""
        return self._maker.url

    def stop(self, timeout: float = 10.0) -> None:
        """Called by the watch: give up what is in flight, flush the journal, end the thread."""
        self._stopped = True
        if self.is_alive():
            self.join(timeout)

    def run(self) -> None:
        try:
            self._client = self._connect(self._endpoint)
            self._loop()
            if self._client is not None:
                self._settle_rest(self._client)
        except BaseException as error:
            self._failure = self._failure or _as_failure(error)
        for last in (self._ledger.flush, self._waiting.close, self._close):
            try:
                last()
            except BaseException as error:  # the watch waits for the end
                self._failure = self._failure or _as_failure(error)
        self.events.put(Ended(self._failure or self._ledger.verdict))

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _loop(self) -> None:
        settle, flush = self._settle, self._ledger.flush
        while not (self._stopped or self._failure or self._ledger.verdict):
            if self.commands:
                self._obey(self.commands.popleft())
                continue
            if self._client is None:
                time.sleep(POLL)
                continue
            now = time.monotonic()
            if now >= self._tune_at:
                self._tune(now)
            read, self._wait = self.stats.read, POLL
            if not self._paused:
                self._fill(self._client, now)
            # Where all that were read are answered or bad, there are more to read at once.
            new = self.stats.read - read
            skipped = new >= SKIPS_PER_TURN or (new > 0 and self._idle)
            settle(*self._client.poll(0.0 if skipped else self._wait))
            flush()
            if self._idle and not self._waiting:
                return

    def _connect(self, endpoint: Endpoint) -> Client:
        self._ledger.begins(endpoint)
        self._refusals = Refusals(time.monotonic())
        return Client(endpoint, self._spec.request_timeout, min(self.stats.limit, 1024))

    def _tune(self, now: float) -> None:
        self._tune_at = now + TUNE_EVERY
        if self._paused or not (self._tuning.may_pack or self._tuning.may_grow):
            return
        self._tuning = tuning.advance(self._tuning, self._sample(now))
        self._use(self._tuning.now_used)

    def _sample(self, now: float) -> tuning.Sample:
        stats, waiting = self.stats, self.vitals.waiting
        rows = stats.done - stats.reused
        return tuning.Sample(now, rows, waiting, stats.preemptions)

    @property
    def concurrency(self) -> int:
        """How many rows are sent at once at last."""
        return int(min(self.stats.limit, self._refusals.size))

    def _use(self, setting: tuning.Setting) -> None:
        self.stats.limit, self.stats.pack = setting.limit, setting.pack

    # Sending.

    @property
    def _idle(self) -> bool:
        """Whether there is nothing to come back, and so nothing to miss by waiting for a row."""
        return not (self.stats.in_flight or self._doubtful)

    def _fill(self, client: Client, now: float) -> None:
        stats, waiting = self.stats, self._waiting
        waiting.pauses.wake(now)
        if stats.pack == 1 and waiting.only_new:
            most, _ = self._refusals.most(stats.limit, stats.in_flight, 0, now)
            if self._few_fit(most, now):
                self._wait = self._filled + REFILL_S - now
                return
            self._filled = now
            self._fill_with_new(client, most)
        # A row that was refused keeps its place while it pauses: else the next one would be refused there, and so on.
        pausing = waiting.pauses.refused
        most, is_probe = self._refusals.most(stats.limit, stats.in_flight, pausing, now)
        while (room := most - stats.in_flight) > 0:
            if waiting.parcels:
                self._send(client, waiting.parcels.popleft())
                continue
            if stats.pack > 1 and stats.in_flight and room < min(stats.pack, most):
                return  # wait for room for a whole pack
            row = waiting.take(self._idle, new_first=is_probe)
            if row is None:
                hurried, self._freed = waiting.pauses.hurry(self._freed), 0
                if hurried:
                    continue
                return
            if stats.pack > 1 and row.params is not None:
                self._send(client, self._gather(row, min(stats.pack, room)))
            else:
                self._send(client, [row])

    def _few_fit(self, most: int, now: float) -> bool:
        """Whether there is room for some new rows, and more room is worth a moment of waiting."""
        room = most - self.stats.in_flight
        few = 0 < room < min(REFILL, most // 8)
        return few and now < self._filled + REFILL_S

    def _fill_with_new(self, client: Client, most: int) -> None:
        """The usual case, without a call for each step."""
        send, stats = client.send, self.stats
        left = SKIPS_PER_TURN  # bad rows make no one wait for room
        while (room := min(most - stats.in_flight, left)) > 0:
            if not (rows := self._waiting.take_new(room, self._idle)):
                return
            left -= len(rows)
            for row in rows:
                if type(row) is Row:
                    stats.in_flight += 1
                    send(row.url, row.body, row)
                elif isinstance(row, BadRow):
                    self._ledger.invalid(row)
            if self._ledger.verdict is not None:
                return

    def _gather(self, first: Row, most: int) -> list[Row]:
        """Up to `most` rows that fit into one request with the first."""
        rows = [first]
        while len(rows) < most:
            row = self._waiting.take(False)
            if row is None:
                break
            if row.params != first.params or row.url != first.url:
                self._waiting.give_back(row)
                break
            rows.append(row)
        return rows

    def _send(self, client: Client, rows: list[Row]) -> None:
        self.stats.in_flight += len(rows)
        if len(rows) == 1:
            client.send(rows[0].url, rows[0].body, rows[0])
        else:
            client.send(*packing.join(rows), rows)

    # What came back.

    def _settle(self, good: list[tuple[Any, bytes]], others: list[Reply]) -> None:
        stats, alone = self.stats, good
        held, self._freed = stats.in_flight, 0
        if good:
            self._failed_in_a_row = 0
            if self._may_pack:
                alone = [(tag, body) for tag, body in good if type(tag) is Row]
                for tag, body in good:
                    if type(tag) is list:
                        stats.in_flight -= len(tag)
                        self._settle_pack(tag, body)
            stats.in_flight -= len(alone)
            for row, body, error in self._ledger.answered(alone):
                self._settle_wrong(row, body, error)
            self._freed = held - stats.in_flight
            before = sum(row.refusals for row in _rows_of(good)) if stats.refused else 0
            self._refusals.answered(self._freed, held, before)
        for reply in others:
            kind = self._kind(reply)
            self._failed_in_a_row += kind in (Kind.UNSENT, Kind.DOUBTFUL)
            if type(reply.tag) is list:
                stats.in_flight -= len(reply.tag)
                self._settle_bad_pack(reply.tag, reply, kind)
            else:
                stats.in_flight -= 1
                self._settle_bad(reply.tag, reply, kind)
        self._refusals.settle(stats.limit, stats.in_flight, time.monotonic())

    def _settle_rest(self, client: Client) -> None:
        """At an end: what has come whole is kept, and the watch, which knows, is told of no trouble."""
        self._asked = True
        self._settle(*client.rest())

    def _settle_wrong(self, row: Row, raw: bytes, error: NotAnAnswer | InvalidOutput) -> None:
        """Status 200, but no answer, or one that breaks the schema."""
        if isinstance(error, NotAnAnswer):
            self._again(row, f"HTTP 200, but {error}")
            return
        kind = "invalid_output"
        self._ledger.failed(row, kind, kind, str(error), status=200, body=raw)

    def _settle_pack(self, rows: list[Row], raw: bytes) -> None:
        try:
            bodies, prompt_tokens, completion_tokens = packing.split(rows, raw)
        except NotAnAnswer:
            self._halve(rows)
            return
        sums = (prompt_tokens, completion_tokens)
        replies = zip(rows, bodies, strict=True)
        for row, body, error in self._ledger.answered(replies, sums):
            self._settle_wrong(row, body, error)

    def _settle_bad(self, row: Row, reply: Reply, kind: Kind) -> None:
        message = server_message(reply)
        if kind is Kind.REJECTED:
            self._failed_in_a_row = 0
            self._refusals.works()
            self._reject(row, reply, message)
        elif kind is Kind.FATAL:
            self._failure = self._failure or fatal(reply, message)
        elif kind is Kind.BUSY:
            self._refused(row, message, reply)
        elif kind is Kind.TIMEOUT:
            self._again(row, message, code="timeout")
        else:
            self._doubt(row, reply)

    def _reject(self, row: Row, reply: Reply, message: str) -> None:
        if reply.error:
            self._ledger.failed(row, "rejected", "answer_too_large", message)
            return
        code, status = f"http_{reply.status}", reply.status
        self._ledger.failed(row, "rejected", code, message, status=status, body=reply.body)

    def _kind(self, reply: Reply) -> Kind:
        """503 is the word of a dying server and of a busy one; of one that was healthy just now, it is the latter."""
        busy = reply.status == 503 and time.monotonic() < self._healthy_until
        return Kind.BUSY if busy else classify(reply)

    def _settle_bad_pack(self, rows: list[Row], reply: Reply, kind: Kind) -> None:
        if kind is Kind.REJECTED:
            if packing.not_offered(reply, rows[0].url):
                self._no_packs()
            self._halve(rows)
            return
        for row in rows:
            if kind not in (Kind.UNSENT, Kind.BUSY) and reply.status != 503:
                row.params = None  # alone from now on
            self._settle_bad(row, reply, kind)

    def _no_packs(self) -> None:
        """The server does not offer them, or not for this model."""
        self._tuning = tuning.without_packs(self._tuning, self._sample(time.monotonic()))
        self._use(self._tuning.now_used)

    def _halve(self, rows: list[Row]) -> None:
        """Send a failed pack again in parts, down to single rows."""
        self.stats.retries += 1
        middle = len(rows) // 2 if self.stats.pack > 1 else 1
        parts = [rows[at : at + middle] for at in range(0, len(rows), middle)]
        self._waiting.parcels.extend(parts)

    # Failed rows.

    def _again(self, row: Row, message: str, *, code: str = "failed") -> None:
        """Send a row again after a pause, unless it has had its tries."""
        row.attempts += 1
        row.params = None
        if row.attempts > self._spec.max_retries:
            text = f"{message} (tried {row.attempts} times)"
            self._ledger.failed(row, "failed", code, text)
            return
        self.stats.retries += 1
        until = time.monotonic() + backoff(row.attempts, jitter=random.random())
        self._waiting.pauses.put(row, until)

    def _refused(self, row: Row, message: str, reply: Reply) -> None:
        """The server asks for patience: no failed try, until it has for `request_timeout`, this row or every row."""
        self.stats.refused += 1
        waited = self._refusals.refused(row, time.monotonic())
        if waited > self._spec.request_timeout:
            text = f"{message} (for {waited:.0f} s)"
            status, body = reply.status, reply.body
            self._ledger.failed(row, "failed", "busy", text, status=status, body=body)
            return
        alone = not self.stats.in_flight
        seconds = pause(row, reply.retry_after, alone=alone, jitter=random.random())
        self.stats.retries += 1
        until, guessed = time.monotonic() + seconds, reply.retry_after <= 0
        self._waiting.pauses.put(row, until, refused=True, guessed=guessed)

    def _doubt(self, row: Row, reply: Reply) -> None:
        """Keep a row aside until the watch knows whether the server is dead."""
        self._doubtful.append((row, reply))
        if not self._paused and (classify(reply) is Kind.UNSENT or self._failed_in_a_row >= 2):
            self._paused, self._paused_at = True, time.monotonic()
        if not self._asked:
            self._asked = True
            self.events.put(Trouble(server_message(reply)))

    # Commands of the watch.

    def _obey(self, command: Any) -> None:
        if isinstance(command, Healthy):
            self._healthy_until = time.monotonic() + HEALTHY_FOR
            gap = self._paused and time.monotonic() > self._paused_at + GAP
            for row, reply in self._resume(gap=gap):
                self._try_again(row, reply)
        elif isinstance(command, Lost):
            self._give_up(command.reason)
        elif isinstance(command, Connect):
            self._client = self._connect(command.endpoint)
            self._waiting.pauses.end_refused()
            self._healthy_until = 0.0
            self._resume(gap=True)

    def _try_again(self, row: Row, reply: Reply) -> None:
        """A doubtful row of a server that lives: it failed on its own."""
        message = server_message(reply)
        if reply.status == 503:  # not dead, so too busy
            self._refused(row, message, reply)
        else:
            unsent = classify(reply) is Kind.UNSENT
            self._again(row, message, code="unreachable" if unsent else "failed")

    def _resume(self, *, gap: bool) -> list[tuple[Row, Reply]]:
        """Send on; returns the doubtful rows. A `gap` in the sending is not to be taken for slowness."""
        if gap:
            self._tuning = tuning.after_a_gap(self._tuning, self._sample(time.monotonic()))
            self._use(self._tuning.now_used)
        doubtful, self._doubtful = self._doubtful, []
        self._asked = self._paused = False
        self._failed_in_a_row = 0
        return doubtful

    def _give_up(self, reason: str) -> None:
        """The server is lost: what it had goes back; rows that saw two losses are suspect."""
        assert self._client is not None
        self._settle_rest(self._client)
        hit = list(_rows_of((tag, b"") for tag in self._client.abort()))
        for row, reply in self._doubtful:
            if classify(reply) is Kind.UNSENT:
                self._waiting.put_back(row)
            else:
                hit.append(row)
        self._doubtful.clear()
        self._client.close()
        self._client = None
        self.stats.in_flight = 0
        hit.sort(key=lambda row: row.number)  # in whatever order they failed
        by_row = self._losses.happened(hit, reason)
        self._ledger.flush()
        if self._waiting and not (self._failure or self._ledger.verdict):
            self.events.put(NeedServer(reason, tuple(hit), by_row))
        else:
            self._stopped = True


def _as_failure(error: BaseException) -> BaseException:
    if isinstance(error, VllmError) or not isinstance(error, Exception):
        return error
    failure = BatchFailed(
        f"the sending broke down: {type(error).__name__}: {error}; the rows answered so far are kept: retry, and "
        "report it where that does not help"
    )
    failure.__cause__ = error
    return failure


def _rows_of(replies: Iterable[tuple[Any, bytes]]) -> Iterator[Row]:
    """The rows that were asked, alone or in packs."""
    for tag, _ in replies:
        yield from tag if type(tag) is list else (tag,)
