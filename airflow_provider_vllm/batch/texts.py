"""Any value of a row in, its text out."""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import orjson

# What a text has as JSON; any other value (a date, a decimal, bytes) has a text of its own.
OF_JSON = (bool, int, float, list, tuple, dict)


def plain(value: Any) -> str:
    """The text of what is no JSON; bytes that are no UTF-8 as base64."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


def as_json(value: Any) -> bytes:
    """JSON of what orjson cannot do, too: deep values, integers beyond 64 bits, lone surrogates."""
    try:
        return orjson.dumps(value, default=plain)
    except TypeError:  # orjson's JSONEncodeError is one
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(max(before, 10_000))
        try:
            return json.dumps(value, default=plain).encode()
        finally:
            sys.setrecursionlimit(before)


def text_of(value: Any) -> str | None:
    """A cell of text: text as it is, JSON of a number or what is nested, None of None."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if value is None:
        return None
    return as_json(value).decode() if isinstance(value, OF_JSON) else plain(value)
