"""Refusals and answers of one server in, how many rows it is asked at once and how long a row waits out. Pure.

A server that says 429 is not asked for more than it took: what it held at the last refusal is the most, and answers
raise that slowly. So about one request in sixteen is refused by a server that stays as it is, whatever number is
allowed, and a row whose pause is over finds a place.
"""

from __future__ import annotations

import math

from airflow_provider_vllm.batch.row import Row

GROWTH = 1 / 16  # by each answer
ROUNDS = 4  # of answers to grow by one, where that is more
LONGEST = 15.0  # seconds of a pause, by our own choice
LONGEST_ASKED = 120.0  # and by the server's


class Refusals:
    """`size` is the number of rows that it takes, without bound until it refuses one. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self.size = math.inf
        self._began = now
        self._since = 0.0  # when it began to refuse, with nothing answered since

    def answered(self, rows: int) -> None:
        if rows:
            self._since = 0.0
            self.size += rows * max(GROWTH, 1 / (ROUNDS * self.size))

    def refused(self, held: int) -> None:
        """`held` rows were with the server and not refused."""
        self.size = float(max(1, held))

    def most(self, limit: int, pausing: int) -> int:
        """How many may be in flight, where `pausing` rows that were refused wait for their next try."""
        return int(min(self.size, limit - pausing))

    def waited(self, row: Row, now: float) -> float:
        """How long this row was refused, or every row, where that is longer: else each would be waited for anew."""
        row.busy_since = row.busy_since or now
        self._since = self._since or now
        return now - max(min(row.busy_since, self._since), self._began)


def pause(waited: float, asked: float, *, jitter: float) -> float:
    """Seconds until the next try of a row; `asked` is what the server said, `jitter` a random number in [0, 1)."""
    own = min(LONGEST, 0.5 + waited / 2) * (0.5 + jitter)
    return max(own, min(asked, LONGEST_ASKED))
