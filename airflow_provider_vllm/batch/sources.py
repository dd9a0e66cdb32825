"""Where rows come from: paths, URLs, globs and lists in; raw records, one a row, out.

A record is `(source, line, value)`: the name of the file (`prompts` for a list), the 1-based line or row, and the
raw value: bytes of a JSON line, text, a dict of columns, any object of a list, or a `RecordError`.
Invariants: files are read as streams, each once, in sorted order of a glob; no line, however long, is held beyond
`max_row_bytes`; a broken record is a `RecordError`, never an exception, and the next one is read.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from airflow_provider_vllm.batch.csv_rows import FIELD, HELD, CsvRows, csv_rows
from airflow_provider_vllm.batch.parquet_rows import (
    parquet_file,
    parquet_rows,
)
from airflow_provider_vllm.batch.row import PROMPTS
from airflow_provider_vllm.batch.source import UNREADABLE, Damaged, RecordError, Source
from airflow_provider_vllm.batch.spec import BatchSpec, suffix_of
from airflow_provider_vllm.exceptions import InvalidPrompts

log = logging.getLogger(__name__)
ToPath = Callable[[str], Any]
Record = tuple[str, int, Any]
SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
}
BLOCK = 1 << 20
BOM = b"\xef\xbb\xbf"
BLANK = b"\r\n \t"  # what a line without a row is made of
GZIP = b"\x1f\x8b"
UTF16 = (b"\xff\xfe", b"\xfe\xff")
HEAD = 1 << 12
SHOWN = 5
OTHERS = {
    GZIP: "gzipped twice",
    b"PK\x03\x04": "a zip file",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\xfd7zXZ\0": "compressed by xz",
    b"BZh91AY&SY": "compressed by bzip2",
    b"PAR1\x15": "Parquet",  # as its first page begins
}
PART = re.compile(r"\.(.+)\.[0-9a-f]{8}\.part")  # as `results.replacing` names what it writes
GLOB = re.compile(r"[*?\[]")


def local_path(text: str) -> Any:
    """The default way from text to a path: this machine's files."""
    text = text.removeprefix("file://")
    if "://" in text:
        raise InvalidPrompts(f"{text} is a URL, and only files of this machine can be used here")
    return Path(text)


def is_local(path: Any) -> bool:
    return isinstance(path, Path)


def find_sources(spec: BatchSpec, to_path: ToPath, own: Sequence[str] = ()) -> tuple[Source, ...]:
    """The files of a spec, each once. A glob does not find `own`, what the batch itself writes.

    Raises InvalidPrompts for one that is missing, a directory or unreadable, and where all are empty.
    """
    found: dict[str, Source | None] = {}
    again: list[str] = []
    empty: list[str] = []
    written = {real_path(to_path(text)) for text in own}
    for text in spec.paths:
        for path in _expand(text, to_path, written):
            real = real_path(path)
            if real in found:
                again.append(str(path))
            else:
                found[real] = source = _source(str(path), path, spec.input_format)
                if source is None:
                    empty.append(str(path))
    if again:
        log.warning("input_path names files twice, which are read once: %s", some(again))
    if empty and len(empty) == len(found):
        raise InvalidPrompts(f"input_path {empty[0]} is empty: there is nothing to do")
    if empty:  # of several, as of a day without rows
        log.warning(
            "input_path has files with nothing in them, which are left out: %s", some(empty)
        )
    return tuple(source for source in found.values() if source is not None)


