"""Questions to a value of any type, which never ask it for its own truth: an array has none, and raises."""

from __future__ import annotations

import math
from typing import Any


def is_empty(value: Any) -> bool:
    """Whether a value is None, or plain and false; numpy's and others' are not."""
    return value is None or (isinstance(value, (str, list, dict, int, float)) and not value)


def is_utf8(text: str) -> bool:
    """Whether a text can be written down: one with a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_finite(value: Any) -> bool:
    """Whether a value and all that it holds can be written as JSON numbers, which infinity and NaN cannot."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    return not isinstance(value, (list, tuple)) or all(map(is_finite, value))
