"""The record of one row's end: how it is written, found again, and read by position.

A record is one line, `key row outcome prompt_tokens completion_tokens JSON`, where JSON is the row's
line in the results or errors file and the key is 16 hex digits. A position is
`segment << 40 | offset`. Invariant: a torn or zeroed line is no record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import orjson

from airflow_provider_vllm.exceptions import JournalFailed

OK = b"ok"
LOST = b"lost"  # a note, no end: the server was lost with this row in flight
SERVER = b"server"  # a note: from here on another server answers, which `earlier` must not mix in
SUSPECT = b"suspect"  # the end of a row that took the server down when it was alone
END = b"\n"
SEGMENT_SHIFT = 40  # a terabyte a segment
OFFSET_MASK = (1 << SEGMENT_SHIFT) - 1
WINDOW = 1 << 18
ID_MARK, RESPONSE_MARK = b'","custom_id":', b',"response":{"status_code"'


class Record(NamedTuple):
    """`line` is the row's JSON in the results file (outcome `ok`) or the errors file."""

    row: int
    outcome: str
    line: bytes


def head(
    key: bytes, row: int, outcome: bytes, prompt_tokens: int = 0, completion_tokens: int = 0
) -> bytes:
    """Everything of a record before its JSON."""
    return b"%b %d %b %d %d " % (key, row, outcome, prompt_tokens, completion_tokens)


def custom_id_of(line: bytes) -> bytes:
    """The custom id in the JSON of a good record, as JSON; see `answers.HEAD`. Empty for any other line."""
    mark = line.find(ID_MARK)
    start = mark + len(ID_MARK)
    end = line.find(RESPONSE_MARK, start)
    return line[start:end] if mark >= 0 and end >= 0 else b""


def value_of(line: bytes) -> Any:
    """The JSON of a record. A number that no double holds, which servers may send, is infinite."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return json.loads(line, parse_int=_whole)


def _whole(digits: str) -> int | float:
    """Python turns no more than 4300 digits into an integer."""
    return int(digits) if len(digits) <= 4300 else float(digits)


def scan(path: Path) -> Iterator[tuple[int, list[bytes]]]:
    """Offset and the six fields of every whole record of a segment."""
    offset = 0
    with path.open("rb", buffering=1 << 20) as file:
        for line in file:
            fields = line.split(b" ", 5)
            if len(fields) == 6 and fields[5].endswith(b"}\n") and b"\0" not in line:
                yield offset, fields
            offset += len(line)


class Reader:
    """Reads records by position through a few buffered windows, since rows end nearly in order.

    `open_fds` are segments that are open already, by number. All raises JournalFailed, naming the file.
    """

    def __init__(self, segments: list[Path], open_fds: Mapping[int, int], keep: int = 8) -> None:
        self._paths = segments
        self._fds = {segment: os.dup(fd) for segment, fd in open_fds.items()}
        self._windows: dict[int, bytes] = {}
        self._keep = keep

    def line(self, position: int) -> bytes:
        """The JSON of a record."""
        record = self._record(position)
        start = record.find(b"{")
        return record[start:] if start > 0 else self._changed(position)

    def record(self, position: int) -> Record:
        fields = self._record(position).split(b" ", 5)
        if len(fields) < 6 or not fields[1].isdigit():
            self._changed(position)
        return Record(int(fields[1]), fields[2].decode(), fields[5])

    def tokens(self, position: int) -> tuple[int, int]:
        """Prompt and completion tokens of a record."""
        fields = self._record(position).split(b" ", 5)
        if len(fields) < 6 or not (fields[3].isdigit() and fields[4].isdigit()):
            self._changed(position)
        return int(fields[3]), int(fields[4])

    def _changed(self, position: int) -> NoReturn:
        path = self._paths[position >> SEGMENT_SHIFT]
        raise JournalFailed(
            f"{path} was changed by something else while the batch ran: an answer that was in it is gone; retry, and "
            "what is missing runs again"
        )

    def _record(self, position: int) -> bytes:
        number, start = divmod(position, WINDOW)
        window = self._windows.get(number)
        if window is None:
            window = self._load(number)
        end = window.find(END, start)
        return window[start:end] if end >= 0 else self._long(number, start)

    def _load(self, number: int) -> bytes:
        position = number * WINDOW
        segment = position >> SEGMENT_SHIFT
        try:
            window = os.pread(self._fd(segment), WINDOW, position & OFFSET_MASK)
        except OSError as error:
            raise JournalFailed(
                f"{self._paths[segment]} cannot be read any more: {error.strerror}; put it back and retry, or "
                "retry without it, and its rows run again"
            ) from error
        if len(self._windows) >= self._keep:
            del self._windows[next(iter(self._windows))]
        self._windows[number] = window
        return window

    def _long(self, number: int, start: int) -> bytes:
        """A record that goes on in the next window, or the next few."""
        parts = [self._load(number)[start:]]
        while True:
            number += 1
            window = self._windows.get(number) or self._load(number)
            end = window.find(END)
            if end >= 0 or not window:
                return b"".join(parts) + window[: max(end, 0)]
            parts.append(window)

    def _fd(self, segment: int) -> int:
        if segment not in self._fds:
            if len(self._fds) >= 32:
                os.close(self._fds.pop(next(iter(self._fds))))
            self._fds[segment] = os.open(self._paths[segment], os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[segment]

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        self._windows.clear()
