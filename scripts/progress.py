"""Lines that tell a person what runs now, how far it is and how long it has taken.

Enters: the names of the stages, and now and then a word on how far one has come. Leaves: lines on
stdout, flushed at once, so that a log file shows them as early as a terminal does.

Standard library only: the set-up runs before anything is installed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


class Progress:
    """Numbers stages and prints a line when one starts, every `every` seconds, and when it ends.

    `total` is the number of stages, 0 where nobody knows it. Times are seconds since this object
    was made. Used from one thread; a helper thread prints the lines in between.
    """

    def __init__(self, total: int = 0, *, every: float = 10.0, out: TextIO | None = None) -> None:
        self._total = total
        self._every = every
        self._out = out
        self._began = time.monotonic()
        self._number = 0
        self.times: list[tuple[str, float]] = []

    def say(self, text: str) -> None:
        """Print one line with the time since the beginning."""
        elapsed = time.monotonic() - self._began
        print(f"{elapsed:7.1f} s  {text}", file=self._out, flush=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[Note]:
        """Run the body as the next stage; what the body writes into the note is shown with it."""
        self._number += 1
        of = f"/{self._total}" if self._total else ""
        label = f"[{self._number}{of}] {name}"
        self.say(f"{label} ...")
        note, over, began = Note(), threading.Event(), time.monotonic()
        ticker = threading.Thread(target=self._tick, args=(label, note, over, began), daemon=True)
        ticker.start()
        ended = "FAILED after"
        try:
            yield note
            ended = "done in"
        finally:
            over.set()
            ticker.join()
            took = time.monotonic() - began
            self.times.append((name, took))
            self.say(f"{label}: {ended} {took:.1f} s{note.suffix()}")

    def _tick(self, label: str, note: Note, over: threading.Event, began: float) -> None:
        while not over.wait(self._every):
            self.say(f"{label}: {time.monotonic() - began:.0f} s{note.suffix()}")


class Note:
    """How far a stage has come; written by the stage, read by the ticker.

    `text` is a string, or a function that gives one each time it is shown.
    """

    def __init__(self) -> None:
        self.text: str | Callable[[], str] = ""

    def suffix(self) -> str:
        text = self.text if isinstance(self.text, str) else self.text()
        return f", {text}" if text else ""
