"""A prompt template and the columns of a row in, the prompt out."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

from airflow_provider_vllm.batch.texts import as_json
from airflow_provider_vllm.exceptions import InvalidInput

BRACES = (
    "write {{ and }} for braces that stay, in a DAG file between {% raw %} and {% endraw %}, since "
    "{{ is Jinja's there"
)
CONVERSIONS: dict[str, Callable[[Any], str]] = {"r": repr, "s": str, "a": ascii}
# What formatting raises: `{n:c}` of a large number, `{n:99999999999}`, `{n!r}` of what is nested without end.
UNFIT = (TypeError, ValueError, OverflowError, MemoryError, RecursionError)


class RowError(Exception):
    """A record that makes no request: a short fixed `code`, what is wrong, in which `field`."""

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code, self.field = code, field


class Template:
    """`"Summarise {title}: {text}"`; `{{` and `}}` are braces. Only plain column names, no attributes or indexes."""

    def __init__(self, text: str) -> None:
        try:
            self._parts = [
                (literal, name, conversion, spec or "")
                for literal, name, spec, conversion in string.Formatter().parse(text)
            ]
        except ValueError as error:
            raise InvalidInput(f"prompt_template: {error}; {BRACES}") from error
        for _, _, conversion, _ in self._parts:
            if conversion and conversion not in CONVERSIONS:
                raise InvalidInput(f"prompt_template: !{conversion} is unknown; use !r, !s or !a")
        if not self.names:
            raise InvalidInput("prompt_template names no column, so every prompt would be the same")
        for name in self.names:
            if not name or "." in name or "[" in name or name.lstrip()[:1] in ("'", '"'):
                raise InvalidInput(f"prompt_template: {{{name}}} is not a column name; {BRACES}")

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that it needs."""
        return tuple(name for _, name, _, _ in self._parts if name is not None)

    def fill(self, columns: dict[str, Any]) -> str:
        """Raises RowError for a column that is missing or null, and where all are empty: there is nothing to ask."""
        values = [columns.get(name) for name in self.names]
        if all(isinstance(value, str) and not value for value in values):
            raise RowError(
                "invalid_prompt",
                f"{', '.join(self.names)} of prompt_template is empty",
                self.names[0],
            )
        out = []
        for literal, name, conversion, spec in self._parts:
            out.append(literal)
            if name is None:
                continue
            if name not in columns:
                raise RowError(
                    "missing_column", f"column {name} of prompt_template is missing", name
                )
            value = columns[name]
            if value is None:
                raise RowError("null_prompt", f"column {name} of prompt_template is null", name)
            if isinstance(value, bytes):  # what some writers of Parquet make of text
                value = _decoded(value, name)
            try:
                value = CONVERSIONS[conversion](value) if conversion else value
                out.append(
                    format(value, spec)
                    if spec or not isinstance(value, (dict, list))
                    else as_json(value).decode()
                )
            except UNFIT as error:
                raise RowError(
                    "invalid_value",
                    f"column {name} cannot be formatted: {str(error) or type(error).__name__}",
                    name,
                ) from None
        return "".join(out)


def _decoded(value: bytes, name: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise RowError("invalid_utf8", f"column {name} is not UTF-8", name) from None