def some(names: Sequence[str]) -> str:
    """The first few."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def real_path(path: Any) -> str:
    """The same for every name of a file or folder, links included."""
    return os.path.realpath(path) if is_local(path) else str(path).rstrip("/")


def _is_of(written: set[str], path: Any) -> bool:
    """Whether a file is one of those, lies in one, or is what a killed try left of one."""
    if part := PART.fullmatch(path.name):
        path = path.with_name(part[1])
    return any(real_path(each) in written for each in (path, *path.parents))


def _expand(text: str, to_path: ToPath, written: set[str]) -> list[Any]:
    path = to_path(text)
    if not GLOB.search(text) or _exists(path):
        return [path]
    head, _, _ = text[: GLOB.search(text).start()].rpartition("/")  # type: ignore[union-attr]
    pattern = text[len(head) + 1 :] if head or text.startswith("/") else text
    base = to_path(head or ("/" if text.startswith("/") else "."))
    hits = sorted((hit for hit in base.glob(pattern) if not hit.is_dir()), key=str)
    if written:
        hits = [hit for hit in hits if not _is_of(written, hit)]
    if not hits:
        raise InvalidPrompts(f"input_path {text}: no file matches{_where(base)}")
    return hits


def _where(path: Any) -> str:
    """For a message: who looked, and what to do about it."""
    if not is_local(path):
        return "; correct the path, or write the file first"
    folder = next((str(each) for each in (path, *path.parents) if each.is_dir()), "/")
    return (
        f" on the worker {socket.gethostname()}, where {folder} is there; correct the path, or write the file first, "
        "on a disk that this worker has"
    )


def _exists(path: Any) -> bool:
    try:
        return bool(path.exists())
    except OSError:
        return False


def kind_of(name: str) -> str:
    kind = SUFFIXES.get(suffix_of(name))
    if kind is None:
        raise InvalidPrompts(
            f"input_path {name}: its suffix says no format; set input_format to jsonl, csv, parquet or text"
        )
    return kind


def _source(name: str, path: Any, wanted: str | None) -> Source | None:
    """None for a file without a byte, and for a CSV file without a header. Raises InvalidPrompts."""
    try:
        if path.is_dir():
            files = f"{name.rstrip('/')}/*{suffix if (suffix := suffix_of(name)) in SUFFIXES else '.jsonl'}"
            raise InvalidPrompts(
                f"input_path {name} is a directory; name its files, for example {files}"
            )
        if is_local(path) and path.exists() and not path.is_file():
            raise InvalidPrompts(
                f"input_path {name} is a pipe or a device, and the input is read several times; write it to a file"
            )
        kind = wanted or kind_of(name)
        with path.open("rb") as file:
            start = file.read(HEAD)
        if not start and kind != "parquet":
            return None
        gz = start.startswith(GZIP)  # the name may say otherwise
        content, is_all = _unpacked(start) if gz else (start, True)
        if (
            kind == "csv"
            and is_all
            and len(start) < HEAD
            and not content.removeprefix(BOM).strip(BLANK)
        ):
            return None
        source = Source(name, path, kind, gz, content)
    except FileNotFoundError:
        raise InvalidPrompts(f"input_path {name} does not exist{_where(path)}") from None
    except InvalidPrompts:
        raise
    except Exception as error:  # object stores have errors of their own
        if is_local(path) and not isinstance(error, UNREADABLE):
            raise
        raise InvalidPrompts(f"input_path {name} cannot be read: {error}") from error
    _check_start(source)
    return source


def _unpacked(start: bytes) -> tuple[bytes, bool]:
    """The first bytes of a gzip file, as far as they go, and whether its end was met."""
    packed = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    content = packed.decompress(start, HEAD)
    return content, packed.eof and not packed.unused_data


def _check_start(source: Source) -> None:
    """What is no file of its format in no row. Raises InvalidPrompts."""
    start = source.start
    if source.format != "parquet" and start.startswith(UTF16):
        raise InvalidPrompts(
            f"input_path {source.name} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8"
        )
    for mark, what in OTHERS.items():
        if source.format != "parquet" and start.startswith(mark):
            raise InvalidPrompts(
                f"input_path {source.name} is {what}, not {source.format}; unpack it, or set input_format"
            )
    lines = start.removeprefix(BOM).lstrip().splitlines()
    if source.format == "jsonl" and lines and lines[0].strip() in (b"[", b"{", b"[{"):
        raise InvalidPrompts(
            f"input_path {source.name} is one JSON document over several lines; write one row on each line, "
            "for example with jq -c '.[]'"
        )


def records(spec: BatchSpec, sources: tuple[Source, ...]) -> Iterator[Record]:
    """Every record in input order."""
    if spec.prompts is not None:
        yield from ((PROMPTS, index + 1, value) for index, value in enumerate(spec.prompts))
        return
    for source in sources:
        yield from READERS[source.format](source, spec)


def size_of(record: Record) -> int:
    """About how many bytes a record holds."""
    value = record[2]
    if isinstance(value, dict):
        return sum(len(cell) for cell in value.values() if isinstance(cell, (str, bytes)))
    return len(value) if isinstance(value, (str, bytes)) else 0


def reads_fast(sources: Sequence[Source]) -> bool:
    """Whether every record is there at once: lines of local files, or a list."""
    return all(
        is_local(source.path) and not source.gz and READERS[source.format] in (_lines, _text)
        for source in sources
    )


def _lines(source: Source, spec: BatchSpec) -> Iterator[Record]:
    """Lines without the blanks around them; blank lines only where another line follows."""
    return _stripped(source, spec, BLANK)


def _stripped(source: Source, spec: BatchSpec, ends: bytes) -> Iterator[Record]:
    number, blanks, name, limit = 0, 0, source.name, min(spec.max_row_bytes, sys.maxsize - 8)
    most = limit + 2
    try:
        with source.open() as file:
            readline = file.readline
            first = readline(most + len(BOM)).removeprefix(BOM)
            while line := first or readline(most):
                number += 1
                first = b""
                text = line.strip(ends)
                item: bytes | RecordError = text
                if len(line) >= most and (len(line) > most or line[-1:] != b"\n"):
                    size, rest = len(line), line
                    while rest and rest[-1:] != b"\n":
                        rest = readline(BLOCK)
                        size += len(rest)
                    said = f"the line has {size / 1e6:.1f} MB; {_most(limit)}"
                    item = RecordError("row_too_long", said)
                elif not text or (ends != BLANK and not text.strip(BLANK)):
                    blanks += 1
                    continue
                if blanks:
                    for at in range(number - blanks, number):
                        yield name, at, RecordError("empty_row", "the line is empty")
                    blanks = 0
                yield name, number, item
    except UNREADABLE as error:
        raise Damaged(f"{name} cannot be read on after line {number}: {error}") from error


def _most(limit: int) -> str:
    return f"max_row_bytes is {limit / 1e6:.1f} MB"


def _text(source: Source, spec: BatchSpec) -> Iterator[Record]:
    """Lines without their ends."""
    for _, number, line in _stripped(source, spec, b"\r\n"):
        value: Any = line
        if isinstance(line, bytes):
            try:
                value = line.decode("utf-8")
            except UnicodeDecodeError as error:
                value = RecordError(
                    "invalid_utf8", f"not UTF-8: {error.reason} at byte {error.start}"
                )
        yield source.name, number, value


def _csv(source: Source, spec: BatchSpec) -> Iterator[Record]:
    name, limit = source.name, spec.max_row_bytes
    with csv_rows(source, min(max(limit, HELD), FIELD)) as rows:
        header = csv_header(source, rows)
        for line, cells, wrong in rows:
            if wrong is None:
                yield name, line, _csv_row(header, cells, limit)
                continue
            code, text = wrong
            if code == "row_too_long":
                text = f"{text}; {_most(limit)}"
            yield name, line, RecordError(code, text, _raw_columns(header, cells))


def csv_header(source: Source, rows: CsvRows) -> list[str]:
    """The first record of a CSV file. Raises InvalidPrompts where it names no columns."""
    line, header, wrong = next(iter(rows), (1, [], None))
    where = f"input_path {source.name}, line {line}"
    if wrong is not None:
        raise InvalidPrompts(f"{where}: {wrong[1]}")
    if any(not _is_utf8(name) or "\0" in name for name in header):
        raise InvalidPrompts(f"{where}: the header is not UTF-8; convert the file to UTF-8")
    if not any(name.strip() for name in header) or len(set(header)) != len(header):
        raise InvalidPrompts(f"{where}: the header needs one distinct name a column, not {header}")
    return header


def column_names(source: Source) -> list[str]:
    """The columns of a CSV or Parquet file. Raises InvalidPrompts where it has none that can be used."""
    if source.format == "csv":
        with csv_rows(source) as rows:
            return csv_header(source, rows)
    with source.open() as raw, parquet_file(source, raw) as file:
        return list(file.schema_arrow.names)


def _csv_row(header: list[str], cells: list[str], limit: int) -> dict[str, Any] | RecordError:
    size = sum(map(len, cells))
    if size > limit:
        text = f"the row has {size / 1e6:.1f} MB; {_most(limit)}"
        return RecordError("row_too_long", text, _raw_columns(header, cells))
    if len(cells) != len(header):
        text = f"the row has {len(cells)} fields, the header {len(header)}"
        return RecordError("ragged_row", text, _raw_columns(header, cells))
    for name, cell in zip(header, cells, strict=True):
        if not _is_utf8(cell):
            text = f"column {name} is not UTF-8"
            return RecordError("invalid_utf8", text, _raw_columns(header, cells), name)
    return dict(zip(header, cells, strict=True))


def _is_utf8(cell: str) -> bool:
    """Whether text decoded with `surrogateescape` has no escape in it."""
    return cell.isascii() or not any("\udc80" <= char <= "\udcff" for char in cell)


def _raw_columns(header: list[str], cells: list[str]) -> dict[str, Any]:
    """The cells of a bad row: bytes that are no UTF-8 as `\\xe9`, fields too many in the last column."""
    last = len(header) - 1
    shown = [*cells[:last], ",".join(cells[last:])] if len(cells) > len(header) else cells
    texts = (
        cell.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        for cell in shown
    )
    return dict(zip(header, texts, strict=False))


def _parquet(source: Source, spec: BatchSpec) -> Iterator[Record]:
    for number, row in enumerate(parquet_rows(source), 1):
        yield source.name, number, row


READERS = {"jsonl": _lines, "text": _text, "csv": _csv, "parquet": _parquet}
