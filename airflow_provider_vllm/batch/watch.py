"""The task's main thread while rows are sent: progress, lease, health, and the server's life.

Invariants: nothing here touches the waiting rows or the journal's order, so an exception raised by a
signal handler may unwind it at any point; a frozen engine is found by time without movement and
confirmed by a probe, never by health alone.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from typing import Any

from airflow_provider_vllm.batch import health
from airflow_provider_vllm.batch.client import out_of_files
from airflow_provider_vllm.batch.endpoint import Endpoint, ServerLink
from airflow_provider_vllm.batch.health import Movement, Vitals
from airflow_provider_vllm.batch.journal import Journal
from airflow_provider_vllm.batch.places import spans
from airflow_provider_vllm.batch.progress import Progress
from airflow_provider_vllm.batch.readings import Readings
from airflow_provider_vllm.batch.row import Row
from airflow_provider_vllm.batch.sender import Sender
from airflow_provider_vllm.batch.signals import (
    Connect,
    Ended,
    Healthy,
    Lost,
    NeedServer,
    Trouble,
)
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import BatchFailed, NoFreeGpu, ServerError

HEALTH_LOOKS = 3
HEALTH_PAUSE = 0.3
LOOK_EVERY = 2.0
OnProgress = Callable[[dict[str, Any]], None]


class Watch:
    """Runs beside a started `Sender` until it has ended."""

    def __init__(
        self,
        spec: BatchSpec,
        link: ServerLink,
        endpoint: Endpoint,
        sender: Sender,
        journal: Journal,
        log: logging.Logger,
        progress: Progress,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._spec, self._link, self._endpoint = spec, link, endpoint
        self._sender, self._journal, self._log = sender, journal, log
        self._progress, self._on_progress = progress, on_progress
        self._lost = False
        self._last_preemptions: int | None = None
        self.readings = Readings()
        self.losses = self.restarts = 0

    def run(self) -> None:
        """Returns when every row has ended. Raises BatchFailed, NoFreeGpu, or what a signal handler raises."""
        now = time.monotonic()
        self._began = now
        self._movement = Movement(now, 0, None)
        self._next_sync = now + self._spec.journal_sync
        self._next_look = now + min(1.0, self._spec.progress_interval)
        self._next_report = now + min(2.0, self._spec.progress_interval)
        tick = min(
            1.0, self._spec.journal_sync, self._spec.stall_timeout / 4, self._spec.progress_interval
        )
        self._count_preemptions(self._look())
        while True:
            try:
                event = self._sender.events.get(timeout=tick)
            except queue.Empty:
                event = None
            if isinstance(event, Ended):
                if event.failure is not None:
                    raise event.failure
                if not self._lost:
                    self._count_preemptions(self._look())
                return
            if isinstance(event, Trouble):
                self._check(event.reason)
            elif isinstance(event, NeedServer):
                self._recover(event)
            self._tick(time.monotonic())

    def _tick(self, now: float) -> None:
        if now >= self._next_sync:
            self._journal.sync()
            self._next_sync = now + self._spec.journal_sync
        if self._lost:
            return
        stats = self._sender.stats
        if now >= self._next_look:
            self._next_look = now + min(LOOK_EVERY, self._spec.progress_interval)
            vitals = self._sender.vitals = self._look()
            self.readings.add(vitals.samples)
            self._progress.see(vitals, now)
            self._count_preemptions(vitals)
            self._see(vitals.moved, now)
        else:
            self._see(self._movement.moved, now)
        if now >= self._next_report:
            self._next_report = now + self._spec.progress_interval
            self._report(now, self._sender.vitals)
        if stats.in_flight and self._is_stalled(now):
            self._suspect_freeze(now)

    def _look(self) -> Vitals:
        """Where nothing comes back any more, looking must not take longer than the patience with it."""
        if not self._endpoint.base_url:
            return Vitals()  # nothing is left to send, so nobody was asked for a server
        patience = min(health.LOOK_TIMEOUT, self._spec.stall_timeout)
        return health.look(self._endpoint, patience)

    def _is_stalled(self, now: float) -> bool:
        return health.is_stalled(self._movement, now=now, patience=self._patience())

    def _patience(self) -> float:
        """Seconds without movement that are too many.

        Counters of the engine move with every step. Without them only whole rows are seen, and five times
        the usual row (in flight / rows per second, up to the last movement) is waited for. In any case it is over
        before the rows in flight have all timed out, and are sent anew.
        """
        stats, most = self._sender.stats, self._spec.request_timeout / 2
        least = min(self._spec.stall_timeout, most)
        if self._movement.moved is not None:
            return least
        sent = stats.sent
        if not sent:
            return most
        moved = self._movement.at - self._began
        return min(most, max(least, 5 * stats.in_flight * moved / sent))

    def _see(self, moved: float | None, now: float) -> None:
        stats = self._sender.stats
        self._movement = health.observe(
            self._movement, done=stats.done, in_flight=stats.in_flight, moved=moved, now=now
        )

    def _count_preemptions(self, vitals: Vitals) -> None:
        if vitals.preemptions is None:
            return
        before = self._last_preemptions
        if before is not None and vitals.preemptions > before:
            self._sender.stats.preemptions += vitals.preemptions - before
        self._last_preemptions = vitals.preemptions

    def _report(self, now: float, vitals: Vitals) -> None:
        line, numbers = self._progress.report(self._sender.stats, vitals, now)
        self._log.info(line)
        self._link.renew()
        if self._on_progress is not None:
            self._on_progress(numbers)

    def _check(self, reason: str) -> None:
        """Rows failed: the server is dead when one of a few looks says so (an engine's death shows 0.2 s late)."""
        if self._lost:
            return
        began = time.monotonic()
        for look in range(HEALTH_LOOKS):
            if look:
                time.sleep(HEALTH_PAUSE)
            began = time.monotonic()
            wrong = health.is_healthy(self._endpoint)
            if wrong is None:
                continue
            if self._starved():
                break
            if time.monotonic() - began > health.LOOK_TIMEOUT / 2:
                began = time.monotonic()
                wrong = self._fails_probe()  # its HTTP server may only be busy
            if wrong is not None:
                self._lose(f"{reason}; {wrong}")
                return
        self._sender.commands.append(Healthy(began - HEALTH_PAUSE))

    def _starved(self) -> bool:
        """Wait while this process can open no connection: that says nothing of the server."""
        if not out_of_files():
            return False
        self._log.warning(
            "This process can open no more files or connections (ulimit -n); waiting for some to be closed"
        )
        now = time.monotonic()
        deadline = now + self._spec.request_timeout
        while out_of_files() and now < deadline:
            time.sleep(HEALTH_PAUSE)
            if (now := time.monotonic()) >= self._next_report:
                self._next_report = now + self._spec.progress_interval
                self._report(now, self._sender.vitals)
        return True

    def _suspect_freeze(self, now: float) -> None:
        """Nothing has moved for too long: counters first, then one token."""
        self._see(self._look().moved, now)
        if not self._is_stalled(now):
            return
        stalled = now - self._movement.at
        self._log.warning(
            "Nothing has moved for %.0f s with rows in flight; probing with one token", stalled
        )
        wrong = self._fails_probe()
        if wrong is None:
            self._log.info("The server is not frozen: the rows in flight are only slow")
            self._movement = Movement(
                time.monotonic(), self._sender.stats.done, self._movement.moved
            )
            return
        self._lose(f"no row and no counter moved for {stalled:.0f} s, and {wrong}")

    def _fails_probe(self) -> str | None:
        """What a one-token probe met; None where it, or a row meanwhile, was answered, or it could not be sent."""
        done = self._sender.stats.done
        wrong = self._probe(self._endpoint)
        if wrong is None or self._sender.stats.done != done or self._starved():
            return None
        return f"a one-token probe failed: {wrong}"

    def _probe(self, endpoint: Endpoint) -> str | None:
        model = self._spec.model or endpoint.model
        return health.probe(endpoint, self._sender.url, model, self._spec.probe_timeout)

    def _wrong(self, endpoint: Endpoint) -> str | None:
        """What a server that is waited for still lacks. One that works for others is back, though its queue is long."""
        if (wrong := health.is_healthy(endpoint)) is not None:
            return wrong
        moved = health.look(endpoint).moved
        wrong = self._probe(endpoint)
        is_busy = moved is not None and health.look(endpoint).moved not in (None, moved)
        return None if is_busy else wrong

    def _lose(self, reason: str) -> None:
        self._lost = True
        self.losses += 1
        self._log.warning("The server is lost: %s", reason)
        self._sender.commands.append(Lost(reason))

    def _recover(self, event: NeedServer) -> None:
        left, lost = self._sender.stats, self._endpoint
        self._journal.sync()  # a start takes minutes
        self._say_in_flight(event.in_flight)
        self._log.info("Bringing the server back; %d rows are done, the others wait", left.done)
        try:
            self._endpoint = self._link.recover(
                event.reason, by_row=event.by_row, probe=self._wrong
            )
        except NoFreeGpu:
            raise  # whoever called may wait for one, and come back for the rows that are left
        except ServerError as error:
            raise BatchFailed(f"the server was lost and did not come back: {error}") from error
        self._lost = False
        self.restarts += 1
        self._last_preemptions = None
        self._count_preemptions(self._look())
        self._movement = Movement(time.monotonic(), left.done, None)
        self._log.info("The server is back at %s", self._endpoint.base_url)
        if not self._endpoint.answers_like(lost):
            self._log.warning(
                "It is not the server that was lost: %s (fingerprint %s) answers from here on, where %s (%s) did. "
                "`answered_by` in the manifest counts the rows of each; a retry asks for this one's again",
                self._endpoint.model,
                self._endpoint.fingerprint or "unknown",
                lost.model,
                lost.fingerprint or "unknown",
            )
        self._sender.commands.append(Connect(self._endpoint))

    def _say_in_flight(self, rows: tuple[Row, ...]) -> None:
        """Which rows the lost server had: one of them may have been its end."""
        if not rows:
            return
        sizes = [len(row.body) for row in rows]
        self._log.info(
            "%d rows were in flight and go back to the queue: %s (requests of %d to %d bytes)",
            len(rows),
            spans((row.source, row.line) for row in sorted(rows, key=lambda row: row.number)),
            min(sizes),
            max(sizes),
        )
