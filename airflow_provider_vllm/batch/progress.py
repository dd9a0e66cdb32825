"""Counts and a clock in, a line for the task log out. Pure."""

from __future__ import annotations

from typing import Any

from airflow_provider_vllm import metrics
from airflow_provider_vllm.batch.health import Vitals
from airflow_provider_vllm.batch.signals import Stats


class Progress:
    """Speeds are of the time since the last report, the time left of the whole run.

    `tokens_per_second` counts those of rows that are done; `server_tokens_per_second` all that the server
    generates, for others too, by its own counter (None where it has none, or a new server began at 0).
    """

    def __init__(self, total: int, now: float) -> None:
        self._total = total
        self._began = self._last = now
        self._last_done = self._last_tokens = 0
        self._seen: tuple[float, float] | None = None
        self._last_seen: tuple[float, float] | None = None

    def see(self, vitals: Vitals, now: float) -> None:
        """A look at the server's metrics."""
        generated = metrics.total(vitals.samples, "generation_tokens")
        if generated is None:
            return
        self._seen = (now, generated)
        if self._last_seen is None or generated < self._last_seen[1]:
            self._last_seen = self._seen

    def report(self, stats: Stats, vitals: Vitals, now: float) -> tuple[str, dict[str, Any]]:
        """The line, and the same as numbers."""
        sent, tokens = stats.sent, stats.prompt_tokens + stats.completion_tokens
        span = max(now - self._last, 1e-6)
        rows_per_s, tokens_per_s = (
            (sent - self._last_done) / span,
            (tokens - self._last_tokens) / span,
        )
        average = sent / max(now - self._began, 1e-6)
        left = None if average <= 0 else (self._total - stats.done) / average
        self._last, self._last_done, self._last_tokens = now, sent, tokens
        numbers = {
            "done": stats.done,
            "total": self._total,
            "errors": stats.errors,
            "reused": stats.reused,
            "in_flight": stats.in_flight,
            "rows_per_second": round(rows_per_s, 1),
            "tokens_per_second": round(tokens_per_s, 1),
            "server_tokens_per_second": self._generation(),
            "running": vitals.running,
            "waiting": vitals.waiting,
            "seconds_left": None if left is None else round(left),
        }
        return self._line(numbers), numbers

    def _generation(self) -> float | None:
        """Tokens per second between the looks that two reports knew."""
        seen, last = self._seen, self._last_seen
        if seen is None or last is None or seen[0] <= last[0]:
            return None
        self._last_seen = seen
        return round((seen[1] - last[1]) / (seen[0] - last[0]), 1)

    @staticmethod
    def _line(n: dict[str, Any]) -> str:
        server = (
            f", server running {n['running']} waiting {n['waiting']}"
            if n["running"] is not None
            else ""
        )
        if n["server_tokens_per_second"]:
            server += f" generating {n['server_tokens_per_second']:.0f} tokens/s"
        left = "" if n["seconds_left"] is None else f", about {clock(n['seconds_left'])} left"
        return (
            f"{n['done']}/{n['total']} rows, {n['rows_per_second']:.1f} rows/s, {n['tokens_per_second']:.0f} tokens/s, "
            f"{n['in_flight']} in flight{server}, {n['errors']} errors{left}"
        )


def clock(seconds: float) -> str:
    """`5 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
