"""A CSV file in; its records out, each with the line that it begins at. And rows in, CSV out.

The format is that of RFC 4180. Invariants: what breaks it is one broken record of one line, and reading goes on
with the next line, so a quote that is never closed takes no other row along; of one record at most `held`
characters are in memory.
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

from airflow_provider_vllm.batch.source import UNREADABLE, Damaged, Source

HELD = 1 << 23
LINE_COST = 64  # bytes of a text object, beside its characters
BLOCK = 1 << 20
FIELD = (1 << 31) - 1  # csv's own limit: above it, csv goes on in the middle of the field
ENDS = ("\n", "\r")
Wrong = tuple[str, str]  # a code and what is wrong


class _TooLong(Exception):
    """The record has more characters than may be held."""


@contextlib.contextmanager
def csv_rows(source: Source, held: int = HELD) -> Iterator[CsvRows]:
    """The records of a file. Raises Damaged, naming it, where it cannot be read on."""
    rows = None
    try:
        with (
            source.open() as raw,
            io.TextIOWrapper(
                raw, encoding="utf-8-sig", errors="surrogateescape", newline=""
            ) as text,
        ):
            rows = CsvRows(text, held)
            yield rows
    except UNREADABLE as error:
        if isinstance(error, Damaged):
            raise
        after = rows.line if rows else 0
        raise Damaged(f"{source.name} cannot be read on after line {after}: {error}") from error


class CsvRows:
    """The records of an open file: `for line, cells, wrong in rows`, blank lines left out.

    A broken record, and one too long to be held, has the cells that its first line shows.
    """

    def __init__(self, file: Any, held: int = HELD) -> None:
        csv.field_size_limit(FIELD)
        self._lines = _Lines(file, min(held, FIELD - 2))
        self._wrong: Wrong | None = None

    def __iter__(self) -> Iterator[tuple[int, list[str], Wrong | None]]:
        lines = self._lines
        reader = csv.reader(lines, strict=True)
        while True:
            lines.begin()
            self._wrong = None
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                cells = self._broken(error)
            except _TooLong:
                cells = self._too_long()
            if cells or self._wrong:
                yield lines.first, cells, self._wrong

    @property
    def line(self) -> int:
        """The last line that was read."""
        return self._lines.number

    def raw(self) -> str:
        """The record that was given last as it stands in the file, with its line end."""
        taken = self._lines.taken
        text = "".join(taken[:1] if self._wrong else taken)
        return text if text.endswith(ENDS) else text + "\n"

    def _broken(self, error: csv.Error) -> list[str]:
        lines = self._lines
        shown = lines.shown()
        if len(lines.taken) > 1 or lines.ended:
            what = f"the quote that opens field {len(shown)} is not closed"
        elif '"' in lines.taken[0]:
            what = "text follows a closing quote; a quote within a quoted field is written twice"
        else:
            what = str(error)
        self._wrong = ("invalid_csv", f"not CSV: {what}")
        lines.give_back()
        return shown

    def _too_long(self) -> list[str]:
        shown, size = self._lines.shown(), self._lines.skip()
        if size is None:
            what = f"not CSV: the quote that opens field {len(shown)} is not closed"
            self._wrong = ("invalid_csv", what)
        else:
            self._wrong = ("row_too_long", f"the row has {size / 1e6:.1f} MB")
        return shown


class CsvWriter:
    """Writes rows to an open text file, so that any reader finds each again."""

    def __init__(self, file: Any) -> None:
        self._plain = csv.writer(file, lineterminator="\n").writerow
        self._quoted = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL).writerow

    def row(self, cells: list[Any]) -> None:
        """One row. csv quotes no carriage return, which ends a line for many readers."""
        bare = any(isinstance(cell, str) and "\r" in cell for cell in cells)
        (self._quoted if bare else self._plain)(cells)


class _Lines:
    """The lines of a file as csv.reader takes them; `taken` are those of the record that it is at."""

    def __init__(self, file: Any, held: int) -> None:
        self._file, self._held = file, held
        self._back: deque[str] = deque()  # lines that are read again
        self._size = 0
        self.taken: list[str] = []
        self.first = self.number = 0
        self.ended = False

    def begin(self) -> None:
        self.taken.clear()
        self._size = 0
        self.ended = False
        self.first = self.number + 1

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._next(self._held + 2)
        if not line:
            self.ended = True
            raise StopIteration
        self.taken.append(line)
        self.number += 1
        self._size += len(line) + LINE_COST
        if self._size > self._held + LINE_COST:
            raise _TooLong
        return line

    def _next(self, most: int) -> str:
        if not self._back:
            line: str = self._file.readline(most)
            return line
        line = self._back.popleft()
        return line if line.endswith(ENDS) else line + self._file.readline(most)

    def shown(self) -> list[str]:
        """The cells that the record's first line shows."""
        with contextlib.suppress(csv.Error):  # a NUL, for Python 3.10
            return next(csv.reader(self.taken[:1]), [])
        return []

    def give_back(self) -> None:
        """Read all lines of the record but its first again."""
        self._back.extendleft(reversed(self.taken[1:]))
        self.number = self.first

    def skip(self) -> int | None:
        """Read over the rest of a record that is too long; its characters.

        None where a quote in it is not closed: then its second line is read next.
        """
        quotes, size, last = _Quotes(), 0, ""
        for last in self.taken:
            size += quotes.feed(last)
        while len(self.taken) == 1 and not last.endswith(ENDS):
            last = self._file.readline(BLOCK)
            if not last:
                break
            size += quotes.feed(last)
        again, place = [*self.taken[1:], *self._back], self._file.tell()
        self.number -= len(self.taken) > 1 and not last.endswith(ENDS)  # its end counts
        while not quotes.broken and (quotes.open or not last.endswith(ENDS)):
            if quotes.open and not self._back:
                size += self._skip_quoted()
            last = self._next(BLOCK)
            if not last:
                break
            size += quotes.feed(last)
            self.number += last.endswith(ENDS)
        if not (quotes.broken or quotes.open):
            return size
        self._file.seek(place)
        self._back, self.number = deque(again), self.first
        return None

    def _skip_quoted(self) -> int:
        """Read over blocks without a quote, which are within the field; their characters."""
        size = 0
        while (block := self._file.read(BLOCK)) and '"' not in block:
            size += len(block)
            self.number += block.count("\n")
        self._back.extend(io.StringIO(block, newline=""))
        return size


START, PLAIN, QUOTED, CLOSED = "start of a field", "plain", "quoted", "just after a quote"
STOP = re.compile("[,\r\n]")


class _Quotes:
    """Whether the text so far, which may come in any parts, ends within quotes."""

    def __init__(self) -> None:
        self._state = START
        self.broken = False

    @property
    def open(self) -> bool:
        return self._state == QUOTED

    def feed(self, text: str) -> int:
        """The length of the text."""
        at, end, state = 0, len(text), self._state
        while at < end:
            if state == QUOTED:
                at = text.find('"', at) + 1 or end + 1
                state = CLOSED if at <= end else QUOTED
            elif state == PLAIN:
                stop = STOP.search(text, at)
                at = stop.end() if stop else end
                state = START if stop else PLAIN
            else:
                char, at = text[at], at + 1
                if char == '"':
                    state = QUOTED
                elif char in ",\r\n":
                    state = START
                else:
                    self.broken |= state == CLOSED
                    state = PLAIN
        self._state = state
        return end
