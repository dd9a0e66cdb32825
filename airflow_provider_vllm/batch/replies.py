"""Replies in, where each row goes next out: it ends, pauses for another try, or is doubtful.

Doubtful is a row that failed as on a dead server: the watch looks at that, and says `acquit` where it lives; where it
does not, the rows are among those that a lost server had. Invariant: every row of a reply goes to one place.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from airflow_provider_vllm.batch import packing
from airflow_provider_vllm.batch.answers import InvalidOutput, NotAnAnswer
from airflow_provider_vllm.batch.ledger import Ledger
from airflow_provider_vllm.batch.refusals import Refusals, pause
from airflow_provider_vllm.batch.reply import Kind, Reply, classify, fatal, server_message
from airflow_provider_vllm.batch.row import Row
from airflow_provider_vllm.batch.signals import Stats
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.batch.verdict import backoff
from airflow_provider_vllm.batch.waiting import Waiting
from airflow_provider_vllm.exceptions import BatchFailed

# Seconds that a look at the server's health is believed, where it says 503 to rows.
HEALTHY_FOR = 5.0
GAP = 1.0  # seconds without sending that would spoil a measurement of the speed


class Doubtful(NamedTuple):
    """A row, how it failed, and when (monotonic seconds)."""

    row: Row
    reply: Reply
    at: float


class Replies:
    """Those of one try. `ask` tells the watch why the server may be dead.

    `paused` says that nothing should be sent until it has looked; `freed` how many places the answers that came last
    left; `no_packs` that the server does not offer them; `failure` why no request can work.
    """

    def __init__(
        self,
        spec: BatchSpec,
        waiting: Waiting,
        ledger: Ledger,
        stats: Stats,
        *,
        may_pack: bool,
        ask: Callable[[str], None],
    ) -> None:
        self._spec, self._waiting, self._ledger, self._stats = spec, waiting, ledger, stats
        self._may_pack, self._ask = may_pack, ask
        self.refusals = Refusals(0.0)
        self.paused = self.no_packs = False
        self.freed = 0
        self.failure: BatchFailed | None = None
        self._doubtful: list[Doubtful] = []
        self._asked = False
        self._paused_at = 0.0
        self._failed_in_a_row = 0
        self._healthy_until = 0.0

    @property
    def are_doubtful(self) -> bool:
        """Whether there are rows that wait for the watch."""
        return bool(self._doubtful)

    # The word of the watch.

    def new_server(self, now: float) -> None:
        """What the one before refused, or said of itself, says nothing of this one."""
        self.refusals = Refusals(now)
        self._waiting.pauses.end_refused()
        self._healthy_until = 0.0
        self._go_on()

    def acquit(self, before: float) -> bool:
        """The server lives: the rows that had failed before this moment failed on their own.

        Those that failed later are asked about anew. Returns whether the sending had paused for so long that it would
        be taken for slowness.
        """
        now = time.monotonic()
        gap = self.paused and now > self._paused_at + GAP
        self._healthy_until = now + HEALTHY_FOR
        doubtful, self._doubtful = self._doubtful, []
        self._go_on()
        for each in doubtful:
            if each.at <= before:
                self._failed_alone(each.row, each.reply)
            else:
                self._failed_in_a_row += 1
                self._doubt(each.row, each.reply, each.at)
        return gap

    def bereaved(self, in_flight: Iterable[Any]) -> list[Row]:
        """The server is lost: the rows that it had. Those that never reached it go back at once."""
        hit = list(_rows_of(in_flight))
        for row, reply, _ in self._doubtful:
            if classify(reply) is Kind.UNSENT:
                self._waiting.put_back(row)
            else:
                hit.append(row)
        self._doubtful.clear()
        return hit

    def _go_on(self) -> None:
        self._asked = self.paused = False
        self._failed_in_a_row = 0

    # What came back.

    def settle(self, good: list[tuple[Any, bytes]], others: list[Reply]) -> None:
        """What a client's `poll` returned."""
        stats, alone = self._stats, good
        held, self.freed = stats.in_flight, 0
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
            self.freed = held - stats.in_flight
            asked = _rows_of(tag for tag, _ in good) if stats.refused else ()
            self.refusals.answered(self.freed, held, sum(row.refusals for row in asked))
        if others:
            self._settle_others(others, held, len(good))
        self.refusals.settle(stats.limit, stats.in_flight, time.monotonic())

    def settle_rest(self, rest: Callable[[], tuple[list[tuple[Any, bytes]], list[Reply]]]) -> None:
        """At an end: what has come whole is kept, and the watch, which knows, is told of no trouble."""
        self._asked = True
        self.settle(*rest())

    def _settle_others(self, others: list[Reply], held: int, answered: int) -> None:
        kinds = [self._kind(reply) for reply in others]
        answered += kinds.count(Kind.REJECTED)  # an answer, too
        failed = kinds.count(Kind.UNSENT) + kinds.count(Kind.DOUBTFUL)
        if answered:
            self._failed_in_a_row = 0
        if failed > answered:  # a few among many answers are not in a row
            self._failed_in_a_row += failed
        for reply, kind in zip(others, kinds, strict=True):
            if type(reply.tag) is list:
                self._stats.in_flight -= len(reply.tag)
                self._settle_bad_pack(reply.tag, reply, kind)
            else:
                self._stats.in_flight -= 1
                self._settle_bad(reply.tag, reply, kind, held == 1)

    def _kind(self, reply: Reply) -> Kind:
        """503 is the word of a dying server and of a busy one; of one that was healthy just now, it is the latter."""
        busy = reply.status == 503 and time.monotonic() < self._healthy_until
        return Kind.BUSY if busy else classify(reply)

    def _settle_wrong(self, row: Row, raw: bytes, error: NotAnAnswer | InvalidOutput) -> None:
        """Status 200, but no answer, or one that breaks the schema."""
        if isinstance(error, NotAnAnswer):
            self._again(row, f"HTTP 200, but {error}")
            return
        kind = "invalid_output"
        self._ledger.failed(row, kind, kind, str(error), status=200, body=raw)

    def _settle_bad(self, row: Row, reply: Reply, kind: Kind, alone: bool = False) -> None:
        message = server_message(reply)
        if kind is Kind.REJECTED:
            self.refusals.works()
            self._reject(row, reply, message)
        elif kind is Kind.FATAL:
            self.failure = self.failure or fatal(reply, message)
        elif kind is Kind.BUSY:
            self._refused(row, message, reply, alone)
        elif kind is Kind.TIMEOUT:
            self._again(row, message, code="timeout")
        else:
            self._doubt(row, reply, time.monotonic())

    # Packs.

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

    def _settle_bad_pack(self, rows: list[Row], reply: Reply, kind: Kind) -> None:
        not_offered = packing.not_offered(reply, rows[0].url)
        if kind is Kind.REJECTED or not_offered:
            self.refusals.works()
            self.no_packs = self.no_packs or not_offered
            self._halve(rows)
            return
        for row in rows:
            if kind not in (Kind.UNSENT, Kind.BUSY) and reply.status != 503:
                row.params = None  # alone from now on
            self._settle_bad(row, reply, kind)

    def _halve(self, rows: list[Row]) -> None:
        """Send a failed pack again in parts, down to single rows."""
        self._stats.retries += len(rows)
        middle = len(rows) // 2 if self._stats.pack > 1 and not self.no_packs else 1
        parts = [rows[at : at + middle] for at in range(0, len(rows), middle)]
        self._waiting.parcels.extend(parts)

    # Rows that failed.

    def _reject(self, row: Row, reply: Reply, message: str) -> None:
        if reply.fault is not None:
            self._ledger.failed(row, "rejected", "answer_too_large", message)
            return
        code, status = f"http_{reply.status}", reply.status
        self._ledger.failed(row, "rejected", code, message, status=status, body=reply.body)

    def _again(self, row: Row, message: str, *, code: str = "failed") -> None:
        """Send a row again after a pause, unless it has had its tries."""
        row.attempts += 1
        row.params = None
        if row.attempts > self._spec.max_retries:
            text = f"{message} (tried {row.attempts} times)"
            self._ledger.failed(row, "failed", code, text)
            return
        self._stats.retries += 1
        until = time.monotonic() + backoff(row.attempts, jitter=random.random())
        self._waiting.pauses.put(row, until)

    def _refused(self, row: Row, message: str, reply: Reply, alone: bool) -> None:
        """The server asks for patience: no failed try, until it has for `request_timeout`, this row or every row.

        `alone` says that this row was all that it had.
        """
        self._stats.refused += 1
        # Else it may be the last of many that came at once.
        alone = alone and self.refusals.is_settled
        waited = self.refusals.refused(row, time.monotonic())
        if waited > self._spec.request_timeout:
            text = f"{message} (for {waited:.0f} s)"
            status, body = reply.status, reply.body
            self._ledger.failed(row, "failed", "busy", text, status=status, body=body)
            return
        seconds = pause(row, reply.retry_after, alone=alone, jitter=random.random())
        self._stats.retries += 1
        until, guessed = time.monotonic() + seconds, reply.retry_after <= 0
        self._waiting.pauses.put(row, until, refused=True, guessed=guessed)

    def _doubt(self, row: Row, reply: Reply, at: float) -> None:
        """Keep a row aside until the watch knows whether the server is dead."""
        self._doubtful.append(Doubtful(row, reply, at))
        if not self.paused and (classify(reply) is Kind.UNSENT or self._failed_in_a_row >= 2):
            self.paused, self._paused_at = True, time.monotonic()
        if not self._asked:
            self._asked = True
            self._ask(server_message(reply))

    def _failed_alone(self, row: Row, reply: Reply) -> None:
        """A doubtful row of a server that lives."""
        message = server_message(reply)
        if reply.status == 503:  # not dead, so too busy
            self._refused(row, message, reply, False)
        else:
            unsent = classify(reply) is Kind.UNSENT
            self._again(row, message, code="unreachable" if unsent else "failed")


def _rows_of(tags: Iterable[Any]) -> Iterator[Row]:
    """The rows that were asked, alone or in packs."""
    for tag in tags:
        yield from tag if type(tag) is list else (tag,)
