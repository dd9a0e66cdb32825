"""An iterator in, its items out, as many as are asked for.

`Ahead` reads in a thread of its own, so that a slow object store, or the decoding of a block of rows, does not hold up
the sending. `Direct` reads where it is asked: of what comes fast, handing over costs more than reading. Invariants:
what the iterator raises is raised by `take`, after the items before it; a bounded number of items is ahead, and where
their size is known a bounded number of bytes and an item more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
CHUNK = 64
CHUNK_BYTES = 1 << 20
DEPTH = 6


class Direct(Generic[Item]):
    """`take(n)` gives up to `n` items, fewer of large ones where `size` gives bytes; `ended`: there are no more."""

    def __init__(self, items: Iterator[Item], size: Callable[[Item], int] | None = None) -> None:
        self._items, self._size = items, size
        self._error: BaseException | None = None
        self.ended = False

    def take(self, most: int, *, wait: bool = True) -> list[Item]:
        """Up to `most` items, in order; none at the end."""
        taken: list[Item] = []
        if self._error is None:
            try:
                if self._size is None:
                    taken.extend(islice(self._items, most))  # which keeps what came before an error
                else:
                    self._fill(taken, most, self._size)
            except BaseException as error:
                self._error = error
        if not taken:
            self.ended = True
            if self._error is not None:
                raise self._error
        return taken

    def _fill(self, taken: list[Item], most: int, size: Callable[[Item], int]) -> None:
        left = CHUNK_BYTES
        for item in islice(self._items, most):
            taken.append(item)
            left -= size(item)
            if left <= 0:
                return

    def close(self) -> None:
        """Nothing is ahead."""


class Ahead(Generic[Item]):
    """The same; without `wait`, `take(n)` may give none though more will come. `size` says the bytes of an item."""

    def __init__(self, items: Iterator[Item], size: Callable[[Item], int] | None = None) -> None:
        self._direct = Direct(items, size)
        self._ready: SimpleQueue[Any] = SimpleQueue()
        self._room = threading.Semaphore(DEPTH)
        self._chunk: list[Item] = []
        self._stopped = False
        self.ended = False
        self._thread = threading.Thread(target=self._read, name="vllm-batch-reader", daemon=True)
        self._thread.start()

    def take(self, most: int, *, wait: bool = True) -> list[Item]:
        """Up to `most` items, in order. With `wait` at least one, or the end."""
        if not self._chunk and not self._refill(wait):
            return []
        taken, self._chunk = self._chunk[:most], self._chunk[most:]
        return taken

    def _refill(self, wait: bool) -> bool:
        if self.ended:
            return False
        try:
            chunk = self._ready.get(block=wait)
        except Empty:
            return False
        self._room.release()
        if isinstance(chunk, list):
            self._chunk = chunk
            return True
        self.ended = True
        if chunk is not None:
            raise chunk
        return False

    def _read(self) -> None:
        error: BaseException | None = None
        try:
            while not self._stopped and (chunk := self._direct.take(CHUNK)):
                self._room.acquire()
                self._ready.put(chunk)
        except BaseException as raised:
            error = raised
        self._ready.put(error)

    def close(self) -> None:
        """Stop reading; the thread ends after the chunk that it is at."""
        self._stopped = True
        self._room.release()
