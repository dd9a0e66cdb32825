"""Lines that a terminal may have cut at its width in; whole lines out.

A log that was copied from a terminal has many lines of exactly its width, and what follows one of
them goes on in the middle of a word. Other logs stay as they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from airflow_provider_vllm.diagnosis.prefix import split_prefix

MIN_WIDTH, MAX_WIDTH = 60, 400
FULL_LINES = 3

_BEGINNING = re.compile(
    r"[{]|  (?:Value error|Assertion failed), |Traceback \(|  File \"|INFO:|ERROR:|Process "
    r"|slurmstepd|During handling|The above exception"
    r"|(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b"
)
_NO_DIGITS = str.maketrans("", "", "0123456789")

Cut = tuple[int, tuple[str, str]]
"""Number, and the line as it stands with what is left of it to read."""


def unwrapped(lines: list[Cut]) -> list[Cut]:
    """Puts the pieces of each line together; a whole line keeps the number of its first piece."""
    width = _width([text for _, (_, text) in lines])
    if width is None:
        return lines
    joined: list[Cut] = []
    length = 0
    for number, (raw, text) in lines:
        if _goes_on(length, text, width):
            first, (first_raw, so_far) = joined[-1]
            joined[-1] = (first, (first_raw, so_far + " " * (width - length) + text))
        else:
            joined.append((number, (raw, text)))
        length = len(text)
    return joined


def _goes_on(before: int, text: str, width: int) -> bool:
    """Whether this piece goes on with the one before it, which is `before` characters long.

    A piece that is one short ended with a space, which is gone.
    """
    if not text or begins_a_line(text) or before < width - 1:
        return False
    return before == width or not text[0].isspace()


def _width(texts: Sequence[str]) -> int | None:
    """The terminal's width: the longest lines have it, all in other words, and most of them go on."""
    lengths = Counter(len(text) for text in texts if len(text) >= MIN_WIDTH)
    if not lengths:
        return None
    width = max(lengths)
    if width > MAX_WIDTH:
        return None
    full = [
        (text, after)
        for text, after in zip(texts, [*texts[1:], ""], strict=True)
        if len(text) >= width - 1
    ]
    if len({text.translate(_NO_DIGITS) for text, _ in full}) < FULL_LINES:
        return None
    going_on = sum(1 for text, after in full if _goes_on(len(text), after, width))
    return width if going_on * 3 >= len(full) * 2 else None


def begins_a_line(text: str) -> bool:
    """Whether this can only be a line's beginning."""
    parts = split_prefix(text)
    named = parts.level is not None or parts.process is not None
    return named or _BEGINNING.match(parts.text) is not None
