"""Rows that wait for their next try, each for its own time.

Two kinds: of those that failed, or were told by the server how long to wait, none goes before its time; of those whose
pause is a guess, because a server without room said nothing of it, one may go for each place that is seen to be free.
"""

from __future__ import annotations

import heapq
from collections import deque

from airflow_provider_vllm.batch.row import Row

ROW_BYTES = 1 << 9  # of a row beside its request


class Pauses:
    """Times are monotonic seconds. `refused` counts the rows that the server refused and whose pause is not over."""

    def __init__(self) -> None:
        self._due: deque[Row] = deque()  # their pause is over
        self._told: list[tuple[float, int, Row, bool]] = []
        self._guessed: list[tuple[float, int, Row, bool]] = []
        self._tickets = 0
        self.refused = 0
        self.bytes = 0

    def __bool__(self) -> bool:
        return bool(self._due or self._told or self._guessed)

    def __len__(self) -> int:
        return len(self._due) + len(self._told) + len(self._guessed)

    def put(self, row: Row, until: float, *, refused: bool = False, guessed: bool = False) -> None:
        """Again, but not before `until`; where that is `guessed`, `hurry` may have it go at once."""
        self._tickets += 1
        self.bytes += len(row.body) + ROW_BYTES
        self.refused += refused
        heap = self._guessed if guessed else self._told
        heapq.heappush(heap, (until, self._tickets, row, refused))

    def wake(self, now: float) -> None:
        """Let the rows go whose pause is over."""
        for heap in (self._told, self._guessed):
            while heap and heap[0][0] <= now:
                self._end_first(heap)

    def hurry(self, most: int) -> bool:
        """Let up to so many rows more go now; False where none may."""
        for _ in range(min(most, len(self._guessed))):
            self._end_first(self._guessed)
        return bool(self._due)

    def end_refused(self) -> None:
        """Let all rows go that were refused, however long they were told to wait: another server has come."""
        for heap in (self._told, self._guessed):
            self._due.extend(row for _, _, row, refused in sorted(heap) if refused)
            heap[:] = [each for each in heap if not each[3]]
            heapq.heapify(heap)
        self.refused = 0

    def _end_first(self, heap: list[tuple[float, int, Row, bool]]) -> None:
        _, _, row, refused = heapq.heappop(heap)
        self.refused -= refused
        self._due.append(row)

    def take(self) -> Row | None:
        """A row that may go."""
        if not self._due:
            return None
        row = self._due.popleft()
        self.bytes -= len(row.body) + ROW_BYTES
        return row
