"""Refusals and answers of one server in, how many rows it is asked at once and how long a row waits out. Pure.

Each refusal takes one off what may be in flight and each answer gives half of one back, so that a server of fixed
capacity is kept full and refuses a third of the requests at most, and one that refuses less than that for other reasons
(a row too large for it, one busy replica of three) is not asked for less. Where nothing is answered, rows that pause
keep their places, or new ones would be refused there, one after the other.
"""

from __future__ import annotations

import math

from airflow_provider_vllm.batch.row import Row

GROWTH = 0.5  # by each answer
LEAST_PART = 16  # of the limit: from there it is soon back after a storm
PRESSED = 0.75  # of the limit: below it, the limit is too high
PROBE_S = 1.0  # between two new rows for a server that has answered nothing since it refused
LONGEST = 15.0  # seconds of a pause, by our own choice
LONGEST_ASKED = 120.0  # and by the server's


class Refusals:
    """`size` is the number of rows that it takes, without bound until it refuses one. Times are monotonic seconds."""

    def __init__(self, began: float) -> None:
        self.size = math.inf
        self.pressed = 0  # refusals of a server that takes much less than the limit
        self._began = began
        self._since = 0.0  # when it began to refuse, with no sign since that it takes rows
        self._probe_at = 0.0

    def answered(self, rows: int) -> None:
        self._since = 0.0
        self.size += rows * GROWTH

    def works(self) -> None:
        """It answered, well or not."""
        self._since = 0.0

    def refused(self, rows: int, limit: int) -> None:
        """So many, where up to `limit` may be in flight."""
        self.size = max(1.0, limit / LEAST_PART, min(self.size, limit) - rows)
        if self.size < PRESSED * limit:
            self.pressed += rows

    def most(self, limit: int, pausing: int, now: float) -> int:
        """How many may be in flight, where `pausing` rows that were refused wait for their next try."""
        most = int(min(self.size, limit))
        if not self._since:
            return most
        most = min(most, limit - pausing)
        if most <= 0 and now >= self._probe_at:
            self._probe_at = now + PROBE_S
            return 1
        return most

    def waited(self, row: Row, now: float) -> float:
        """A row was refused: how long it was, or every row if that is longer, or each would be waited for anew."""
        if (
            row.refused_since != self._began
        ):  # another server, whose refusals say nothing of this one
            row.refused_since, row.refusals, row.paused = self._began, 0, 0.0
        row.refusals += 1
        if not self._since:
            self._since, self._probe_at = now, now + PROBE_S
        return max(row.paused, now - self._since)


def pause(row: Row, asked: float, *, alone: bool, jitter: float) -> float:
    """Seconds until the next try of a row; `asked` is what the server said, `jitter` a random number in [0, 1).

    `alone` says that nothing else was in flight: else others may have taken the place, and it costs no patience.
    """
    own = min(LONGEST, 0.5 * 1.5 ** min(row.refusals - 1, 20)) * (0.5 + jitter)
    seconds = max(own, min(asked, LONGEST_ASKED))
    row.paused += seconds if alone else 0.0
    return seconds
