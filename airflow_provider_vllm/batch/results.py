"""A finished journal in, the results file, the errors file and the manifest file out.

Invariants: input order; each file appears whole or not at all; the results file comes last, so that its being
there means that everything is. The same records give the same bytes.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import io
import os
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from airflow_provider_vllm.batch import disk
from airflow_provider_vllm.batch.api import answer_of
from airflow_provider_vllm.batch.journal import Journal
from airflow_provider_vllm.batch.records import Record, value_of
from airflow_provider_vllm.batch.sources import ToPath, is_local
from airflow_provider_vllm.batch.spec import BatchSpec
from airflow_provider_vllm.exceptions import BatchFailed

BUFFER = 1 << 18


def errors_path(spec: BatchSpec) -> str | None:
    """Where the error rows go; None without an output."""
    if spec.errors_path or not spec.output_path:
        return spec.errors_path
    return f"{spec.output_path}.errors.jsonl"


def is_gz(text: str) -> bool:
    """Whether a file of this name is gzipped; `.GZ` is too, as for an input."""
    return text.lower().endswith(".gz")


def manifest_path(spec: BatchSpec) -> str | None:
    """The manifest's own file, beside the output."""
    return f"{spec.output_path}.manifest.json" if spec.output_path else None


def lines(journal: Journal, rows: int, *, ok: bool) -> Iterator[bytes]:
    """The JSON of every good row, or of every other one, in input order."""
    reader = journal.reader()
    try:
        for row in range(rows):
            position, good = _position(journal, row)
            if good is ok:
                yield reader.line(position)
    finally:
        reader.close()


def records(journal: Journal, rows: int) -> Iterator[Record]:
    """The last record of every row, in input order."""
    reader = journal.reader()
    try:
        for row in range(rows):
            yield reader.record(_position(journal, row)[0])._replace(row=row)
    finally:
        reader.close()


def _position(journal: Journal, row: int) -> tuple[int, bool]:
    found = journal.position(row)
    if found is None:
        raise BatchFailed(f"row {row + 1} has no record in {journal.name}; nothing was written")
    return found


def target_of(path: Any) -> Any:
    """Where a write to `path` goes: a local link stays, and its target is written."""
    return path.resolve() if is_local(path) and path.is_symlink() else path


@contextmanager
def replacing(
    text: str, to_path: ToPath, before: Callable[[], None] = lambda: None, need: int | None = None
) -> Iterator[Any]:
    """A binary file that becomes `text` when the block ends well, and leaves no trace when it does not.

    `before` is called when all is written, just before the file gets its place; `need` is about how many bytes it
    will have, for the message of a full disk.

    A local one is written beside its place and renamed; a remote one is made in a nameless temporary file and
    uploaded whole, since an object appears when it is closed.
    """
    path = target_of(to_path(text))
    writing = _beside(path) if is_local(path) else _uploading(path)
    try:
        with writing as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            before()
    except OSError as error:
        folder = path.parent if is_local(path) else Path(tempfile.gettempdir())
        raise BatchFailed(
            f"{text} cannot be written: {disk.what(error, folder, need)}; every answer is kept in the journal; "
            f"{disk.remedy(error, text)}"
        ) from error


@contextmanager
def _beside(path: Path) -> Iterator[Any]:
    part = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.part"
    try:
        with part.open("wb", buffering=BUFFER) as file:
            yield file
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


@contextmanager
def _uploading(path: Any) -> Iterator[Any]:
    with tempfile.TemporaryFile(buffering=BUFFER) as file:
        yield file
        file.seek(0)
        _upload(file, path)


def remove_parts(spec: BatchSpec, to_path: ToPath) -> None:
    """What a try that was killed while it wrote has left beside the outputs. Call under the journal's lock."""
    for text in (spec.output_path, errors_path(spec), manifest_path(spec)):
        path = target_of(to_path(text)) if text else None
        if path is not None and is_local(path):
            for part in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.part"):
                with contextlib.suppress(OSError):
                    part.unlink()


def _upload(source: Any, path: Any) -> None:
    """Copy an open file to any path-like; a failed upload is discarded where the file system can."""
    try:
        file = path.open("wb")
        try:
            shutil.copyfileobj(source, file, 1 << 20)
        except BaseException:
            discard = getattr(file, "discard", None)
            if discard is not None:
                with contextlib.suppress(Exception):
                    discard()
            raise
        file.close()
    except OSError:
        raise
    except Exception as error:  # object stores have errors of their own
        raise OSError(str(error)) from error


