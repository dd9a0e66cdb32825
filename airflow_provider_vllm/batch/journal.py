"""What is answered already: records in, their positions out, across kills, retries and full disks.

A journal is a folder of append-only segments, one a process, so that no process ever writes after
another's torn line. Invariants: a record counts when its whole line is there; the last good record of
a key wins; nothing is written after a failed write; one process at a time, by a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import uuid
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from airflow_provider_vllm.batch.compact import IntMap
from airflow_provider_vllm.batch.records import (
    END,
    LOST,
    OK,
    SEGMENT_SHIFT,
    SUSPECT,
    Reader,
    head,
    scan,
)
from airflow_provider_vllm.exceptions import BatchFailed

LOCK_WAIT = 30.0
PROVEN = 1000


@dataclass(frozen=True)
class Meta:
    """What the journal was written for, and whose it is.

    `input` is the digest of the input, `inputs` its paths as given, `owner` a name of the task's run, where it has one.
    """

    fingerprint: str
    input: str
    output_path: str | None
    inputs: tuple[str, ...] = ()
    owner: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))  # JSON has lists

    def may_be_taken_by(self, other: Meta) -> bool:
        """Whether `other` is the same batch again: of the same owner, or else of the same input paths.

        Lists of prompts have no path: those of two known owners must have the same content.
        """
        if self.owner and self.owner == other.owner:
            return True
        if self.inputs != other.inputs:
            return False
        unnamed = not (self.owner and other.owner)
        return bool(self.inputs) or unnamed or self.input == other.input


@dataclass(frozen=True)
class Earlier:
    """What earlier tries know: positions of good answers, and losses of the server, by key.

    A count of `PROVEN` and more is of a row that took a server down alone.
    """

    answers: IntMap
    deaths: Mapping[bytes, int]


class Journal:
    """The records of one batch on this machine's disk.

    One thread adds and flushes; `sync` may be called from another.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Per row 0, or (position + 1) << 1 with the lowest bit set for a good answer: 8 bytes a row.
        self._marks = array("Q")
        self._lock_fd = self._fd = -1
        self._next = 0
        self._buffer: list[bytes] = []
        self._broken = False
        self._segments: list[Path] = []

    @property
    def name(self) -> str:
        """Where it is, for messages."""
        return str(self.folder)

    def open(self, rows: int = 0) -> None:
        """Lock the folder and start a segment; `rows` is a guess that saves growing.

        Raises BatchFailed where another process holds it or it cannot be written.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock()
            self._segments = sorted(self.folder.glob("rows-*.log"))
            name = f"rows-{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.log"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self.folder / name, flags, 0o600)
        except OSError as error:
            self.close()
            raise self._failed(error) from error
        self._segments.append(self.folder / name)
        self._next = ((len(self._segments) - 1) << SEGMENT_SHIFT) + 1
        self._marks = array("Q", bytes(8 * rows))

    def _lock(self) -> None:
        """A cleared task's next try can start before the old one is dead: wait for its end."""
        self._lock_fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + LOCK_WAIT
        while True:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BatchFailed(
                        f"{self._holder()} still runs this batch: it holds {self.folder}/lock; "
                        "let it finish or end it, and retry"
                    ) from None
                time.sleep(0.1)
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, b"%d\n" % os.getpid(), 0)

    def _holder(self) -> str:
        pid = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip()
        return f"process {pid}" if pid else "another process"

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

    def earlier(self) -> Earlier:
        """What earlier processes left."""
        answers, deaths = IntMap(), Counter[bytes]()
        for index, path in enumerate(self._segments[:-1]):
            base = index << SEGMENT_SHIFT
            for offset, fields in scan(path):
                key, outcome = fields[0], fields[2]
                if outcome == OK:
                    with contextlib.suppress(ValueError):
                        answers.put(int(key, 16), base + offset)
                elif outcome == LOST:
                    deaths[key] += 1
                elif outcome == SUSPECT:
                    deaths[key] = max(deaths[key], PROVEN)
        return Earlier(answers, deaths)

    def claim(self, row: int, position: int) -> None:
        """Row `row` was answered earlier, at this position."""
        self._mark(row, (position + 1) << 1 | 1)

    def add(self, row: int, ok: bool, start: bytes, middle: bytes, end: bytes) -> None:
        """Remember a row's record, which comes in three parts. `flush` writes it."""
        mark = self._next << 1 | ok
        try:
            self._marks[row] = mark
        except IndexError:
            self._mark(row, mark)
        self._next += len(start) + len(middle) + len(end)
        self._buffer += (start, middle, end)

    def note_loss(self, key: bytes, row: int) -> None:
        """The server was lost with this row in flight; it is no end of the row."""
        note = head(key, row, LOST)
        self._next += len(note) + 3
        self._buffer += (note, b"{}", END)

    def _mark(self, row: int, mark: int) -> None:
        missing = row + 1 - len(self._marks)
        if missing > 0:
            self._marks.frombytes(bytes(8 * max(missing, len(self._marks) // 8)))
        self._marks[row] = mark

    def flush(self) -> None:
        """Give all to the system, which keeps it when this process is killed. Raises BatchFailed."""
        if not self._buffer:
            return
        if self._broken:
            raise BatchFailed(f"the journal {self.name} is broken by an earlier failed write")
        data = b"".join(self._buffer)
        self._buffer.clear()
        try:
            written = os.write(self._fd, data)
            while written < len(data):
                written += os.write(self._fd, data[written:])
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

    def position(self, row: int) -> tuple[int, bool] | None:
        """Where the last record of a row is, and whether it is a good answer."""
        mark = self._marks[row] if row < len(self._marks) else 0
        return ((mark >> 1) - 1, bool(mark & 1)) if mark else None

    def reader(self) -> Reader:
        """Reads what was flushed."""
        return Reader(self._segments)

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

    def _failed(self, error: OSError) -> BatchFailed:
        return BatchFailed(
            f"the journal {self.name} cannot be written: {error.strerror or error}; the rows "
            "answered so far are kept there; make room, or give the user write permission, and retry"
        )


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a local file by new content, whole or not at all; only its owner may read it."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
