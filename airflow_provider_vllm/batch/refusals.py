"""Refusals and answers of one server in, how many rows it is asked at once and how long a row waits out. Pure.

Each refusal takes one off what may be in flight, but never what the server holds, and each answer gives half of one
back: a server of fixed capacity is kept full and refuses a third of the requests, and one that refuses some for other
reasons (one busy replica of three) is not asked for less. A row that is refused much more often than those that are
answered says nothing of the load: it may be too large for the server, for ever. Where nothing is answered, rows that
pause keep their places, or new ones would be refused there, one after the other.
"""

from __future__ import annotations

import math

from airflow_provider_vllm.batch.row import Row

GROWTH = 0.5  # by each answer, where so large a part is in flight
USED = 0.8
# So many refusals more than a usual row's say nothing of the load.
USUAL, TIMES_USUAL = 3, 4
MANY = 1 << 30
MEMORY = 64  # answers that say what is usual
SETTLED_S = 0.2  # until all is known that was refused at once
PROBE_S = 1.0  # between two new rows for a server that has answered nothing since it refused
FIRST, LONGEST = 0.5, 15.0  # seconds of a pause, by our own choice
LONGEST_ASKED = 120.0  # and by the server's


class Refusals:
    """`size` is the number of rows that it takes, without bound until it refuses one. Times are monotonic seconds."""

    def __init__(self, began: float) -> None:
        self.size = math.inf
        self._began = began
        self._since = 0.0  # when it began to refuse, with no sign since that it takes rows
        self._told = 0  # refusals that are not settled yet: since when, and what was seen since
        self._told_at, self._least, self._has_answered = 0.0, 0, False
        self._usual = 0.0  # of a row until it is answered
        self._probe_at = 0.0

    def answered(self, rows: int, held: int, refusals: int = 0) -> None:
        """So many of `held` rows, which had been refused so often before."""
        self._since, self._has_answered = 0.0, True
        if held + self._told + 1 >= USED * self.size:  # else it is not known to be good for more
            self.size += rows * GROWTH
        if rows:
            self._usual += (refusals / rows - self._usual) * min(1.0, rows / MEMORY)

    def works(self) -> None:
        """It answered, well or not."""
        self._since = 0.0

    def refused(self, row: Row, now: float) -> float:
        """Seconds that this row was, or every row if that is longer: or each would be waited for anew."""
        if row.refused_since != self._began:  # another server's say nothing of this one
            row.refused_since, row.refusals, row.paused = self._began, 0, 0.0
        row.refusals += 1
        if row.refusals <= USUAL + TIMES_USUAL * self._usual:
            if not self._told:
                self._told_at, self._least, self._has_answered = now, MANY, False
            self._told += 1
        if not self._since:
            self._since, self._probe_at = now, now + PROBE_S
        return max(row.paused, now - self._since)

    @property
    def is_settled(self) -> bool:
        """Whether nothing else was refused at the same moment."""
        return not self._told

    def settle(self, limit: int, in_flight: int, now: float) -> None:
        """To be called often: what is still in flight when all refusals of a moment have come, the server holds."""
        if not self._told:
            return
        self._least = min(self._least, in_flight)
        if now < self._told_at + SETTLED_S:
            return
        # One that refuses everything for a while says nothing of how many it takes.
        if self._least or self._has_answered:
            self.size = max(1, self._least, min(self.size, limit) - self._told)
        self._told = 0

    def most(self, limit: int, in_flight: int, pausing: int, now: float) -> tuple[int, bool]:
        """How many may be in flight, where `pausing` rows that were refused wait; whether one of them is a probe.

        A probe should be of a row that was not refused yet.
        """
        most = int(min(self.size, limit)) - self._told
        if not self._since:
            return max(1, most), False
        most = min(most, limit - pausing)
        if most <= in_flight < limit and now >= self._probe_at:
            self._probe_at = now + PROBE_S
            return in_flight + 1, True
        return most, False


def pause(row: Row, asked: float, *, alone: bool, jitter: float) -> float:
    """Seconds until the next try of a row; `asked` is what the server said, `jitter` a random number in [0, 1).

    `alone` says that nothing else was in flight: else others may have taken the place, and it costs no patience.
    Alone it pauses half as long as it did so far, whatever it met among others.
    """
    grown = row.paused / 2 if alone else FIRST * 1.5 ** min(row.refusals - 1, 20)
    own = min(LONGEST, max(FIRST, grown)) * (0.5 + jitter)
    seconds = max(own, min(asked, LONGEST_ASKED))
    row.paused += seconds if alone else 0.0
    return seconds
