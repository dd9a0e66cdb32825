"""JSON text in, its value out, in which every integer has all its digits.

orjson makes a float of an integer beyond 64 bits and says nothing; the standard library keeps it, and orjson then
refuses to send it.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

LARGE = float(1 << 63)  # no float that stands for an integer is smaller


def loads(text: bytes) -> Any:
    """The value of a JSON text. Raises orjson.JSONDecodeError."""
    value = orjson.loads(text)
    if not _has_large_float(value):
        return value
    try:
        return json.loads(text)
    except RecursionError:
        raise orjson.JSONDecodeError("nested too deep", "", 0) from None


def _has_large_float(value: Any) -> bool:
    """Costs nothing for the length of texts, which are most of a row."""
    parts = [value]
    for part in parts:  # which grows
        kind = part.__class__
        if kind is dict:
            parts.extend(part.values())
        elif kind is list:
            parts.extend(part)
        elif kind is float and not -LARGE < part < LARGE:
            return True
    return False
