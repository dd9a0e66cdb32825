"""What is answered already: records in, their positions out, across kills, retries and full disks.

A journal is a folder of append-only segments, one a process, so that no process ever writes after another's torn
line. A record is one line: `key row outcome prompt_tokens completion_tokens length JSON`, where JSON is the
row's line in the results or errors file. Invariants: a record counts when its whole line is there; the last
whole record of a key wins; nothing is written after a failed write.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import uuid
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from airflow_provider_vllm.batch.compact import IntMap
from airflow_provider_vllm.exceptions import BatchFailed

OK = b"ok"
SEGMENT_SHIFT = 40  # a position is segment << 40 | offset: a million segments of a terabyte
WINDOW = 1 << 18
LOCK_WAIT = 30.0


@dataclass(frozen=True)
class Record:
    """One row's end. `line` is its JSON in the results file (outcome `ok`) or the errors file."""

    key: int
    row: int
    outcome: str
    prompt_tokens: int
    completion_tokens: int
    line: bytes


@dataclass(frozen=True)
class Meta:
    """What the journal was written for."""

    fingerprint: str
    input: str
    output_path: str | None


class Journal:
    """The records of one batch on this machine's disk. One writer thread; `sync` may be called from another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.positions = array("Q")
        self._lock_fd = -1
        self._fd = -1
        self._at = 0
        self._buffer: list[bytes] = []
        self._broken = False
        self._segments: list[Path] = []
        self._base = 0

    def open(self, rows: int = 0) -> None:
        """Lock the folder and start a segment. Raises BatchFailed where another process holds or fills it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock()
            self._segments = sorted(self.folder.glob("rows-*.log"))
            path = self.folder / f"rows-{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.log"
            self._fd = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            self.close()
            raise self._failed(error) from error
        self._segments.append(path)
        self._base = (len(self._segments) - 1) << SEGMENT_SHIFT
        self.positions = array("Q", bytes(8 * rows))

    def _lock(self) -> None:
        """One process at a time: a cleared task's next try can start before the old one is dead."""
        self._lock_fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + LOCK_WAIT
        while True:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip()
                    raise BatchFailed(
                        f"process {holder or 'unknown'} still runs this batch (it holds {self.folder}/lock); "
                        "end it, or let it finish, and retry"
                    ) from None
                time.sleep(0.1)
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, b"%d\n" % os.getpid(), 0)

    def read_meta(self) -> Meta | None:
        """What an earlier try was for; None for a new journal."""
        try:
            return Meta(**json.loads((self.folder / "meta.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write_meta(self, meta: Meta) -> None:
        try:
            write_atomic(self.folder / "meta.json", json.dumps(asdict(meta), indent=1).encode())
        except OSError as error:
            raise self._failed(error) from error

    def answered(self) -> IntMap:
        """Key to position of every good answer that earlier processes left."""
        found = IntMap()
        for index, path in enumerate(self._segments[:-1]):
            base = index << SEGMENT_SHIFT
            for offset, head in _heads(path):
                if head[2] == OK:
                    found.put(int(head[0], 16), base + offset)
        return found

    def claim(self, row: int, position: int) -> None:
        """Row `row` was answered earlier, at this position."""
        self._grow(row)
        self.positions[row] = position + 1

    def add(
        self,
        key: int,
        row: int,
        outcome: bytes,
        prompt_tokens: int,
        completion_tokens: int,
        line: bytes,
    ) -> None:
        """Remember a record; `flush` writes it."""
        record = b"%016x %d %b %d %d %d %b\n" % (
            key, row, outcome, prompt_tokens, completion_tokens, len(line), line,
        )  # fmt: skip
        try:
            self.positions[row] = self._base + self._at + 1
        except IndexError:
            self._grow(row)
            self.positions[row] = self._base + self._at + 1
        self._at += len(record)
        self._buffer.append(record)

    def flush(self) -> None:
        """Give everything to the system, which keeps it when this process is killed. Raises BatchFailed."""
        if not self._buffer:
            return
        if self._broken:
            raise BatchFailed(f"the journal {self.folder} is broken by an earlier failed write")
        data = memoryview(b"".join(self._buffer))
        self._buffer.clear()
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self._broken = True
            raise self._failed(error) from error

    def sync(self) -> None:
        """Have the disk keep it when the machine dies."""
        if self._fd >= 0 and not self._broken:
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                raise self._failed(error) from error

    def read(self, row: int, windows: Windows) -> Record | None:
        """The last record of a row, flushed before."""
        at = self.positions[row] if row < len(self.positions) else 0
        return windows.record(at - 1) if at else None

    def windows(self) -> Windows:
        return Windows(self._segments)

    def close(self) -> None:
        """Flush what can be, and give the lock back. Never raises."""
        if self._fd >= 0:
            with contextlib.suppress(BatchFailed):
                self.flush()
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._lock_fd)
            self._lock_fd = -1

    def remove(self) -> None:
        """Delete every segment, after the results are in place."""
        for path in self._segments:
            path.unlink(missing_ok=True)

    def _grow(self, row: int) -> None:
        missing = row + 1 - len(self.positions)
        if missing > 0:
            self.positions.frombytes(bytes(8 * missing))

    def _failed(self, error: OSError) -> BatchFailed:
        return BatchFailed(
            f"the journal {self.folder} cannot be written: {error.strerror or error}; the rows answered so far are "
            "kept there; make room or give the user write permission, and retry"
        )


class Windows:
    """Random reads of records through a few buffered windows, since rows end nearly in order."""

    def __init__(self, segments: list[Path], keep: int = 8) -> None:
        self._paths = segments
        self._fds: dict[int, int] = {}
        self._cache: dict[int, bytes] = {}
        self._keep = keep

    def record(self, position: int) -> Record:
        head = self._bytes(position, 160)
        fields = head.split(b" ", 6)
        start = sum(len(field) for field in fields[:6]) + 6
        line = self._bytes(position + start, int(fields[5]))
        return Record(
            int(fields[0], 16),
            int(fields[1]),
            fields[2].decode(),
            int(fields[3]),
            int(fields[4]),
            line,
        )

    def _bytes(self, position: int, length: int) -> bytes:
        number, at = divmod(position, WINDOW)
        block = self._window(number)
        if at + length <= len(block):
            return block[at : at + length]
        segment, offset = position >> SEGMENT_SHIFT, position & ((1 << SEGMENT_SHIFT) - 1)
        return os.pread(self._fd(segment), length, offset)

    def _window(self, number: int) -> bytes:
        block = self._cache.get(number)
        if block is None:
            position = number * WINDOW
            segment, offset = position >> SEGMENT_SHIFT, position & ((1 << SEGMENT_SHIFT) - 1)
            block = os.pread(self._fd(segment), WINDOW, offset)
            if len(self._cache) >= self._keep:
                del self._cache[next(iter(self._cache))]
            self._cache[number] = block
        return block

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
        self._cache.clear()


def _heads(path: Path) -> Iterator[tuple[int, list[bytes]]]:
    """Offset and header fields of every whole record; stops at a torn one."""
    with path.open("rb", buffering=1 << 20) as file:
        offset = 0
        for line in file:
            fields = line.split(b" ", 6)
            if len(fields) == 7 and _whole(fields):
                yield offset, fields
            offset += len(line)


def _whole(fields: list[bytes]) -> bool:
    try:
        int(fields[0], 16)
        return fields[6].endswith(b"\n") and int(fields[5]) == len(fields[6]) - 1
    except ValueError:
        return False


def write_atomic(path: Any, data: bytes) -> None:
    """Replace a local file by new content, whole or not at all."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
