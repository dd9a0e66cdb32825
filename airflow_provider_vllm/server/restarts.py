"""How often a lost server is started again: its life so far goes in, yes or no comes out.

Counted are deaths in a row. A server that has served for SERVED_S counts as a new one: a batch of days survives
a death now and then, and one whose server dies again and again ends soon. A death that one row is to blame for is not
counted: that row is not sent again.
"""

from __future__ import annotations

# As long as Kubernetes lets a container run before it forgets its crashes.
SERVED_S = 600.0


class Restarts:
    """`allowed` deaths in a row. Times are monotonic seconds."""

    def __init__(self, allowed: int) -> None:
        self._allowed = self._left = allowed
        self._serving_since: float | None = None

    def serves(self, now: float) -> None:
        """The server is ready."""
        self._serving_since = now

    def take(self, now: float, *, by_row: bool = False) -> bool:
        """The server was lost, `by_row` through a row that was alone in flight; whether it may be started again."""
        if self._serving_since is not None and now - self._serving_since >= SERVED_S:
            self._left = self._allowed
        self._serving_since = None
        if by_row:
            return self._allowed > 0
        self._left -= 1
        return self._left >= 0
