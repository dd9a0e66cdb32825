"""An iterator in, the same items out, made ahead of their use in a thread of its own.

Rows are read, parsed and serialised while the sender waits inside libcurl without the interpreter
lock, and a slow disk or object store does not hold up the sending. Invariants: a bounded number of
items is ahead; what the iterator raises is raised by `take`, after the items before it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
CHUNK = 64
DEPTH = 6


class Ahead(Generic[Item]):
    """`take(n)` gives up to `n` items that are ready, waiting for at least one; none at the end."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        self._ready: SimpleQueue[Any] = SimpleQueue()
        self._room = threading.Semaphore(DEPTH)
        self._chunk: list[Item] = []
        self._stopped = False
        self._ended = False
        self._thread = threading.Thread(target=self._read, name="vllm-batch-reader", daemon=True)
        self._thread.start()

    def take(self, most: int) -> list[Item]:
        """Up to `most` items, in order; an empty list when there are no more."""
        if not self._chunk and not self._refill():
            return []
        taken, self._chunk = self._chunk[:most], self._chunk[most:]
        return taken

    def _refill(self) -> bool:
        if self._ended:
            return False
        chunk = self._ready.get()
        self._room.release()
        if isinstance(chunk, list):
            self._chunk = chunk
            return True
        self._ended = True
        if chunk is not None:
            raise chunk
        return False

    def _read(self) -> None:
        error: BaseException | None = None
        try:
            while not self._stopped and (chunk := list(islice(self._items, CHUNK))):
                self._room.acquire()
                self._ready.put(chunk)
        except BaseException as raised:
            error = raised
        self._ready.put(error)

    def close(self) -> None:
        """Stop reading; the thread ends after the chunk that it is at."""
        self._stopped = True
        self._room.release()
