"""A log of any size in; the lines of each life of its server that can matter, out.

A log may hold several starts of one server (a restart loop): each is a life. Of each life the
reader keeps the beginning, the surroundings of the first surely fatal line, and the end; access
lines, statistics and progress bars leave only marks. Memory stays bounded whatever the log's size:
at most `Limits` lines and bytes for the last life and for the one before it.

The fast path reads bytes in blocks and looks at single lines only in blocks that hold a word that
can matter, since nearly all of a long-lived server's log is access lines.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from airflow_provider_vllm.diagnosis.colour import plain, plain_bytes
from airflow_provider_vllm.diagnosis.marks import MarkCache, Marks, marks_of


class Readable(Protocol):
    """A binary stream: a file, a pipe, a decompressor."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes; none at the end."""
        ...


Line = tuple[int, str]
"""Number in the file, from 1, and the line without its newline."""

HEAD_LINES = 1500
TAIL_BYTES = 12 * 1024 * 1024
CRISIS_LINES = 5000
LINE_CHARS = 16_000
BLOCK = 1 << 16
_NOTHING = Marks()

_SIGNS = (
    b"ERROR",
    b"rror:",
    b"CRITICAL",
    b"WARN",
    b"atal",
    b"Traceback",
    b"xception",
    b"version ",
    b"Initializing a",
    b"startup complete",
    b"hutdown",
    b"hutting down",
    b"illed",
    b"died",
    b"SIG",
    b"abort",
    b"erminat",
    b"KeyboardInterrupt",
    b"slurmstepd",
    b"ssert",
    b"core dumped",
    b"egmentation",
    b"annot",
    b"ailed",
    b"broadcast block",
)
_STATS = re.compile(
    r"Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, Avg generation throughput: "
    r"(?P<generation>[\d.]+) tokens/s, Running: (?P<running>\d+) reqs"
    r".*?(?:Waiting|Pending): (?P<waiting>\d+) reqs.*?KV cache usage: (?P<usage>[\d.]+)%"
)


@dataclass(frozen=True)
class Stats:
    """One line of vLLM's periodic statistics; throughputs in tokens a second, usage in percent."""

    number: int
    prompt: float
    generation: float
    running: int
    waiting: int
    usage: float


@dataclass
class Life:
    """One start of a server up to the next one, or to the end of the log."""

    first: int
    head: list[Line] = field(default_factory=list)
    crisis: list[Line] = field(default_factory=list)
    tail: deque[Line] = field(default_factory=deque)
    tail_bytes: int = 0
    started: int | None = None
    started_by: str | None = None
    ready: int | None = None
    fatal: int | None = None
    orderly: int | None = None
    first_answer: int | None = None
    first_access: int | None = None
    finished: bool = False
    troubled: bool = False
    last: int = 0
    served: deque[int] = field(default_factory=lambda: deque(maxlen=500))
    stats: deque[Stats] = field(default_factory=lambda: deque(maxlen=200))
    stages: list[str] = field(default_factory=list)

    def lines(self) -> list[Line]:
        """The kept lines in the order of the file, each once."""
        kept = dict(self.head)
        kept.update(self.crisis)
        kept.update(self.tail)
        return sorted(kept.items())

    @property
    def ended(self) -> bool:
        """Whether anything in it says that this life came to an end."""
        return self.troubled or self.fatal is not None or self.orderly is not None

    @property
    def serving(self) -> int | None:
        """The line from which on it served: that it is ready, else its first answer.

        Where the log's head was cut off and a request was answered, well or not, it served before.
        """
        headless = self.started is None and not self.stages
        if self.ready is None and headless and (self.first_answer or self.first_access):
            return self.first
        return self.ready or self.first_answer

    def over_before(self, start: str) -> bool:
        """Whether a line that starts a "server", an "engine" or a "process" begins another life.

        A server starts its engine in the same life; a script may start one engine after another.
        Each has many processes, but one that follows a failure before all that is another attempt.
        """
        if start == "process":
            return self.troubled and self.started_by is None
        if start == "engine" and self.started_by == "server":
            return False
        return self.ended or self.ready is not None

    def add(self, number: int, line: str, marks: Marks) -> None:
        """Keeps one line, or only the marks that it leaves."""
        self.last = number
        if "Avg prompt throughput" in line:
            self._count(number, line)
            return
        if marks.boring:
            if "Processed prompts:" in line:
                self.finished = marks.finished
            if marks.served:
                self.answered(number)
            if marks.accessed:
                self.first_access = self.first_access or number
            if marks.stage is None and number - self.first > HEAD_LINES:
                return
        if marks != _NOTHING:
            self._mark(number, marks)
        self.tail.append((number, line))
        self.tail_bytes += len(line) + 100
        while self.tail_bytes > TAIL_BYTES:
            old = self.tail.popleft()
            self.tail_bytes -= len(old[1]) + 100
            if len(self.head) < HEAD_LINES:
                self.head.append(old)
        if self.fatal is not None and self.crisis and len(self.crisis) < 2 * CRISIS_LINES:
            self.crisis.append((number, line))

    def judged_anew(self, lines: Iterable[Line]) -> Life:
        """The same life with the marks of these lines: its own, cut ones put together."""
        anew = Life(self.first, started=self.started, started_by=self.started_by)
        for number, line in lines:
            anew.add(number, line, marks_of(line))
        anew.head, anew.crisis, anew.tail = self.head, self.crisis, self.tail
        anew.last = self.last
        return anew

    def answered(self, number: int) -> None:
        """A request was answered at this line."""
        self.served.append(number)
        self.first_answer = self.first_answer or number

    def _count(self, number: int, line: str) -> None:
        found = _STATS.search(line)
        if found:
            numbers = {key: float(value) for key, value in found.groupdict().items()}
            self.stats.append(
                Stats(
                    number,
                    numbers["prompt"],
                    numbers["generation"],
                    int(numbers["running"]),
                    int(numbers["waiting"]),
                    numbers["usage"],
                )
            )

    def _mark(self, number: int, marks: Marks) -> None:
        stage = marks.stage
        if stage is not None and (not self.stages or self.stages[-1] != stage):
            self.stages.append(stage)
            del self.stages[:-20]
        if marks.ready:
            self.ready = self.ready or number
        if self.fatal is None and marks.fatal:
            self.fatal = number
            self.crisis = list(self.tail)[-CRISIS_LINES:]
        if self.first_answer is None and marks.at_work:
            self.first_answer = number
        self.troubled = self.troubled or marks.trouble
        if self.orderly is None and marks.orderly:
            self.orderly = number


