"""Rows in, journal records out: one thread that keeps the server busy.

The thread owns the client, the waiting rows and the journal's writing end; the watch, in the task's
main thread, owns time, health and the server's life. The two talk by `commands` and `events`. So what
a signal handler raises lands in the watch, never between two steps of the sending. Invariants: a row
is waiting, in flight, doubtful or ended; at most `stats.limit` rows are in flight.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Any

from airflow_provider_vllm.batch import packing, tuning
from airflow_provider_vllm.batch.ahead import Ahead, Direct
from airflow_provider_vllm.batch.answers import (
    Check,
)
from airflow_provider_vllm.batch.client import Client, most_connections
from airflow_provider_vllm.batch.endpoint import Endpoint
from airflow_provider_vllm.batch.health import Vitals
from airflow_provider_vllm.batch.journal import Earlier, Journal
from airflow_provider_vllm.batch.ledger import Ledger
from airflow_provider_vllm.batch.losses import Losses
from airflow_provider_vllm.batch.replies import Replies
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
from airflow_provider_vllm.batch.waiting import SKIPS_PER_TURN, Waiting
from airflow_provider_vllm.exceptions import BatchFailed, VllmError

POLL = 0.05
TUNE_EVERY = 0.1
# New rows go out several at a time: each request by itself wakes the server, which on few cores, beside an engine that
# spins, takes the core from us until the next tick of the kernel (10 ms), for seconds on end.
REFILL = 16
REFILL_S = 0.03


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
        self._replies = Replies(
            spec, self._waiting, self._ledger, self.stats, may_pack=may_pack, ask=self._ask
        )
        self._client: Client | None = None
        self._stopped = False
        self._filled = 0.0
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
        except BaseException as error:
            self._failure = _as_failure(error)
        for last in (self._settle_rest, self._ledger.flush, self._waiting.close, self._close):
            try:
                last()
            except BaseException as error:  # the watch waits for the end
                self._failure = self._failure or _as_failure(error)
        self.events.put(Ended(self._failure or self._replies.failure or self._ledger.verdict))

    def _ask(self, reason: str) -> None:
        self.events.put(Trouble(reason))

    def _settle_rest(self) -> None:
        if self._client is not None:
            self._replies.settle_rest(self._client.rest)

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _loop(self) -> None:
        replies, flush = self._replies, self._ledger.flush
        while not (self._stopped or self._is_over):
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
            if not replies.paused:
                self._fill(self._client, now)
            # Where all that were read are answered or bad, there are more to read at once.
            new = self.stats.read - read
            skipped = new >= SKIPS_PER_TURN or (new > 0 and self._idle)
            replies.settle(*self._client.poll(0.0 if skipped else self._wait))
            flush()
            if replies.no_packs and self.stats.pack > 1:
                self._no_packs()
            if self._idle and not self._waiting:
                return

    @property
    def _is_over(self) -> bool:
        """Whether the batch has failed, however many rows are left."""
        return self._replies.failure is not None or self._ledger.verdict is not None

    def _connect(self, endpoint: Endpoint) -> Client:
        self._ledger.begins(endpoint)
        self._replies.new_server(time.monotonic())
        return Client(endpoint, self._spec.request_timeout, min(self.stats.limit, 1024))

    def _tune(self, now: float) -> None:
        self._tune_at = now + TUNE_EVERY
        if self._replies.paused or not (self._tuning.may_pack or self._tuning.may_grow):
            return
        self._tuning = tuning.advance(self._tuning, self._sample(now))
        self._use(self._tuning.now_used)

    def _sample(self, now: float) -> tuning.Sample:
        stats, waiting = self.stats, self.vitals.waiting
        return tuning.Sample(now, stats.sent, waiting, stats.preemptions)

    @property
    def concurrency(self) -> int:
        """How many rows are sent at once at last."""
        return int(min(self.stats.limit, self._replies.refusals.size))

    def _use(self, setting: tuning.Setting) -> None:
        self.stats.limit, self.stats.pack = setting.limit, setting.pack

    # Sending.

    @property
    def _idle(self) -> bool:
        """Whether there is nothing to come back, and so nothing to miss by waiting for a row."""
        return not (self.stats.in_flight or self._replies.are_doubtful)

    def _fill(self, client: Client, now: float) -> None:
        stats, waiting, replies = self.stats, self._waiting, self._replies
        waiting.pauses.wake(now)
        if stats.pack == 1 and waiting.only_new:
            most, _ = self._replies.refusals.most(stats.limit, stats.in_flight, 0, now)
            if self._few_fit(most, now):
                self._wait = self._filled + REFILL_S - now
                return
            self._filled = now
            self._fill_with_new(client, most)
        # A row that was refused keeps its place while it pauses: else the next one would be refused there, and so on.
        pausing = waiting.pauses.refused
        most, is_probe = self._replies.refusals.most(stats.limit, stats.in_flight, pausing, now)
        while (room := most - stats.in_flight) > 0:
            if waiting.parcels:
                if stats.in_flight and room < min(len(waiting.parcels[0]), most):
                    return  # wait for room for all of it
                self._send(client, waiting.take_parcel(room))
                continue
            if stats.pack > 1 and stats.in_flight and room < min(stats.pack, most):
                return  # wait for room for a whole pack
            row = waiting.take(self._idle, new_first=is_probe)
            if row is None:
                hurried, replies.freed = waiting.pauses.hurry(replies.freed), 0
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

    def _no_packs(self) -> None:
        """The server does not offer them, or not for this model."""
        self._tuning = tuning.without_packs(self._tuning, self._sample(time.monotonic()))
        self._use(self._tuning.now_used)

    # Commands of the watch.

    def _obey(self, command: Any) -> None:
        if isinstance(command, Healthy):
            if self._replies.acquit(command.before):
                self._after_a_gap()
        elif isinstance(command, Lost):
            self._give_up(command.reason)
        elif isinstance(command, Connect):
            self._client = self._connect(command.endpoint)
            self._after_a_gap()

    def _after_a_gap(self) -> None:
        """A gap in the sending is not to be taken for slowness."""
        self._tuning = tuning.after_a_gap(self._tuning, self._sample(time.monotonic()))
        self._use(self._tuning.now_used)

    def _give_up(self, reason: str) -> None:
        """The server is lost: what it had goes back; rows that saw two losses are suspect."""
        assert self._client is not None
        self._replies.settle_rest(self._client.rest)
        hit = self._replies.bereaved(self._client.abort())
        self._client.close()
        self._client = None
        self.stats.in_flight = 0
        hit.sort(key=lambda row: row.number)  # in whatever order they failed
        by_row = self._losses.happened(hit, reason)
        self._ledger.flush()
        if self._waiting and not self._is_over:
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
