"""Counts in, "go on" or the reason to fail out. Pure."""

from __future__ import annotations

EARLY_ROWS = 50
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


def backoff(attempt: int, *, jitter: float) -> float:
    """Seconds before try `attempt + 1`; `jitter` is a random number in [0, 1)."""
    return min(30.0, 0.5 * 2.0 ** (attempt - 1)) * (0.5 + jitter)
