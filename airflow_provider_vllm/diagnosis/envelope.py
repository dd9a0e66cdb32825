"""A line that another program put into JSON in; the message's own lines out.

vLLM's JSON logging, docker's json-file, journald and the collectors of cloud platforms do this, some
of them twice: the message stands under one of a few names, or in an object under one of them.
"""

from __future__ import annotations

import json
import re
from typing import Any

from airflow_provider_vllm.diagnosis.colour import plain
from airflow_provider_vllm.diagnosis.prefix import anchor_of

PREFIX_CHARS = 120
"""So much may stand before the JSON."""
DEEPEST = 4

_MESSAGE = (
    *("message", "textPayload", "msg", "log", "text", "body", "line", "event", "@message"),
    *("jsonPayload", "data", "fields", "record", "_raw", "stringValue"),
)
_NEWLINE = re.compile(r"\r\n|\r|\n")


def messages(text: str) -> tuple[str | None, list[str]] | None:
    """Level and lines of the message; None where the line is no such JSON."""
    text = text.rstrip(", \t")
    start = text.find("{", 0, PREFIX_CHARS)
    if start < 0 or not text.endswith("}") or anchor_of(text[:start]) is not None:
        return None
    found = _message(_read(text[start:]), DEEPEST)
    if found is None:
        return None
    level, message = found
    lines = _NEWLINE.split(plain(message).rstrip("\r\n"))
    return level, [line for line in lines if line] or [""]


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _message(value: Any, deep: int) -> tuple[str | None, str] | None:
    """Level and text of the message in an object.

    Only vLLM's own JSON logging knows the level: a collector's is the stream's, stderr's all errors.
    """
    if not isinstance(value, dict) or deep == 0:
        return None
    value = {str(key).lower(): item for key, item in value.items()}
    level = value.get("levelname")
    level = level.upper() if isinstance(level, str) else None
    for name in _MESSAGE:
        found = _said(value.get(name.lower()), deep)
        if found is not None:
            trace = value.get("exc_info")
            more = "\n" + trace if isinstance(trace, str) and trace != "None" else ""
            return found[0] or level, found[1] + more
    return None


def _said(item: Any, deep: int) -> tuple[str | None, str] | None:
    if isinstance(item, str):
        inner = item.strip()
        nested = _message(_read(inner), deep - 1) if inner[:1] == "{" else None
        return nested or (None, item)
    return _message(item, deep - 1)
