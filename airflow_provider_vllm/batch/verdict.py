"""Counts in, "go on" or the reason to fail out, and how it is said. Pure."""

from __future__ import annotations

from collections import Counter

from airflow_provider_vllm.batch.row import BadRow, Row, place_of

EARLY_ROWS = 50
SAMPLES = 5  # failed rows that a message names
MEND = "correct them, or allow more with max_error_rate or max_errors"
ALL_ALIKE = (
    "no row was answered, and all failed in one way: look first at what they share (sampling, batch, the model), and "
    "then at the rows"
)


def reason_to_fail(
    *,
    done: int,
    errors: int,
    total: int,
    max_error_rate: float,
    max_errors: int | None,
    finished: bool,
) -> str | None:
    """Why the batch fails, or None.

    Judged at the end; before it only from `EARLY_ROWS` rows on, and only when the rows still to come could not
    bring the rate down again. `max_errors` is judged at once, since no later row can lower a number.
    """
    if max_errors is not None and errors > max_errors:
        return f"{errors} rows failed, more than max_errors={max_errors}"
    rows = done if finished else total
    if not finished and done < EARLY_ROWS:
        return None
    if errors and errors / rows > max_error_rate:  # 0.29 * 100 is less than 29
        of = f"of {rows}" if finished else f"of the first {done} of {rows}"
        return f"{errors} {of} rows failed, more than max_error_rate={max_error_rate:g} allows"
    return None


def sample(row: Row | BadRow, message: str) -> str:
    """One failed row in a message: its name, its place, and what is wrong."""
    return f"{row.custom_id}: {place_of(row)}: {message[:300]}"


class Reasons:
    """Why rows failed, by the code of their error: how many, and the first few of each."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._samples: dict[str, list[str]] = {}

    def add(self, row: Row | BadRow, code: str, message: str) -> None:
        self._counts[code] += 1
        known = self._samples.setdefault(code, [])
        if len(known) < SAMPLES:
            known.append(sample(row, message))

    @property
    def are_one(self) -> bool:
        """Whether all have one code."""
        return len(self._counts) == 1

    def __str__(self) -> str:
        """The most frequent first, each with a row at least; empty where there are none."""
        kinds = self._counts.most_common(SAMPLES)
        spare = SAMPLES - len(kinds)
        parts = []
        for code, count in kinds:
            shown = self._samples[code][: 1 + spare]
            spare -= len(shown) - 1
            some = f"{count} x {code}, as " if count > len(shown) else ""
            parts.append(some + " | ".join(shown))
        return " | ".join(parts)


def told(reason: str, reasons: Reasons, errors_at: str | None) -> list[str]:
    """The parts of a message: why the batch fails, on which rows, and where all of them are."""
    parts = [reason]
    if first := str(reasons):
        parts.append(f"first errors: {first}")
    if errors_at:
        parts.append(f"all errors: {errors_at}")
    return parts


def backoff(attempt: int, *, jitter: float) -> float:
    """Seconds before try `attempt + 1`; `jitter` is a random number in [0, 1)."""
    return min(30.0, 0.5 * 2.0 ** (attempt - 1)) * (0.5 + jitter)
