"""Where rows come from: paths, URLs, globs and lists in; raw records, one a row, out.

A record is `(source, line, value)`: the name of the file (`prompts` for a list), the 1-based line or row, and the
raw value: bytes of a JSON line, text, a dict of columns, any object of a list, or a `RecordError`.
Invariants: files are read as streams, in sorted order of a glob; no line, however long, is held beyond
`max_row_bytes`; a broken record is a `RecordError`, never an exception, and the next one is read.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import InvalidPrompts

ToPath = Callable[[str], Any]
Record = tuple[str, int, Any]
SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".txt": "text",
    ".text": "text",
}
BLOCK = 1 << 20
BOM = b"\xef\xbb\xbf"
CSV_FIELD = (1 << 31) - 1
GLOB = re.compile(r"[*?\[]")


class RecordError(Exception):
    """A record that cannot be read; `code` is short and fixed, the message says what is wrong.

    `columns` holds what could be read of it, for an output with columns.
    """

    def __init__(self, code: str, message: str, columns: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.columns = columns or {}


class Damaged(OSError):
    """A file that cannot be read on; the message names it."""


@dataclass(frozen=True)
class Source:
    """One readable file."""

    name: str
    path: Any
    format: str
    gz: bool

    def open(self) -> Any:
        """The decompressed bytes."""
        raw = self.path.open("rb")
        return gzip.GzipFile(fileobj=raw, mode="rb") if self.gz else raw


def local_path(text: str) -> Any:
    """The default way from text to a path: this machine's files."""
    text = text.removeprefix("file://")
    if "://" in text:
        raise InvalidPrompts(f"{text} is a URL, and only files of this machine can be used here")
    return Path(text)


def is_local(path: Any) -> bool:
    return isinstance(path, Path)


def find_sources(spec: BatchSpec, to_path: ToPath, own: Sequence[str] = ()) -> tuple[Source, ...]:
    """The files of a spec. A glob does not find `own`, the files and folders that the batch itself writes.

    Raises InvalidPrompts for one that is missing, empty, a directory or unreadable.
    """
    found: list[Source] = []
    written = {_plain(to_path(text)) for text in own}
    for text in spec.paths:
        for path in _expand(text, to_path, written):
            found.append(_source(str(path), path, spec.input_format))
    return tuple(found)


def _plain(path: Any) -> str:
    return os.path.abspath(path) if is_local(path) else str(path)


def _expand(text: str, to_path: ToPath, written: set[str]) -> list[Any]:
    path = to_path(text)
    if not GLOB.search(text) or _exists(path):
        return [path]
    head, _, _ = text[: GLOB.search(text).start()].rpartition("/")  # type: ignore[union-attr]
    pattern = text[len(head) + 1 :] if head or text.startswith("/") else text
    base = to_path(head or ("/" if text.startswith("/") else "."))
    hits = sorted((hit for hit in base.glob(pattern) if not hit.is_dir()), key=str)
    if written:
        hits = [hit for hit in hits if not any(_plain(p) in written for p in (hit, *hit.parents))]
    if not hits:
        raise InvalidPrompts(f"input_path {text}: no file matches")
    return hits


def _exists(path: Any) -> bool:
    try:
        return bool(path.exists())
    except OSError:
        return False


def _source(name: str, path: Any, wanted: str | None) -> Source:
    lower = name.lower()
    gz = lower.endswith(".gz")
    stem = lower.removesuffix(".gz")
    kind = wanted or SUFFIXES.get(stem[stem.rfind(".") :] if "." in stem else "", "")
    if not kind:
        raise InvalidPrompts(
            f"input_path {name}: its suffix says no format; set input_format to jsonl, csv, parquet or text"
        )
    try:
        if path.is_dir():
            raise InvalidPrompts(
                f"input_path {name} is a directory; name its files, for example {name}/*.jsonl"
            )
        with path.open("rb") as file:
            empty = not file.read(1)
    except FileNotFoundError:
        raise InvalidPrompts(f"input_path {name} does not exist") from None
    except InvalidPrompts:
        raise
    except Exception as error:  # object stores have errors of their own
        if is_local(path) and not isinstance(error, OSError):
            raise
        raise InvalidPrompts(f"input_path {name} cannot be read: {error}") from error
    if empty:
        raise InvalidPrompts(f"input_path {name} is empty: there is nothing to do")
    return Source(name, path, kind, gz)


def records(spec: BatchSpec, sources: tuple[Source, ...]) -> Iterator[Record]:
    """Every record in input order."""
    if spec.prompts is not None:
        yield from (("prompts", index + 1, value) for index, value in enumerate(spec.prompts))
        return
    for source in sources:
        yield from READERS[source.format](source, spec)


def _lines(source: Source, spec: BatchSpec) -> Iterator[Record]:
    """Lines without their ends; blank lines only where another line follows."""
    number, blanks, name, limit = 0, 0, source.name, min(spec.max_row_bytes, sys.maxsize - 2)
    with source.open() as file:
        readline = file.readline
        while line := readline(limit + 2):
            number += 1
            if number == 1 and line.startswith(BOM):
                line = line[3:]
            if len(line) > limit + 1 and not line.endswith(b"\n"):
                size = len(line)
                while (rest := readline(BLOCK)) and not rest.endswith(b"\n"):
                    size += len(rest)
                text = f"the line has {(size + len(rest)) / 1e6:.1f} MB; max_row_bytes is {limit / 1e6:.1f} MB"
                item: bytes | RecordError = RecordError("row_too_long", text)
            else:
                item = line.strip(b"\r\n \t")
                if not item:
                    blanks += 1
                    continue
            for blank in range(blanks):
                yield name, number - blanks + blank, RecordError("empty_row", "the line is empty")
            blanks = 0
            yield name, number, item


