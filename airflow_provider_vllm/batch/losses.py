"""The rows that a lost server had in flight in, what becomes of each out.

A row that saw two losses is suspect: it is sent again alone, when all others are done, and where the server is lost
once more it is to blame. Invariant: every row goes back to the waiting ones, or ends.
"""

from __future__ import annotations

from airflow_provider_vllm.batch.journal import PROVEN
from airflow_provider_vllm.batch.ledger import Ledger
from airflow_provider_vllm.batch.row import Row
from airflow_provider_vllm.batch.signals import Stats
from airflow_provider_vllm.batch.waiting import SUSPECT_DEATHS, Waiting


class Losses:
    """Those of one try."""

    def __init__(self, waiting: Waiting, ledger: Ledger, stats: Stats) -> None:
        self._waiting, self._ledger, self._stats = waiting, ledger, stats
        self._answered_at_blame = -1  # rows that were, when last a row was to blame

    def happened(self, hit: list[Row], reason: str) -> bool:
        """The server was lost with these rows in flight; whether one of them is to blame."""
        by_row = self._is_by_row(hit)
        for row in hit:
            self._bereave(row, reason)
        return by_row

    def _is_by_row(self, hit: list[Row]) -> bool:
        """Whether a row that was alone is to blame: not where nothing was answered since the last such loss."""
        if not hit or hit[0] is not self._waiting.alone:
            return False
        before, self._answered_at_blame = self._answered_at_blame, self._stats.ok
        return before != self._stats.ok

    def _bereave(self, row: Row, reason: str) -> None:
        """One more server was lost with this row in flight."""
        row.deaths += 1
        self._ledger.lost(row)
        if row is self._waiting.alone:
            self._end_suspect(row, reason)
        elif row.deaths >= SUSPECT_DEATHS:
            self._stats.retries += 1
            self._waiting.suspect(row)
        else:
            self._stats.retries += 1
            self._waiting.put_back(row)

    def _end_suspect(self, row: Row, reason: str) -> None:
        """It took the server down alone. Where it had in an earlier try, others that had are believed to do it, too."""
        if row.deaths <= PROVEN:
            text = f"the server was lost {row.deaths} times with this row in flight, at last alone: {reason}"
            self._blame(row, text)
            return
        again = "the server was lost with this row alone in flight, in an earlier try and now again"
        self._blame(row, f"{again}: {reason}")
        for other in self._waiting.take_deadly():
            text = "the server was lost in an earlier try with this row alone in flight; it was not sent again, since "
            self._blame(
                other, f"{text}{row.custom_id}, of the same kind, took the server down again"
            )

    def _blame(self, row: Row, text: str) -> None:
        self._ledger.failed(row, "suspect", "suspect", text)
