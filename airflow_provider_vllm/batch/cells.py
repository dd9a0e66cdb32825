"""A column of a row in, the value that it stands for out.

CSV knows text only, and Parquet has a null for every field that a row does not use: a missing value is None here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import orjson

from airflow_provider_vllm.batch.exact import loads
from airflow_provider_vllm.batch.template import RowError

# Parameters whose value is text, whatever it looks like.
TEXTS = frozenset(
    ["cache_salt", "chat_template", "encoding_format", "instruction", "instructions", "model", "reasoning_effort",
     "request_id", "session_id", "stop", "suffix", "task", "user"]
)  # fmt: skip
WORDS = {"true": True, "false": False, "null": None}


def parameter(name: str, cell: Any) -> Any:
    """A sampling parameter; numbers, true, false, lists and objects may be text. Raises RowError for infinity."""
    if isinstance(cell, str):
        text = cell.strip()
        if not text:
            return None
        if name in TEXTS:
            listed = json_of(text, "[")
            return cell if listed is None else listed
        cell = _read(text)
    if isinstance(cell, Decimal):
        whole = cell.is_finite() and cell == cell.to_integral_value()
        cell = int(cell) if whole else float(cell)
    if isinstance(cell, float) and not math.isfinite(cell):
        if math.isnan(cell):
            return None
        raise RowError("invalid_value", f"{name} is {cell}", name)
    return cell


def _read(text: str) -> Any:
    casts: tuple[Callable[[str], Any], ...] = (int, float)
    for cast in casts:
        try:
            return cast(text)
        except ValueError:
            continue
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    found = json_of(text, "[{")
    return text if found is None else found


def json_of(cell: Any, starts: str) -> Any:
    """The JSON in a text that begins with one of these characters; None where there is none."""
    if not isinstance(cell, str) or cell.lstrip()[:1] not in tuple(starts):
        return None
    try:
        return loads(cell.encode())
    except (orjson.JSONDecodeError, UnicodeEncodeError):
        return None


def _only_json(name: str, text: str, start: str) -> Any:
    """As `json_of`; but what begins so must be JSON: a dict as Python writes it would be sent as a prompt, or not."""
    found = json_of(text, start)
    if found is None and text.lstrip().startswith(start):
        raise RowError(
            "invalid_json",
            f"{name} begins with {start} and is not JSON; write it with json.dumps",
            name,
        )
    return found


def parameters(value: Any, table: bool) -> Mapping[str, Any]:
    """The column `params`: an object, or one as JSON text; anything else is no parameters.

    In a `table` a field without a value is none: Parquet gives every row the fields of all. Raises RowError for what
    looks like JSON and is not.
    """
    if isinstance(value, str):
        value = _only_json("params", value, "{")
    if isinstance(value, list) and all(isinstance(x, tuple) and len(x) == 2 for x in value):
        value = dict(value)  # a Parquet map
    if not isinstance(value, dict):
        return {}
    read = {
        name: parameter(name, cell) if table or isinstance(cell, (float, Decimal)) else cell
        for name, cell in value.items()
    }
    return {
        name: cell
        for name, cell in read.items()
        if cell is not None or (value[name] is None and not table)
    }


def messages(value: Any, table: bool) -> Any:
    """The column `messages`: chat messages, or those as JSON text; other text stays.

    Raises RowError for what looks like messages in JSON and is not.
    """
    if isinstance(value, str):
        is_list = value.lstrip().startswith("[") and value.lstrip()[1:].lstrip().startswith("{")
        found = _only_json("messages", value, "[") if is_list else json_of(value, "[")
        return value if found is None else found
    return _used(value) if table else value


def _used(value: Any) -> Any:
    """Without the fields that have no value."""
    if isinstance(value, dict):
        return {name: _used(part) for name, part in value.items() if part is not None}
    return [_used(part) for part in value] if isinstance(value, list) else value
