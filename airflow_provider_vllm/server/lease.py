"""How long a server may live when nobody asks for its end.

Time is an argument everywhere (seconds of one monotonic clock). A lease is renewed by tasks and by
vLLM's counters moving; requests that merely run are no sign of life, since a frozen engine keeps them
running for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Lease:
    """`idle_timeout` and `max_lifetime` in seconds; `born` and `renewed` on the caller's clock."""

    idle_timeout: float
    max_lifetime: float | None
    born: float
    renewed: float

    @classmethod
    def start(cls, now: float, *, idle_timeout: float, max_lifetime: float | None) -> Lease:
        return cls(idle_timeout, max_lifetime, now, now)

    def renew(self, now: float, idle_timeout: float | None = None) -> Lease:
        """Renewed at `now`; with `idle_timeout`, that holds from here on."""
        return replace(self, renewed=now, idle_timeout=idle_timeout or self.idle_timeout)

    @property
    def until(self) -> float:
        """When it ends unless it is renewed."""
        idle_end = self.renewed + self.idle_timeout
        if self.max_lifetime is None:
            return idle_end
        return min(idle_end, self.born + self.max_lifetime)

    def ended(self, now: float) -> str | None:
        """Why it has ended at `now` (`idle`, `max_lifetime`), or None."""
        if self.max_lifetime is not None and now >= self.born + self.max_lifetime:
            return "max_lifetime"
        if now >= self.renewed + self.idle_timeout:
            return "idle"
        return None
