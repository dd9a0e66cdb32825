"""A Parquet file in; its rows out, as dicts or as Arrow batches.

Invariants: a part that is damaged harms no other row group; a value that Python cannot hold (a nanosecond, a
date beyond the year 9999, an unknown time zone) comes as text, so that a column which nobody sends harms no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from airflow_provider_vllm.batch.source import Damaged, RecordError, Source
from airflow_provider_vllm.exceptions import InvalidPrompts

ROWS = 1024
BATCH = 1 << 24  # bytes of an Arrow batch, about: rows may be large
BUFFER = 1 << 20  # bytes read at once, and not a whole column of a row group


@dataclass(frozen=True)
class Damage:
    """So many rows that cannot be read, and why; `text` names the row group."""

    rows: int
    text: str


def parquet_file(source: Source, raw: Any) -> Any:
    """An open pyarrow ParquetFile.

    Raises InvalidPrompts without pyarrow, for a file that is not Parquet, or whose columns have one name.
    """
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]
    except ImportError:
        raise InvalidPrompts(
            f"input_path {source.name} is Parquet, and pyarrow is not installed; install the extra [parquet]"
        ) from None
    try:
        file = parquet.ParquetFile(raw, page_checksum_verification=True, buffer_size=BUFFER)
    except (ArrowException, OSError) as error:
        raise InvalidPrompts(f"input_path {source.name} is not Parquet: {error}") from error
    names = file.schema_arrow.names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        file.close()
        raise InvalidPrompts(f"input_path {source.name}: two columns have one name: {twice[0]}")
    return file


def parquet_parts(source: Source, rows: int = ROWS) -> Iterator[Any]:
    """Arrow record batches of up to so many rows, and `Damage` in the place of those that cannot be read.

    Raises Damaged, naming the file, where the reading itself fails (a disk, a network).
    """
    with source.open() as raw, parquet_file(source, raw) as file:
        from pyarrow import ArrowException

        groups = file.metadata.num_row_groups
        for group in range(groups):
            about = file.metadata.row_group(group)
            left = about.num_rows
            fitting = BATCH * left // max(about.total_byte_size, 1)
            try:
                for batch in file.iter_batches(min(rows, max(fitting, 1)), row_groups=[group]):
                    left -= batch.num_rows
                    yield batch
            except (ArrowException, OSError) as error:
                where = f"row group {group + 1} of {groups}"
                if not _is_damage(error):
                    text = f"{source.name} cannot be read on in {where}: {error}"
                    raise Damaged(text) from error
                yield Damage(left, f"{where} is damaged: {error}")


def _is_damage(error: Exception) -> bool:
    """Arrow says so of a file's content; what the system or a store says has a number, or a type of its own."""
    return not isinstance(error, OSError) or (type(error) is OSError and error.errno is None)


def parquet_rows(source: Source) -> Iterator[dict[str, Any] | RecordError]:
    """Every row as a dict of columns; an error for each that cannot be read."""
    for part in parquet_parts(source):
        if isinstance(part, Damage):
            for _ in range(part.rows):
                yield RecordError("damaged", part.text)
        else:
            yield from _dicts(part)


def _dicts(batch: Any) -> list[dict[str, Any] | RecordError]:
    from pyarrow import ArrowException

    try:
        whole: list[dict[str, Any] | RecordError] = batch.to_pylist()
        return whole
    except (ArrowException, ValueError, OverflowError):
        columns = [values_of(column) for column in batch.columns]
    names = batch.schema.names
    rows = [dict(zip(names, cells, strict=True)) for cells in zip(*columns, strict=True)]
    return [_checked(row) for row in rows]


class _NotText(str):
    """A cell of text that is not UTF-8, with its other bytes as `\\xe9`."""


def _checked(row: dict[str, Any]) -> dict[str, Any] | RecordError:
    for name, cell in row.items():
        if type(cell) is _NotText:
            return RecordError("invalid_utf8", f"column {name} is not UTF-8", row, name)
    return row


def values_of(column: Any) -> list[Any]:
    """The values of an Arrow column, as text those that Python cannot hold."""
    import pyarrow

    try:
        found: list[Any] = column.to_pylist()
        return found
    except (pyarrow.ArrowException, ValueError, OverflowError):
        return [_cell(scalar, pyarrow) for scalar in column]


def _cell(scalar: Any, pyarrow: Any) -> Any:
    """The value of a scalar, as text where Python has none for it."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        if hasattr(scalar, "as_buffer"):
            data: bytes = scalar.as_buffer().to_pybytes()
            return _NotText(data.decode("utf-8", "backslashreplace"))
        return _NotText(f"{scalar.type}, not UTF-8")
    except (pyarrow.ArrowException, ValueError, OverflowError):
        return _text_or_parts(scalar, pyarrow)


def _span(value: int, unit: str) -> str:
    """A duration as Python writes those that it can hold, with three more digits; with its unit where it is longer."""
    whole, rest = divmod(value, 1000)
    try:
        text = str(timedelta(microseconds=whole)) if unit == "ns" else ""
    except OverflowError:
        text = ""
    if not text:
        return f"{value} {unit}"
    return f"{text if '.' in text else text + '.000000'}{rest:03d}"


def _text_or_parts(scalar: Any, pyarrow: Any) -> Any:
    if isinstance(scalar, pyarrow.MapScalar):
        return [tuple(_cell(entry[at], pyarrow) for at in (0, 1)) for entry in scalar.values]
    if isinstance(scalar, pyarrow.ListScalar):  # of every kind of list
        return [_cell(each, pyarrow) for each in scalar.values]
    if isinstance(scalar, pyarrow.StructScalar):
        return {name: _cell(scalar[name], pyarrow) for name in scalar}
    if isinstance(scalar, pyarrow.DurationScalar):
        return _span(scalar.value, scalar.type.unit)
    try:
        return scalar.cast(pyarrow.string()).as_py()
    except (pyarrow.ArrowException, ValueError):
        return str(getattr(scalar, "value", scalar.type))
