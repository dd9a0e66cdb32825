"""Files of one format in; consecutive parts of them, of so many rows each, out.

A piece is the number of its first row from 0, and the bytes of its file, with `BORDER` where it needs another.
Invariants: each piece is used up before the next one is asked for; every record stands in it as in its own file, so
that a broken one is broken there too and no other.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from typing import Any

from airflow_provider_vllm.batch.csv_rows import CsvWriter, csv_rows
from airflow_provider_vllm.batch.parquet_rows import BATCH, Damage
from airflow_provider_vllm.batch.parquet_tables import (
    nullable,
    parquet_tables,
    runs_of_equal_types,
)
from airflow_provider_vllm.batch.source import Source
from airflow_provider_vllm.batch.sources import BLANK, BOM, column_names, csv_header
from airflow_provider_vllm.exceptions import InvalidPrompts

log = logging.getLogger(__name__)
CARRIED = 1 << 26  # characters of one CSV record
BORDER = None
Blocks = Iterator["bytes | None"]
Piece = tuple[int, Blocks]


def pieces(kind: str, sources: tuple[Source, ...], quota: int) -> Iterator[Piece]:
    """Pieces of `quota` rows of files of the format `kind`. Raises InvalidPrompts for what no piece can hold."""
    make = {"csv": _csv_pieces, "parquet": _parquet_pieces}.get(kind, _line_pieces)
    return make(sources, quota)


def _line_pieces(sources: tuple[Source, ...], quota: int) -> Iterator[Piece]:
    """Cut only after a line that is not blank: at the end of a file, blank lines are no rows."""
    lines = _Peekable(line for source in sources for line in _whole_lines(source))
    count = 0
    while lines.has_more():
        first, taken = count, 0

        def piece() -> Iterator[bytes]:
            nonlocal taken
            blank = True
            while lines.has_more() and (taken < quota or blank):
                line = lines.take()
                blank = not line.strip(BLANK)
                taken += 1
                yield line

        yield first, piece()
        count += taken


def _whole_lines(source: Source) -> Iterator[bytes]:
    """Lines with their end; blank ones only where another line of the file follows."""
    blanks: list[bytes] = []
    with source.open() as file:
        for number, line in enumerate(file):
            if number == 0:
                line = line.removeprefix(BOM)
            if not line.strip(BLANK):
                blanks.append(b"\n")
                continue
            yield from blanks
            blanks.clear()
            yield line if line.endswith(b"\n") else line + b"\n"


class _Peekable:
    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._next: Any = next(items, None)

    def has_more(self) -> bool:
        return self._next is not None

    def take(self) -> Any:
        item, self._next = self._next, next(self._items, None)
        return item


def _csv_pieces(sources: tuple[Source, ...], quota: int) -> Iterator[Piece]:
    """Every record as it stands in its file, so that a broken one is broken in its shard too."""
    headers = [column_names(source) for source in sources]
    for source, header in zip(sources, headers, strict=True):
        if header != headers[0]:
            raise InvalidPrompts(
                f"input_path {source.name} has the columns {', '.join(header)}, and {sources[0].name} "
                f"{', '.join(headers[0])}: one shard can have one header only; split each kind of file by itself"
            )
    rows = _Peekable(row for source in sources for row in _csv_records(source))
    count = 0
    while rows.has_more():
        first, taken = count, 0

        def piece() -> Blocks:
            nonlocal taken
            yield csv_line(headers[0])
            before, open_ = "", False  # the file, and whether what it leaves may run into another
            while rows.has_more() and taken < quota:
                taken += 1
                name, line, broken = rows.take()
                if open_ and name != before:
                    yield BORDER
                    yield csv_line(headers[0])
                    open_ = False
                before, open_ = name, open_ or broken
                yield line

        yield first, piece()
        count += taken


def _csv_records(source: Source) -> Iterator[tuple[str, bytes, bool]]:
    """The file, a record of it, and whether that is broken."""
    with csv_rows(source, CARRIED) as rows:
        csv_header(source, rows)
        for line, _, wrong in rows:
            if wrong is not None and wrong[0] == "row_too_long":
                raise InvalidPrompts(
                    f"input_path {source.name}, line {line}: {wrong[1]}, which no shard takes; shorten it"
                )
            raw = rows.raw().encode("utf-8", "surrogateescape")
            yield source.name, raw, wrong is not None


def csv_line(cells: list[str]) -> bytes:
    """A row of CSV as bytes, those that are no UTF-8 as they were."""
    text = io.StringIO()
    CsvWriter(text).row(cells)
    return text.getvalue().encode("utf-8", "surrogateescape")


def _parquet_pieces(sources: tuple[Source, ...], quota: int) -> Iterator[Piece]:
    """With a border where a file has other types than those before it."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    stream = _parquet_stream(pyarrow, sources)
    rest: tuple[Any, Any] | None = None  # a schema, and a table of it

    def has_more() -> bool:
        nonlocal rest
        rest = rest or next(stream, None)
        return rest is not None

    def take(most: int) -> Any:
        nonlocal rest
        assert rest is not None
        schema, table = rest
        rest = (schema, table.slice(most)) if table.num_rows > most else None
        return table.slice(0, most)

    def piece() -> Blocks:
        left = quota
        while left and has_more():
            if left < quota:
                yield BORDER
            assert rest is not None
            schema, sink, held = rest[0], _Sink(), []
            with parquet.ParquetWriter(sink, schema) as writer:
                while left and has_more() and rest[0] is schema:
                    held.append(take(left))
                    left -= held[-1].num_rows
                    if sum(each.nbytes for each in held) >= BATCH:
                        writer.write_table(pyarrow.concat_tables(held))
                        held.clear()
                        yield sink.taken()
                if held:
                    writer.write_table(pyarrow.concat_tables(held))
            yield sink.taken()

    first = 0
    while has_more():
        yield first, piece()
        first += quota


def _parquet_stream(pyarrow: Any, sources: tuple[Source, ...]) -> Iterator[tuple[Any, Any]]:
    """A schema and a table of it, again and again; files with the same types share a schema."""
    for alike, schema in runs_of_equal_types(sources):
        shared = nullable(schema)
        for table in parquet_tables(pyarrow, tuple(alike), shared, _warn_of_damage):
            if table.num_rows:
                yield shared, table


def _warn_of_damage(source: Source, damage: Damage) -> None:
    log.warning(
        "%s: %s; in their shard its %d rows have no values", source.name, damage.text, damage.rows
    )


class _Sink(io.RawIOBase):
    """Takes what a writer writes, and gives it on in parts."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        self._size += len(self._parts[-1])
        return len(self._parts[-1])

    def taken(self) -> bytes:
        """What was written since the last time."""
        parts, self._parts = self._parts, []
        return b"".join(parts)