@contextmanager
def compressed(file: Any, gz: bool) -> Iterator[Any]:
    """gzip without a name and a time in it, so that equal content gives equal bytes."""
    if not gz:
        yield file
        return
    inner = gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0)
    with inner, io.BufferedWriter(inner, BUFFER) as buffered:
        yield buffered


def write_errors(spec: BatchSpec, journal: Journal, rows: int, to_path: ToPath) -> str | None:
    """The errors file in input order; its path. Call only where there are errors."""
    return write_error_lines(spec, lines(journal, rows, ok=False), to_path, journal.size())


def write_error_lines(
    spec: BatchSpec, found: Iterable[bytes], to_path: ToPath, need: int | None = None
) -> str | None:
    """The errors file of these lines; its path, None where a list of prompts has none."""
    text = errors_path(spec)
    if text is None:
        return None
    with replacing(text, to_path, need=need) as file, compressed(file, is_gz(text)) as out:
        for line in found:
            out.write(line + b"\n")
    return text


def write_lines(
    spec: BatchSpec, journal: Journal, rows: int, to_path: ToPath, before: Callable[[], None]
) -> None:
    """OpenAI batch results of the good rows in input order."""
    assert spec.output_path is not None
    with (
        replacing(spec.output_path, to_path, before, journal.size()) as file,
        compressed(file, is_gz(spec.output_path)) as out,
    ):
        write = out.write
        for line in lines(journal, rows, ok=True):
            write(line + b"\n")


def read_answers(journal: Journal, rows: int) -> tuple[list[Any], list[dict[str, Any]]]:
    """Answers in input order (None for a failed row) and the error rows; for small batches only."""
    answers: list[Any] = []
    errors: list[dict[str, Any]] = []
    for record in records(journal, rows):
        line = value_of(record.line)
        if record.outcome == "ok":
            answers.append(answer_of(line["response"]["body"]))
        else:
            answers.append(None)
            errors.append(error_of(record.row, line, raw_text(record.outcome, line)))
    return answers, errors


def read_errors(journal: Journal, rows: int) -> list[dict[str, Any]]:
    """The error rows alone, where not every row has ended."""
    found, reader = [], journal.reader()
    try:
        for row in range(rows):
            position, good = journal.position(row) or (0, True)
            if not good:
                record = reader.record(position)
                line = value_of(record.line)
                found.append(error_of(row, line, raw_text(record.outcome, line)))
    finally:
        reader.close()
    return found


def error_of(row: int, line: dict[str, Any], text: Any = None) -> dict[str, Any]:
    """An error row of a list of prompts: `row` from 0, its `line` in an errors file, what the model said."""
    error = {"row": row, "custom_id": line["custom_id"], **line["error"]}
    return error if text is None else {**error, "text": text}


def raw_text(outcome: str, line: dict[str, Any]) -> Any:
    """What the model said in an answer that breaks the schema; None for every other error row."""
    if outcome != "invalid_output" or not isinstance(body := line["response"]["body"], dict):
        return None
    return answer_of(body)


def remove_stale(text: str | None, to_path: ToPath) -> None:
    """An errors file of an earlier try, once there are no errors; a file of anybody else stays."""
    if text is not None and holds_error_rows(to_path(text)):
        with contextlib.suppress(OSError):
            to_path(text).unlink(missing_ok=True)


def holds_error_rows(path: Any) -> bool:
    """Whether a file is missing, empty, or begins as the errors file of a batch does."""
    found = _first_json(path, lambda file: file.readline(1 << 24))
    error = found.get("error") if isinstance(found, dict) and "custom_id" in found else None
    return found is None or (isinstance(error, dict) and {"code", "message"} <= error.keys())


def is_manifest(path: Any) -> bool:
    """Whether a file is missing, empty, or the manifest of a batch."""
    found = _first_json(path, lambda file: file.read())
    return found is None or (isinstance(found, dict) and {"input", "outcomes"} <= found.keys())


def _first_json(path: Any, read: Callable[[Any], bytes]) -> Any:
    """None without a file or anything in it; False where it is not JSON."""
    if is_local(path) and path.exists() and not path.is_file():
        return False  # a device or a pipe: a rename would put a file in its place
    try:
        with path.open("rb") as raw:
            text = read(gzip.GzipFile(fileobj=raw) if is_gz(str(path)) else raw)
        return orjson.loads(text) if text.strip() else None
    except FileNotFoundError:
        return None
    except (OSError, EOFError, ValueError, zlib.error):
        return False