def _text(source: Source, spec: BatchSpec) -> Iterator[Record]:
    for _, number, line in _lines(source, spec):
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
    csv.field_size_limit(CSV_FIELD)  # a smaller one makes csv go on in the middle of a quoted field
    with (
        source.open() as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="") as file,
    ):
        reader = csv.reader(file)
        header: list[str] = _header(source, reader)
        while True:
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield source.name, reader.line_num, RecordError("invalid_csv", f"not CSV: {error}")
                continue
            if not cells:
                continue  # csv's own rule: a blank line is no row
            yield source.name, reader.line_num, _csv_row(header, cells, spec.max_row_bytes)


def _header(source: Source, reader: Any) -> list[str]:
    try:
        header: list[str] = next(reader, [])
    except csv.Error as error:
        raise InvalidPrompts(f"input_path {source.name}, line 1: not CSV: {error}") from error
    if any(not _is_utf8(name) or "\0" in name for name in header):
        raise InvalidPrompts(
            f"input_path {source.name}, line 1: the header is not UTF-8; convert the file to UTF-8"
        )
    if not header or any(not name.strip() for name in header) or len(set(header)) != len(header):
        raise InvalidPrompts(
            f"input_path {source.name}, line 1: the header needs one distinct name a column"
        )
    return header


def _csv_row(header: list[str], cells: list[str], limit: int) -> dict[str, Any] | RecordError:
    size = sum(map(len, cells))
    if size > limit:
        text = f"the row has {size / 1e6:.1f} MB; max_row_bytes is {limit / 1e6:.1f} MB"
        return RecordError("row_too_long", text, _raw_columns(header, cells))
    if len(cells) != len(header):
        text = f"the row has {len(cells)} fields, the header {len(header)}"
        return RecordError("ragged_row", text, _raw_columns(header, cells))
    for name, cell in zip(header, cells, strict=True):
        if not _is_utf8(cell):
            text = f"column {name} is not UTF-8"
            return RecordError("invalid_utf8", text, _raw_columns(header, cells))
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
    number = 0
    for batch in parquet_batches(source):
        for row in batch.to_pylist():
            number += 1
            yield source.name, number, row


def parquet_batches(source: Source, rows: int = 1024) -> Iterator[Any]:
    """Record batches of up to so many rows. Raises Damaged, naming the file."""
    with source.open() as raw, parquet_file(source, raw) as file:
        from pyarrow import ArrowException  # type: ignore[import-untyped]

        number, batches = 0, file.iter_batches(batch_size=rows)
        while True:
            try:
                batch = next(batches, None)
            except (ArrowException, OSError) as error:
                raise Damaged(f"{source.name} is damaged after row {number}: {error}") from error
            if batch is None:
                return
            yield batch
            number += batch.num_rows


def parquet_file(source: Source, raw: Any) -> Any:
    """An open pyarrow ParquetFile. Raises InvalidPrompts without pyarrow or for a file that is not Parquet."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise InvalidPrompts(
            f"input_path {source.name} is Parquet, and pyarrow is not installed; install the extra [parquet]"
        ) from None
    try:
        return parquet.ParquetFile(raw)
    except (ArrowException, OSError) as error:
        raise InvalidPrompts(f"input_path {source.name} is not Parquet: {error}") from error


READERS = {"jsonl": _lines, "text": _text, "csv": _csv, "parquet": _parquet}


@dataclass(frozen=True)
class Extent:
    """How many rows there are (None: not known without reading a remote file) and a digest of the input."""

    rows: int | None
    digest: str


def measure(spec: BatchSpec, sources: tuple[Source, ...]) -> Extent:
    """Count and digest the input: local files and lists by content, remote ones by name and size.

    Raises InvalidPrompts where a file holds no row at all.
    """
    hasher = hashlib.blake2b(digest_size=16)
    if spec.prompts is not None:
        text = json.dumps(spec.prompts, sort_keys=True, default=repr)
        hasher.update(text.encode("utf-8", "surrogatepass"))
        return Extent(len(spec.prompts), hasher.hexdigest())
    total: int | None = 0
    for source in sources:
        try:
            rows = _rows(source, spec, hasher)
        except (OSError, EOFError, zlib.error) as error:
            raise InvalidPrompts(
                f"input_path {source.name} cannot be read to its end: {error}"
            ) from error
        if rows == 0:
            raise InvalidPrompts(f"input_path {source.name} holds no rows: there is nothing to do")
        total = None if rows is None or total is None else total + rows
    return Extent(total, hasher.hexdigest())


def _rows(source: Source, spec: BatchSpec, hasher: Any) -> int | None:
    if not is_local(source.path):
        hasher.update(f"{source.name} {source.path.stat().st_size}\n".encode())
        if source.format != "parquet":
            return None
    elif source.format in ("jsonl", "text"):
        return _count_lines(source, hasher)
    else:
        with source.path.open("rb") as file:
            while block := file.read(BLOCK):
                hasher.update(block)
    if source.format == "parquet":
        next(parquet_batches(source, 1), None)  # damage at the start is found before any server is
        with source.open() as raw, parquet_file(source, raw) as table:
            return int(table.metadata.num_rows)
    return sum(1 for _ in _csv(source, spec))


def _count_lines(source: Source, hasher: Any) -> int:
    """Lines up to the last one that is not blank."""
    ends = rows = 0
    with source.open() as file:
        while block := file.read(BLOCK):
            hasher.update(block)
            used = block.rstrip(b"\r\n \t")
            if used.removeprefix(BOM):
                rows = ends + used.count(b"\n") + 1
            ends += block.count(b"\n")
    return rows
