"""The rows that are not in flight, and which of them goes next.

In this order: rows whose pause after a failure is over, rows that came back from a lost server, new rows
of the input, and at the end suspects, each alone, those that have proven deadly before the last of all. Invariant:
a row is in one place only.
"""

from __future__ import annotations

from collections import deque

from airflow_provider_vllm.batch.ahead import Ahead, Direct
from airflow_provider_vllm.batch.journal import PROVEN, Earlier
from airflow_provider_vllm.batch.ledger import Ledger
from airflow_provider_vllm.batch.pauses import Pauses
from airflow_provider_vllm.batch.row import BadRow, Row
from airflow_provider_vllm.batch.rows import RowMaker
from airflow_provider_vllm.batch.signals import Stats
from airflow_provider_vllm.batch.sources import Record
from airflow_provider_vllm.exceptions import BatchFailed, VllmError

SKIPS_PER_TURN = 1000
SUSPECT_DEATHS = 2
# Where a server refuses everything for a while, every row of the input would come to wait for its next try.
PAUSING_BYTES = 1 << 26


class Waiting:
    """`earlier` is what earlier tries know of the rows."""

    def __init__(
        self,
        records: Ahead[Record] | Direct[Record],
        maker: RowMaker,
        ledger: Ledger,
        stats: Stats,
        earlier: Earlier | None,
    ) -> None:
        self._input, self._maker = records, maker
        self._ledger, self._stats, self._earlier = ledger, stats, earlier
        self._returned: deque[Row] = deque()
        self.pauses = Pauses()
        self._suspects: deque[Row] = deque()
        self._deadly: deque[Row] = deque()
        self.parcels: deque[list[Row]] = deque()  # parts of failed packs, sent as they are
        self.alone: Row | None = None  # the suspect that is, or was last, in flight by itself

    def __bool__(self) -> bool:
        return not self._input.ended or bool(
            self._returned or self.pauses or self._suspects or self._deadly or self.parcels
        )

    @property
    def only_new(self) -> bool:
        """Whether `take_new` may be used."""
        return self._earlier is None and not (
            self._input.ended or self._returned or self.pauses or self.parcels
        )

    def take_new(self, most: int, idle: bool) -> list[Row | BadRow]:
        """New rows as they come, in bulk; empty at the end of the input, and where none is ready and `idle` is not."""
        try:
            records = self._input.take(most, wait=idle and not self.pauses)
        except VllmError:
            raise
        except Exception as error:  # object stores have errors of their own
            raise BatchFailed(
                f"the input cannot be read on: {type(error).__name__}: {error}; see that it can be, and retry"
            ) from error
        rows = self._maker.make(records)
        self._stats.read += len(rows)
        return rows

    def take(self, idle: bool, *, new_first: bool = False) -> Row | None:
        """The next row, or None when none may be sent right now.

        `idle` says that nothing is in flight or doubtful, so that a suspect would be alone.
        """
        if new_first and not self._input.ended and (new := self._take_new(False)) is not None:
            return new
        if (row := self.pauses.take()) is not None:
            return row
        if self._returned:
            return self._returned.popleft()
        if not self._input.ended and self._has_room and (new := self._take_new(idle)) is not None:
            return new
        alone = self._suspects or self._deadly
        if idle and self._input.ended and alone and not (self.pauses or self.parcels):
            self.alone = alone.popleft()
            return self.alone
        return None

    @property
    def _has_room(self) -> bool:
        """Whether so few rows wait for another try that new ones may come to it."""
        return self.pauses.bytes < PAUSING_BYTES or len(self.pauses) < self._stats.limit

    def _take_new(self, idle: bool) -> Row | None:
        """The next new row without an answer; gives up after many that have one."""
        for _ in range(SKIPS_PER_TURN):
            if not (taken := self.take_new(1, idle)):
                return None
            row = taken[0]
            if isinstance(row, BadRow):
                self._ledger.invalid(row)
            elif not self._known(row):
                return row
            if self._ledger.verdict is not None:
                return None
        return None

    def _known(self, row: Row) -> bool:
        """Whether a row needs no sending now: it is answered, or took part in too many losses."""
        if self._earlier is None:
            return False
        at = self._earlier.answers.get(int(row.key, 16))
        if at is not None and self._ledger.is_still_good(at):
            self._ledger.reused(row, at)
            return True
        row.deaths = self._earlier.deaths.get(row.key, 0)
        if row.deaths >= SUSPECT_DEATHS:
            self.suspect(row)
        return row.deaths >= SUSPECT_DEATHS

    def take_parcel(self, most: int) -> list[Row]:
        """The next part of a failed pack, up to so many rows of it."""
        parcel = self.parcels.popleft()
        if len(parcel) > most:
            self.parcels.appendleft(parcel[most:])
        return parcel[:most]

    def give_back(self, row: Row) -> None:
        """Not sent after all: next time."""
        self._returned.appendleft(row)

    def put_back(self, row: Row) -> None:
        """Back from a lost server."""
        self._returned.append(row)

    def suspect(self, row: Row) -> None:
        """Alone, when everything else is done."""
        row.params = None
        (self._suspects if row.deaths < PROVEN else self._deadly).append(row)

    def take_deadly(self) -> list[Row]:
        """The rows that took a server down alone in an earlier try, and were not sent in this one."""
        rows = list(self._deadly)
        self._deadly.clear()
        return rows

    def close(self) -> None:
        self._input.close()
        self._ledger.close()
