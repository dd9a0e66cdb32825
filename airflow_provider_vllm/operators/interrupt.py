"""Making a kill unwind `execute()`.

Airflow calls `on_kill` in the signal handler of the main thread and gives it about five seconds; it does not
interrupt `execute()` by itself. Here `on_kill` first says what must not wait (end the server that this
try started), then raises, so that `finally` blocks run and a retry applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from airflow_provider_vllm.exceptions import TaskInterrupted


class Interruptible:
    """Mixin of the operators that own a process while they work."""

    _abandon: Callable[[], None] | None = None

    @contextmanager
    def interruptible(self, abandon: Callable[[], None] = lambda: None) -> Iterator[None]:
        """While inside, a kill calls `abandon` and raises TaskInterrupted."""
        self._abandon = abandon
        try:
            yield
        finally:
            self._abandon = None

    def on_kill(self) -> None:
        abandon, self._abandon = self._abandon, None
        if abandon is None:
            return
        abandon()
        raise TaskInterrupted(
            "The task was killed: it was marked or cleared, its run ended, or its worker shut down. "
            "What this try had started was told to end; answered rows are kept for the next try."
        )
