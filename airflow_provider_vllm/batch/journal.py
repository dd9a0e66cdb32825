"""What is answered already: records in, their positions out, across kills, retries and full disks.

A journal is a folder of append-only segments, one a process, so that no process ever writes after
another's torn line. Invariants: a record counts when its whole line is there; the last good record of
a key wins; nothing is written after a failed write; one process at a time, by a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import time
import uuid
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from airflow_provider_vllm.batch import disk
from airflow_provider_vllm.batch.compact import IntMap
from airflow_provider_vllm.batch.meta import Meta
from airflow_provider_vllm.batch.records import (
    END,
    LOST,
    OFFSET_MASK,
    OK,
    SEGMENT_SHIFT,
    SERVER,
    SUSPECT,
    Reader,
    custom_id_of,
    head,
    scan,
)
from airflow_provider_vllm.exceptions import JournalFailed

log = logging.getLogger(__name__)
LOCK_WAIT = 30.0
PROVEN = 1000


@dataclass(frozen=True)
class Earlier:
    """What earlier tries know: positions of good answers, and losses of the server, by key.

    A count of `PROVEN` and more is of a row that took a server down alone. `mixed` counts further good answers, of
    another server than the batch had begun with.
    """

    answers: IntMap = field(default_factory=IntMap)
    deaths: Mapping[bytes, int] = field(default_factory=dict)
    mixed: int = 0

    @property
    def had_answers(self) -> bool:
        return bool(len(self.answers) or self.mixed)


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
        self._broken = self._removed = False
        self._segments: list[Path] = []

    @property
    def name(self) -> str:
        """Where it is, for messages."""
        return str(self.folder)

    def open(self, rows: int = 0) -> None:
        """Lock the folder and start a segment; `rows` is a guess that saves growing.

        Raises JournalFailed where another process holds it, it cannot be written, or holds what is no journal.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock()
            for part in self.folder.glob(".meta.json.*.part"):  # of a try that was killed
                part.unlink(missing_ok=True)
            self._fetch()
            self._segments = [_segment(path) for path in sorted(self.folder.glob("rows-*.log"))]
            name = f"rows-{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.log"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self.folder / name, flags, 0o600)
        except OSError as error:
            self.close()
            raise self._failed(error) from error
        except BaseException:
            self.close()
            raise
        self._segments.append(self.folder / name)
        self._next = ((len(self._segments) - 1) << SEGMENT_SHIFT) + 1
        self._marks = array("Q", bytes(8 * rows))

    def _fetch(self) -> None:
        """What earlier tries left is in the folder already."""

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
                    raise JournalFailed(
                        f"{self._holder()} still runs this batch: it holds {self.folder}/lock; "
                        "let it finish or end it, and retry"
                    ) from None
                time.sleep(0.1)
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, b"%d\n" % os.getpid(), 0)

    def _holder(self) -> str:
        pid = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip()
        who = f"process {pid}" if pid else "another process"
        with contextlib.suppress(JournalFailed):
            if (meta := self.read_meta()) is not None and meta.owner:
                return f"{who} ({meta.owner}{f' of the run {meta.run}' if meta.run else ''})"
        return who

    def read_meta(self) -> Meta | None:
        """What an earlier try was for; None for a new journal. Raises JournalFailed for what is no journal's."""
        try:
            data = self._read_meta()
        except FileNotFoundError:
            return None
        except Exception as error:  # object stores have errors of their own
            raise JournalFailed(
                f"the journal {self.name} cannot be read: {getattr(error, 'strerror', '') or error}; give the user "
                "permission, or move it away to begin anew, and retry"
            ) from error
        try:
            return Meta.from_json(data) if data else None
        except ValueError as error:
            raise JournalFailed(
                f"{self.name}/meta.json was not written by a batch: {error}; move it away and retry: the answers in "
                f"the rows-*.log beside it are kept and found again"
            ) from error

    def _read_meta(self) -> bytes:
        return (self.folder / "meta.json").read_bytes()

    def write_meta(self, meta: Meta) -> None:
        try:
            self._write_meta(meta.to_json())
        except OSError as error:
            raise self._failed(error) from error

    def _write_meta(self, data: bytes) -> None:
        write_atomic(self.folder / "meta.json", data)

    def earlier(self) -> Earlier:
        """What earlier processes left. Raises JournalFailed for a segment that cannot be read."""
        answers, deaths, mixed = IntMap(), Counter[bytes](), 0
        for index, path in enumerate(self._segments[:-1]):
            base, same_server = index << SEGMENT_SHIFT, True
            for offset, (key, _, outcome, _, _, _) in _scan(path):
                if outcome == OK:
                    if same_server and (number := _number(key)) is not None:
                        answers.put(number, base + offset)
                    mixed += not same_server
                elif outcome == LOST:
                    deaths[key] += 1
                elif outcome == SUSPECT:
                    deaths[key] = max(deaths[key], PROVEN)
                elif outcome == SERVER:
                    same_server = False
        return Earlier(answers, deaths, mixed)

    def answered_ids(self) -> Iterator[bytes]:
        """The custom id, as JSON, of every good answer of earlier processes, whatever it was to."""
        for path in self._segments[:-1]:
            for _, fields in _scan(path):
                if fields[2] == OK:
                    yield custom_id_of(fields[5])

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

    def note_server(self) -> None:
        """Another server answers from here on, so a later try of the first one may not reuse its answers."""
        note = head(b"0" * 16, 0, SERVER)
        self._next += len(note) + 3
        self._buffer += (note, b"{}", END)

    def _mark(self, row: int, mark: int) -> None:
        missing = row + 1 - len(self._marks)
        if missing > 0:
            self._marks.frombytes(bytes(8 * max(missing, len(self._marks) // 8)))
        self._marks[row] = mark

    def flush(self) -> None:
        """Give all to the system, which keeps it when this process is killed. Raises JournalFailed."""
        if not self._buffer:
            return
        if self._broken:
            raise JournalFailed(f"the journal {self.name} is broken by an earlier failed write")
        data = b"".join(self._buffer)
        self._buffer.clear()
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            self._broken = True
            raise self._failed(error, self._still_needed(len(data) - written)) from error

    def sync(self) -> None:
        """Have the disk keep it when the machine dies."""
        if self._fd < 0 or self._broken:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise self._failed(error) from error
        if not self._removed and not self._segments[-1].exists():
            self._removed = True
            log.warning(
                "%s was removed while the batch runs: this try goes on and writes its results, but another "
                "would begin anew",
                self._segments[-1],
            )

    def position(self, row: int) -> tuple[int, bool] | None:
        """Where the last record of a row is, and whether it is a good answer."""
        mark = self._marks[row] if row < len(self._marks) else 0
        return ((mark >> 1) - 1, bool(mark & 1)) if mark else None

    def reader(self) -> Reader:
        """Reads what was flushed."""
        return Reader(self._segments, {len(self._segments) - 1: self._fd})

    def size(self) -> int:
        """Bytes of all segments, about those of the results."""
        total = 0
        for path in self._segments:
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return total

    def close(self) -> None:
        """Flush what can be, and give the lock back; a segment without a record goes. Never raises."""
        if self._fd >= 0:
            with contextlib.suppress(JournalFailed):
                self.flush()
            with contextlib.suppress(OSError):
                if not os.fstat(self._fd).st_size:  # of a try that only waited
                    self._segments[-1].unlink()
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._lock_fd)
            self._lock_fd = -1

    def _still_needed(self, unwritten: int) -> int:
        """About how many bytes the rows without a record will take, to judge by those that have one."""
        base = self._next & ~OFFSET_MASK
        own = sum(1 for mark in self._marks if mark >> 1 > base)
        left = sum(1 for mark in self._marks if not mark)
        each = ((self._next & OFFSET_MASK) - 1) / max(own, 1)
        return unwritten + int(each * left)

    def _failed(self, error: OSError, need: int | None = None) -> JournalFailed:
        where = error.filename or self.name
        return JournalFailed(
            f"the journal {self.name} cannot be written: {disk.what(error, self.folder, need)}; the rows "
            f"answered so far are kept there; {disk.remedy(error, str(where))}"
        )


def _scan(path: Path) -> Iterator[tuple[int, list[bytes]]]:
    """`records.scan`. Raises JournalFailed, naming the file."""
    try:
        yield from scan(path)
    except OSError as error:
        raise JournalFailed(
            f"{path} cannot be read: {error.strerror or error}; its answers are kept there: make it readable, "
            "or move it away to run its rows again, and retry"
        ) from error


def _segment(path: Path) -> Path:
    """Raises JournalFailed for what only has the name of a segment."""
    try:
        if stat.S_ISREG(path.stat().st_mode):
            return path
        said = "is a directory" if path.is_dir() else "is no file"
    except FileNotFoundError:
        said = "is a link to nothing"
    except OSError as error:
        said = f"cannot be looked at: {error.strerror}"
    raise JournalFailed(
        f"{path} {said}, and has the name of a journal's segment: put the file back or move this away, and retry; "
        "the answers in the other segments are kept"
    )


def _number(key: bytes) -> int | None:
    try:
        return int(key, 16)
    except ValueError:
        return None


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