@dataclass
class Transcript:
    """What was read: the last life, the one before it where there was one, and how many in all."""

    last: Life
    before: Life | None = None
    lives: int = 1
    total: int = 0


class _Reader:
    def __init__(self) -> None:
        self.transcript = Transcript(Life(first=1))
        self.cache = MarkCache()

    def add(self, number: int, line: str, raw: bytes | None = None) -> None:
        life = self.transcript.last
        if len(line) > LINE_CHARS:
            line = line[:LINE_CHARS]
        marks = marks_of(line) if raw is None else self.cache.of(raw, line)
        if marks.start is not None:
            if life.over_before(marks.start):
                self.transcript.before = life
                self.transcript.lives += 1
                life = self.transcript.last = Life(first=number)
            if marks.start != "process":
                life.started = life.started or number
                life.started_by = life.started_by or marks.start
        life.add(number, line, marks)


def read(source: str | os.PathLike[str] | Readable | Iterable[str]) -> Transcript:
    """Reads a path, a binary stream or an iterable of lines.

    Invalid UTF-8 is replaced, colours and line ends of any kind go. Raises OSError where a path cannot be read.
    """
    if isinstance(source, (str, os.PathLike)):
        with open(source, "rb") as stream:
            return _read_bytes(stream)
    if hasattr(source, "read"):
        return _read_bytes(source)  # type: ignore[arg-type]
    reader = _Reader()
    number = 0
    for number, line in enumerate(source, start=1):
        for part in _parts(plain(line.rstrip("\r\n"))):
            reader.add(number, part)
    reader.transcript.total = number
    return reader.transcript


def _read_bytes(stream: Readable) -> Transcript:
    reader = _Reader()
    number = 0
    for block in map(plain_bytes, _blocks(stream)):
        if any(sign in block for sign in _SIGNS):
            for raw in _split(block):
                number += 1
                _add_bytes(reader, number, raw)
            continue
        few = _split(block[-4096:])[1:][-20:] if len(block) > 4096 else _split(block)
        number += block.count(b"\n") + (not block.endswith(b"\n"))
        for offset, raw in enumerate(few):
            _add_bytes(reader, number - len(few) + offset + 1, raw)
    reader.transcript.total = number
    return reader.transcript


def _split(block: bytes) -> list[bytes]:
    lines = block.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _add_bytes(reader: _Reader, number: int, raw: bytes) -> None:
    if b'" 200' in raw and b"INFO:     " in raw[:80]:  # by far the most lines of a busy server
        life = reader.transcript.last
        life.first_access = life.first_access or number
        if b'"POST /' in raw:
            life.answered(number)
        return
    line = raw.decode("utf-8", "replace").rstrip("\r\n")
    if "\r" not in line:
        reader.add(number, line, raw)
        return
    for part in _parts(line):
        reader.add(number, part)


def _parts(line: str) -> list[str]:
    """A line with carriage returns inside (progress bars) as the pieces a terminal overwrites."""
    if "\r" not in line:
        return [line]
    return [part for part in line.split("\r") if part.strip()] or [""]


def _blocks(stream: Readable) -> Iterator[bytes]:
    rest = b""
    while chunk := stream.read(BLOCK):
        chunk = rest + chunk
        cut = chunk.rfind(b"\n") + 1
        if cut == 0 and len(chunk) < 64 * BLOCK:
            rest = chunk
            continue
        cut = cut or len(chunk)
        rest = chunk[cut:]
        yield chunk[:cut]
    if rest:
        yield rest
