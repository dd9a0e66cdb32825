"""A line that another program put into JSON in; the message's own lines out.

vLLM's JSON logging, docker's json-file and the collectors of cloud platforms do this.
"""

from __future__ import annotations

import json

PREFIX_CHARS = 120
"""So much may stand before the JSON."""


def messages(text: str) -> tuple[str | None, list[str]] | None:
    """Level and lines of the message; None where the line is no such JSON."""
    start = text.find("{", 0, PREFIX_CHARS)
    if start < 0 or not text.endswith("}"):
        return None
    try:
        value = json.loads(text[start:])
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    message = next((value[key] for key in ("message", "msg", "log") if key in value), None)
    if not isinstance(message, str):
        return None
    level = value.get("level") or value.get("levelname")
    trace = value.get("exc_info")
    whole = message + ("\n" + trace if isinstance(trace, str) and trace != "None" else "")
    return (str(level).upper() if level else None), whole.rstrip("\n").split("\n")
